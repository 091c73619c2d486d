"""The Triton row kernels in Triton's interpreter: through the whole op, and called directly.

The interpreter computes with NumPy, program after program. It rounds to float16 as a GPU does, but cuts to bfloat16.
T tokens, H hidden size, V vocabulary, C columns of a chunk.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_cases import (
    BLOCK,
    CASES,
    LABEL_COLUMNS,
    REPEATED,
    ROW_COLUMNS,
    arguments,
    numbers,
    row_inverse_temperature,
    row_logits,
    row_numbers,
    row_upstream,
    upstream_gradients,
)

from tba_megatron.kernels import torch_rows
from tba_megatron.kernels.reference import linear_logprob_reference

ROOT = Path(__file__).parents[2]
EPS32 = torch.finfo(torch.float32).eps
# Relative, of a sum whose terms are gradients of logits: those are in the model's dtype, and so is the sum. bfloat16
# has 8 bits, cutting errs by one of the last, rounding the sum by half of one; float16 has 11 and rounds both times.
LOW_PRECISION = {torch.bfloat16: 2**-7 + 2**-8, torch.float16: 2**-10}
FINITE = [name for name, case in CASES.items() if case.nan != "taken"]
FLOAT32 = [name for name in FINITE if CASES[name].dtype == torch.float32]
VALUES = ("logprob", "entropy", "lse")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, dict[str, Tensor]]:
    """``triton_cases.results``, from a process whose kernels are interpreted."""
    out = tmp_path_factory.mktemp("interpreted") / "results.pt"
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "triton_cases.py", out],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@functools.cache
def specified(name: str) -> dict[str, Tensor]:
    """What the case must give, in float64 and from its rounded arguments; and what errors are measured by."""
    case = CASES[name]
    given = arguments(case)
    temperature = given["temperature"].double() if case.temperature_per_token else case.temperature
    taken = given["labels"] >= 0
    hidden = torch.where(taken[:, None], given["hidden"].double(), 0.0)
    weight = given["weight"].double()
    logits = (hidden @ weight.t()).requires_grad_()
    # With the unit matrix as the weight, the gradient of the hidden states is that of the logits.
    found = linear_logprob_reference(
        logits,
        torch.eye(case.vocab, dtype=torch.float64),
        given["labels"],
        temperature=temperature,
        valid_rows=case.valid_rows,
    )
    of_logprob, of_entropy = upstream_gradients(case)
    loss = (found.logprob * of_logprob).sum() + (found.entropy * of_entropy).sum() * case.entropy_grad
    loss.backward()
    assert logits.grad is not None
    scaled = logits.detach() / given["temperature"].double()[:, None]
    return {
        "logprob": found.logprob.detach(),
        "entropy": found.entropy.detach(),
        "lse": found.lse.detach(),
        "hidden_grad": logits.grad @ weight,
        "weight_grad": logits.grad.t() @ hidden,
        "largest hidden_grad": (logits.grad.abs() @ weight.abs()).max() if case.tokens else torch.zeros(()),
        "largest weight_grad": (logits.grad.abs().t() @ hidden.abs()).max(),
        "largest logit": scaled[:, : case.valid_rows].abs().max() if case.tokens else torch.zeros(()),
    }


def largest_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max()) if found.numel() else 0.0


def tolerance(name: str) -> float:
    """Of log-probs, in nats: the float32 logits are that far off, whatever is computed from them."""
    return max(5e-6, 4 * EPS32 * float(specified(name)["largest logit"]))


@pytest.mark.parametrize("name", FINITE)
def test_values_are_those_of_the_specification(name, interpreted):
    found = interpreted[name]
    assert ("entropy" in found) == CASES[name].entropy
    for value in VALUES:
        if value in found:
            assert found[value].dtype == torch.float32
            assert largest_difference(found[value], specified(name)[value]) <= tolerance(name), value


@pytest.mark.parametrize("name", FINITE)
def test_gradients_are_those_of_the_specification(name, interpreted):
    expected, dtype = specified(name), CASES[name].dtype
    allowed = LOW_PRECISION.get(dtype, max(1e-6, EPS32 * float(expected["largest logit"])))
    for value in ("hidden_grad", "weight_grad"):
        found = interpreted[name][value]
        assert found.dtype == dtype
        assert largest_difference(found, expected[value]) <= allowed * float(expected[f"largest {value}"]), value


@pytest.mark.parametrize("name", FLOAT32)
def test_both_back_ends_give_the_same(name, interpreted):
    by_torch, expected = numbers(CASES[name], "torch"), specified(name)
    assert interpreted[name].keys() == by_torch.keys()
    for value in by_torch:
        difference = largest_difference(interpreted[name][value], by_torch[value])
        # Of values, two roundings of what lies between 4 and 8.
        allowed = 1e-6 if value in VALUES else 1e-6 * float(expected[f"largest {value}"])
        assert difference <= allowed, value


@pytest.mark.parametrize("name", REPEATED)
def test_a_second_call_gives_the_same_bits(name, interpreted):
    first, second = interpreted[name], interpreted[f"again: {name}"]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[value], second[value]) for value in first)


@pytest.mark.parametrize("name", ["padded rows", "padded rows, bfloat16"])
def test_padded_rows_get_no_gradient_at_all(name, interpreted):
    weight_grad = interpreted[name]["weight_grad"]
    assert (weight_grad[CASES[name].valid_rows :] == 0).all()
    assert (weight_grad[: CASES[name].valid_rows] != 0).any(1).all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ignored])
def test_an_ignored_token_counts_nothing_whatever_it_holds(name, interpreted):
    ignored = arguments(CASES[name])["labels"] < 0
    assert ignored.any()
    assert all((interpreted[name][value][ignored] == 0).all() for value in (*VALUES, "hidden_grad"))


def test_a_token_that_counts_and_is_not_a_number_stays_so(interpreted):
    name = "a token not a number"
    broken = arguments(CASES[name])["hidden"].isnan().any(1)
    for value in VALUES:
        assert torch.equal(interpreted[name][value].isnan(), broken)
        assert largest_difference(interpreted[name][value][~broken], specified(name)[value][~broken]) <= 5e-6


def test_the_only_word_is_certain_to_the_last_bit(interpreted):
    found = interpreted["one word"]
    assert all((found[value] == 0).all() for value in ("logprob", "entropy", "hidden_grad", "weight_grad"))


@pytest.mark.parametrize("name", ["small sum of exps", "small sum of exps, chunks"])
def test_a_column_beyond_the_chunk_would_be_seen_if_it_had_weight(name):
    """Guards the cases: with a logit of 0 each column that fills a block up adds exp(0) to the sum."""
    case = CASES[name]
    filled_up = -(case.chunk or case.vocab) % BLOCK
    fault = torch.log1p(filled_up * torch.exp(-specified(name)["lse"]))
    assert fault.min() > 1e5 * tolerance(name)


def test_a_maximum_that_starts_at_zero_would_be_seen():
    """Guards the case: no exp of these logits has a float32 above 0."""
    assert (torch.exp(specified("beyond what exp can hold")["lse"].float()) == 0).all()


@pytest.mark.parametrize("name", ["rows", "rows, entropy"])
def test_rows_are_those_of_torch(name, interpreted):
    found, expected = interpreted[name], row_numbers(torch_rows, entropy="entropy" in name)
    assert found.keys() == expected.keys()
    for exact in ("maximum", "label_logit", "n_labels"):
        assert torch.equal(found[exact], expected[exact]), exact
    for rounded in ("exp_sum", "moment", "float32"):
        if rounded in expected:
            torch.testing.assert_close(found[rounded], expected[rounded], rtol=1e-6, atol=1e-7, msg=rounded)


@pytest.mark.parametrize("name", ["rows", "rows, entropy"])
def test_a_label_counts_in_the_chunk_that_has_its_column_and_in_no_other(name, interpreted):
    found = interpreted[name]
    logits = torch.cat(row_logits(), dim=1)
    for row, column in enumerate(LABEL_COLUMNS):
        there = 0 <= column < 2 * ROW_COLUMNS
        label_logit = logits[row, column] * row_inverse_temperature()[row] if there else 0.0
        assert found["n_labels"][row] == there
        assert found["label_logit"][row] == label_logit


def test_the_gradient_of_a_label_outside_the_chunk_is_that_of_the_other_columns(interpreted):
    first, second = (chunk.double() * row_inverse_temperature()[:, None] for chunk in row_logits())
    probability = torch.softmax(torch.cat([first, second], dim=1), dim=1)[:, :ROW_COLUMNS]
    taken = torch.tensor(LABEL_COLUMNS)[:, None] == torch.arange(ROW_COLUMNS)
    of_logprob, _ = row_upstream()
    expected = (taken.double() - probability) * (of_logprob * row_inverse_temperature())[:, None]
    assert taken.any(1).sum() == 5
    torch.testing.assert_close(interpreted["rows"]["float32"].double(), expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["rows", "rows, entropy"])
def test_low_precision_gradients_are_the_float32_ones_rounded_once(name, interpreted):
    found = interpreted[name]
    assert torch.equal(found["float16"], found["float32"].half())
    cut = (found["float32"].view(torch.int32) & -(1 << 16)).view(torch.float32)
    assert torch.equal(found["bfloat16"].float(), cut)


@pytest.mark.parametrize("name", ["rows", "rows, entropy"])
def test_row_kernels_leave_the_logits_as_they_are(name, interpreted):
    before = torch.stack(row_logits())
    assert torch.equal(interpreted[name]["logits after statistics"], before)
    assert torch.equal(interpreted[name]["logits after gradients"], before[0])
