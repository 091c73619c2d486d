"""``linear_logprob`` of a vocabulary that lies on several ranks, against float64 on one.

T tokens, H hidden size, V rows of the vocabulary. Run as a program, this file computes the cases with the Triton
kernels and writes them to the file that it is given: whether a kernel is interpreted is decided where it is decorated.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tba_megatron.errors import KernelError
from tba_megatron.kernels.linear_logprob import LogprobOut, linear_logprob
from tba_megatron.kernels.reference import linear_logprob_reference

ROOT = Path(__file__).parents[2]
N_TOKENS, HIDDEN, ROWS = 48, 24, 40  # rows of each rank, padding included
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype = torch.float32
    padding: int = 0  # rows at the end of the vocabulary; -1: all that are not the first rank's
    temperature: float | None = 1.0  # None: one for each token
    entropy: bool = True
    entropy_grad: bool = False
    sequence_parallel: bool = False
    shift: float = 0.0  # of every logit
    n_ignored: int = 9
    chunk: int | None = 7


CASES = {
    "float32": Case(),
    "float32, a shard at once": Case(chunk=None, temperature=0.7),
    "float32, no entropy": Case(entropy=False, n_ignored=0),
    "float32, padded": Case(padding=11, temperature=None, entropy_grad=True),
    "float32, a rank of padding": Case(padding=ROWS + 3, entropy_grad=True),
    "float32, one rank without padding": Case(padding=-1, temperature=0.7, entropy_grad=True),
    "float32, sequence parallel": Case(padding=11, temperature=None, entropy_grad=True, sequence_parallel=True),
    "float32, logits around 300": Case(padding=11, shift=300.0),
    "float32, logits around -300": Case(padding=11, shift=-300.0, chunk=None),
    "float32, all ignored": Case(n_ignored=N_TOKENS, entropy_grad=True),
    "bfloat16": Case(dtype=BF16, chunk=None),
    "bfloat16, padded": Case(dtype=BF16, padding=11, temperature=None, entropy_grad=True),
    "bfloat16, a rank of padding": Case(dtype=BF16, padding=ROWS, temperature=0.7, entropy_grad=True),
    "bfloat16, sequence parallel": Case(dtype=BF16, padding=11, temperature=None, sequence_parallel=True),
    "bfloat16, logits around 20": Case(dtype=BF16, padding=11, shift=20.0),
}
SIZES = (2, 4)
INTERPRETED = [name for name, case in CASES.items() if case.padding and not abs(case.shift) > 100]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H], padding included
    labels: Tensor  # [T]
    temperature: float | Tensor
    upstream: Tensor  # [2, T], of log-prob and entropy
    vocab: int  # rows without padding


def inputs_of(case: Case, tp: int) -> Inputs:
    """Labels at both sides of each boundary of shards, the first id, the last, and others; NaN where one is ignored."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    rows = ROWS * tp
    vocab = ROWS if case.padding < 0 else rows - case.padding
    hidden, weight = normal(N_TOKENS, HIDDEN), normal(rows, HIDDEN) * 0.5
    if case.shift:
        hidden[:, 0], weight[:, 0] = 8.0, case.shift / 8.0
    labels = torch.randint(0, vocab, (N_TOKENS,), generator=generator)
    edges = [0, vocab - 1, *[edge for k in range(1, tp) for edge in (k * ROWS - 1, k * ROWS) if edge < vocab]]
    order = torch.randperm(N_TOKENS, generator=generator)
    labels[order[: len(edges)]] = torch.tensor(edges)
    ignored = order[N_TOKENS - case.n_ignored :]
    labels[ignored] = -1 - ignored
    hidden[ignored] = torch.nan
    return Inputs(
        hidden=hidden.to(case.dtype),
        weight=weight.to(case.dtype),
        labels=labels,
        temperature=0.5 + torch.rand(N_TOKENS, generator=generator) if case.temperature is None else case.temperature,
        upstream=normal(2, N_TOKENS),
        vocab=vocab,
    )


