"""The Triton kernels of ``balance`` in Triton's interpreter, against the torch back end.

Whether a kernel is interpreted is decided where it is decorated, so this file runs itself in a process with the flag.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tba_megatron.kernels.balance import BalanceOut, balance, segment_sum

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def case_of(sequences: Tensor, groups: list[int], n_groups: int, dtype: torch.dtype = torch.float64) -> dict:
    """Random arguments of ``balance``."""
    generator = torch.Generator().manual_seed(0)

    def rand(n: int) -> Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    return {
        "logprob": -3 * rand(len(sequences)).to(dtype),
        "reference": -3 * rand(len(sequences)).to(dtype),
        "sequence_index": sequences,
        "group_index": torch.tensor(groups, dtype=torch.int64),
        "reward_over_beta": 20 * rand(len(groups)),
        "copies": torch.randint(1, 5, (len(groups),), generator=generator).double(),
        "n_groups": n_groups,
        "scale": 0.1,  # has no float32 of the same value
    }


def random_order(n_tokens: int, n_sequences: int) -> Tensor:
    return torch.randint(0, n_sequences, (n_tokens,), generator=torch.Generator().manual_seed(1))


def with_sums(case: dict) -> dict:
    """The reference as sums over sequences."""
    sums = segment_sum(case["reference"], case["sequence_index"], len(case["group_index"]))
    return {name: value for name, value in case.items() if name != "reference"} | {"reference_sums": sums}


def changed(case: dict, **places: tuple[int, float]) -> dict:
    """``case`` with one value of some arguments replaced."""
    copies = {name: case[name].clone() for name in places}
    for name, (place, value) in places.items():
        copies[name][place] = value
    return case | copies


def strided() -> dict:
    """Every second value of tensors of twice the length."""
    case = case_of(random_order(200, 7), [1, 0, 1, 3, 1, 0, 0], 4)
    return {k: torch.stack([v, v + 1], 1)[:, 0] if isinstance(v, Tensor) else v for k, v in case.items()}


def several_blocks() -> dict:
    """A sequence of more tokens, and a group of more sequences, than one block holds."""
    sequences = torch.cat([torch.zeros(2500, dtype=torch.int64), random_order(300, 150)])
    return case_of(sequences, [0] * 150, 1, torch.float32)


NOTHING = torch.zeros(0, dtype=torch.int64)
INTERLEAVED = random_order(200, 7)
CASES: dict[str, Callable[[], dict]] = {
    "float32": lambda: case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4, torch.float32),
    "float64": lambda: case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4),
    "sums": lambda: with_sums(case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4, torch.float32)),
    "int32 indices": lambda: case_of(INTERLEAVED.int(), [0, 1, 0, 1, 0, 1, 1], 2),
    "strided": strided,
    "several blocks": several_blocks,
    "nothing": lambda: case_of(NOTHING, [], 0),
    "empty groups": lambda: case_of(NOTHING, [], 3),
    "no tokens": lambda: case_of(NOTHING, [1, 0, 1], 2),
    "groups of one": lambda: case_of(torch.tensor([0, 2]), [2, 1, 0], 3),
    "no copies, not a number": lambda: changed(
        case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4), copies=(2, 0.0), reward_over_beta=(2, math.nan)
    ),
    "reward nan": lambda: changed(case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4), reward_over_beta=(0, math.nan)),
    "reward inf": lambda: changed(case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4), reward_over_beta=(0, math.inf)),
    "reference nan": lambda: changed(case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4), reference=(9, math.nan)),
    "log-prob inf": lambda: changed(case_of(INTERLEAVED, [1, 0, 1, 3, 1, 0, 0], 4), logprob=(9, -math.inf)),
}


def numbers(case: dict, impl: str) -> dict[str, Tensor]:
    """Everything that ``balance`` gives, and the gradient of the log-probs."""
    leaf = case["logprob"].detach().requires_grad_()
    found = balance(**case | {"logprob": leaf, "impl": impl})
    found.loss.backward()
    assert leaf.grad is not None
    named = {field.name: getattr(found, field.name).detach() for field in fields(BalanceOut)}
    assert all(value.dtype == torch.float64 for value in named.values())
    return named | {"gradient": leaf.grad}


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the larger of 1 and the value; inf unless both are finite at the same places."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    finite = expected.isfinite()
    if not torch.equal(found.isnan(), expected.isnan()) or not torch.equal(found.isfinite(), finite):
        return math.inf
    found, expected = found[finite].double(), expected[finite].double()
    relative = (found - expected).abs() / expected.abs().clamp(min=1.0)
    return float(relative.max()) if relative.numel() else 0.0


def apart_as_together() -> bool:
    """Whether tokens that lie between those of others give the bits that they give in a row."""
    case = CASES["float64"]()  # sums of float32 values are exact in float64, in any order
    order = torch.sort(case["sequence_index"], stable=True).indices
    in_a_row = case | {name: case[name][order] for name in ("logprob", "reference", "sequence_index")}
    found, expected = numbers(case, "triton"), numbers(in_a_row, "triton")
    expected["gradient"] = expected["gradient"][torch.argsort(order)]
    return all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.fixture(scope="module")
def measured() -> dict:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_what_torch_gives(name, measured):
    gradient_tolerance = 1e-7 if CASES[name]()["logprob"].dtype == torch.float32 else 1e-12
    assert measured[name].keys() == {field.name for field in fields(BalanceOut)} | {"gradient"}
    for value, difference in measured[name].items():
        assert difference <= (gradient_tolerance if value == "gradient" else 1e-12), value


@pytest.mark.parametrize("name", CASES)
def test_torch_finds_the_loss_nan_only_where_a_value_that_counts_is_not_finite(name):
    loud = name in ("reward nan", "reward inf", "reference nan", "log-prob inf")
    assert numbers(CASES[name](), "torch")["loss"].isnan() == loud


def test_where_tokens_lie_among_others_changes_no_bit(measured):
    assert measured["apart as together"] is True


def test_triton_is_imported_only_where_it_is_used():
    code = (
        "import sys, torch; from tba_megatron.kernels.balance import balance; x = torch.zeros(1); "
        "i = torch.zeros(1).long(); "
        "balance(x, i, i, reference=x, reward_over_beta=x, copies=x, n_groups=1, scale=1.0); "
        "print([m for m in sys.modules if m.endswith('triton_balance')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


if __name__ == "__main__":
    results: dict = {}
    for case_name, make in CASES.items():
        by_triton, by_torch = numbers(make(), "triton"), numbers(make(), "torch")
        results[case_name] = {name: largest_difference(by_triton[name], by_torch[name]) for name in by_torch}
    results["apart as together"] = apart_as_together()
    print(json.dumps(results))