class Collectives(TorchDispatchMode):
    """(name, shape of what is sent) of each collective, whoever calls for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            sent = args[1] if "_base_" in name else args[0][0]
            self.seen.append((name, tuple(sent.shape)))
        return func(*args, **(kwargs or {}))


def valid_rows(rank: int, vocab: int) -> int:
    return min(max(vocab - rank * ROWS, 0), ROWS)


def on_rank(groups, names: list[str], impl: str) -> dict[str, list[dict]]:
    """Each case twice, as this rank has it."""
    return {name: [numbers(groups, CASES[name], impl) for _ in range(2)] for name in names}


def numbers(groups, case: Case, impl: str) -> dict:
    """Values, gradients with respect to ``upstream``, and collectives; the whole hidden gradient."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    given, rank, tp = inputs_of(case, groups.tp_size), groups.tp_rank, groups.tp_size
    part = N_TOKENS // tp
    hidden = given.hidden[rank * part : (rank + 1) * part] if case.sequence_parallel else given.hidden
    hidden = hidden.clone().requires_grad_()
    weight = given.weight[rank * ROWS : (rank + 1) * ROWS].clone().requires_grad_()
    with Collectives() as forward:
        out: LogprobOut = linear_logprob(
            gather_from_sequence_parallel_region(hidden) if case.sequence_parallel else hidden,
            weight,
            given.labels,
            temperature=given.temperature,
            tp_group=cast(Any, parallel_state.get_tensor_model_parallel_group()),
            vocab_start=rank * ROWS,
            valid_rows=valid_rows(rank, given.vocab),
            reduce_hidden_grad=not case.sequence_parallel,
            entropy=case.entropy,
            entropy_grad=case.entropy_grad,
            lse=True,
            impl=impl,  # type: ignore[arg-type]
            chunk=case.chunk,
        )
    loss = (out.logprob * given.upstream[0]).sum()
    if case.entropy_grad and out.entropy is not None:
        loss = loss + (out.entropy * given.upstream[1]).sum()
    with Collectives() as backward:
        loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "values": {"logprob": out.logprob.detach(), "lse": out.lse}
        | ({} if out.entropy is None else {"entropy": out.entropy.detach()}),
        "gradients": {"hidden": hidden.grad, "weight": weight.grad},
        "forward": forward.seen,
        "backward": backward.seen,
    }


@functools.cache
def ranks_of(tp: int) -> list[dict[str, list[dict]]]:
    return run_ranks(on_rank, list(CASES), "auto", tp=tp)


@functools.cache
def expected_of(name: str, tp: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """(values, gradients, the largest logit over the temperature) in float64."""
    case, given = CASES[name], inputs_of(CASES[name], tp)
    hidden, weight = given.hidden.double().requires_grad_(), given.weight.double().requires_grad_()
    out = linear_logprob_reference(hidden, weight, given.labels, temperature=given.temperature, valid_rows=given.vocab)
    loss = (out.logprob * given.upstream[0]).sum()
    if case.entropy_grad:
        loss = loss + (out.entropy * given.upstream[1]).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    logits = given.hidden.double() @ given.weight[: given.vocab].double().t()
    logits /= torch.as_tensor(given.temperature).expand(N_TOKENS)[:, None]
    taken = logits[given.labels >= 0]
    values = {"logprob": out.logprob.detach(), "entropy": out.entropy.detach(), "lse": out.lse.detach()}
    return values, {"hidden": hidden.grad, "weight": weight.grad}, float(taken.abs().max()) if len(taken) else 0.0


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def assert_exact(name: str, ranks: list[dict], bfloat16_tolerance: float = 4e-3) -> None:
    """``ranks``: what each rank found for the case."""
    case, (values, gradients, largest) = CASES[name], expected_of(name, len(ranks))
    eps = torch.finfo(torch.float32).eps
    for found in ranks:
        assert found["values"].keys() == ({"logprob", "lse", "entropy"} if case.entropy else {"logprob", "lse"})
        for key, value in found["values"].items():
            assert value.dtype == torch.float32
            assert float((value - values[key]).abs().max()) <= max(5e-6, 4 * eps * largest), key
    joined = {"weight": torch.cat([found["gradients"]["weight"] for found in ranks])}
    hidden = [found["gradients"]["hidden"] for found in ranks]
    joined["hidden"] = torch.cat(hidden) if case.sequence_parallel else hidden[-1]
    # A logit is off by eps of itself, and so is the share of a token in the gradient.
    tolerance = max(bfloat16_tolerance if case.dtype == BF16 else 1e-6, 4 * eps * abs(case.shift))
    for key, gradient in joined.items():
        assert gradient.dtype == case.dtype
        error = (gradient.double() - gradients[key]).norm()
        assert float(error) <= tolerance * float(gradients[key].norm()), (key, float(error))
    given = inputs_of(case, len(ranks))
    assert not joined["hidden"][given.labels < 0].any()
    assert not joined["weight"][given.vocab :].any()


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_the_vocabulary_find_what_float64_finds_on_one(name, tp):
    assert_exact(name, [rank[name][0] for rank in ranks_of(tp)])


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_and_every_run_finds_the_same_bits(name, tp):
    first, again = ([rank[name][run] for rank in ranks_of(tp)] for run in (0, 1))
    for found, repeated in zip(first, again, strict=True):
        assert bits(found["values"]) == bits(first[0]["values"])
        assert bits(found["values"]) == bits(repeated["values"])
        assert bits(found["gradients"]) == bits(repeated["gradients"])
        if not CASES[name].sequence_parallel:
            assert bits({"": found["gradients"]["hidden"]}) == bits({"": first[0]["gradients"]["hidden"]})


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_exchange_numbers_of_tokens_forward_and_hidden_gradients_backward(name, tp):
    case = CASES[name]
    n_taken = N_TOKENS - case.n_ignored
    forward: list = [("allreduce_", (n_taken,)), ("allreduce_", (4 if case.entropy else 3, n_taken))]
    backward: list = [("allreduce_", (n_taken, HIDDEN))]
    if case.sequence_parallel:
        forward.insert(0, ("_allgather_base_", (N_TOKENS // tp, HIDDEN)))
        backward = [("_reduce_scatter_base_", (N_TOKENS, HIDDEN))]
    if not n_taken:
        forward, backward = [], []
    for rank in ranks_of(tp):
        assert rank[name][0]["forward"] == forward
        assert rank[name][0]["backward"] == backward


REFUSED: dict[str, tuple[dict, str]] = {
    # changes to a good call ("label": of one token; "overlap": rows of rank 0 that rank 1 has too), and what is said
    "padding": ({"label": ROWS * 2 - 11}, "label 69 is a row of the vocabulary that no rank has"),
    "beyond": ({"label": ROWS * 2}, "label 80 is a row of the vocabulary that no rank has"),
    "twice": ({"label": 30, "overlap": 12}, "label 30 is a row of the vocabulary that 2 ranks have"),
    "temperature": ({"temperature": 0.0}, "temperature is 0.0"),
    "temperature of a token": ({"temperature": torch.full((N_TOKENS,), torch.nan)}, r"temperature\[1\] is nan"),
    "dtypes": ({"hidden": torch.zeros(N_TOKENS, HIDDEN, dtype=BF16)}, "hidden and weight are torch.bfloat16 and"),
}


def refused(groups) -> dict[str, tuple[str, bool]]:
    """What each bad call says on this rank, and whether a good one gives the same bits before and after it."""
    from megatron.core import parallel_state

    given, rank = inputs_of(Case(padding=11), groups.tp_size), groups.tp_rank
    good = {
        "hidden": given.hidden,
        "weight": given.weight[rank * ROWS : (rank + 1) * ROWS],
        "labels": given.labels,
        "tp_group": cast(Any, parallel_state.get_tensor_model_parallel_group()),
        "vocab_start": rank * ROWS,
        "valid_rows": valid_rows(rank, given.vocab),
    }
    before, said = linear_logprob(**good).logprob, {}
    for name, (changes, _) in REFUSED.items():
        changes, labels = dict(changes), given.labels.clamp(max=20)
        labels[7] = changes.pop("label", 0)
        changes |= {"labels": labels, "vocab_start": rank * (ROWS - changes.pop("overlap", 0))}
        try:
            linear_logprob(**(good | changes))
        except KernelError as error:
            said[name] = str(error), torch.equal(linear_logprob(**good).logprob, before)
    return said


def test_a_bad_call_is_refused_with_the_same_line_on_every_rank_and_holds_none_up():
    first, second = run_ranks(refused, tp=2, limit_s=60.0)
    assert first.keys() == REFUSED.keys()
    for name, (_, message) in REFUSED.items():
        assert first[name] == second[name]
        line, is_good = first[name]
        assert re.search(message, line) and "\n" not in line and is_good


@pytest.mark.slow  # the interpreter takes seconds to start
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_find_it_too(tmp_path):
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, __file__, str(tmp_path / "ranks")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = pickle.loads((tmp_path / "ranks").read_bytes())
    for name in INTERPRETED:
        # The interpreter (3.9.0) cuts a float32 off where a GPU rounds it to bfloat16: twice the error.
        assert_exact(name, [rank[name][0] for rank in ranks], bfloat16_tolerance=8e-3)
        for rank in ranks:
            assert bits(rank[name][0]["values"]) == bits(ranks[0][name][1]["values"])
            assert bits(rank[name][0]["gradients"]) == bits(rank[name][1]["gradients"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(run_ranks(on_rank, INTERPRETED, "triton", tp=2)))
