"""What the Triton row kernels compute in Triton's interpreter, as a program of its own: ``triton_cases.py OUT``.

Whether a kernel is interpreted is decided where it is decorated, by TRITON_INTERPRET=1. So a test runs this file in a
process with the flag, once for all cases, and finds in OUT what ``results`` gives. T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from tba_megatron.kernels.linear_logprob import linear_logprob
from tba_megatron.kernels.torch_rows import Upstream, new_statistics

BLOCK = 1024  # columns that a program of the kernels sees at once
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of ``linear_logprob`` and how their numbers are drawn."""

    tokens: int = 11
    hidden: int = 24
    vocab: int = 1500
    valid_rows: int | None = None
    dtype: torch.dtype = torch.float32
    temperature: float = 0.8
    temperature_per_token: bool = False  # from half to twice the above
    entropy: bool = True
    entropy_grad: bool = True
    chunk: int | None = None
    shift: float = 0.0  # added to all logits / temperature
    strided: bool = False  # every argument a view that is not contiguous
    ignored: bool = False  # each fourth token
    nan: Literal["none", "ignored", "taken"] = "none"  # in the hidden states of these tokens


CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "float32, entropy without gradient": Case(entropy_grad=False),
    "float32, no entropy": Case(entropy=False, entropy_grad=False),
    "bfloat16, no entropy": Case(dtype=torch.bfloat16, entropy=False, entropy_grad=False),
    "float16, no entropy": Case(dtype=torch.float16, entropy=False, entropy_grad=False),
    "temperature per token": Case(temperature_per_token=True),
    "sharp": Case(temperature=0.05),
    "padded rows": Case(valid_rows=1337),
    "padded rows, bfloat16": Case(valid_rows=1025, dtype=torch.bfloat16),
    "chunk smaller than a block": Case(chunk=300),
    "chunk of one block": Case(chunk=BLOCK, vocab=2 * BLOCK),
    "chunk larger than a block": Case(chunk=1400, vocab=3000),
    "chunk larger than the vocabulary": Case(chunk=5000),
    "chunks of one column": Case(chunk=1, vocab=5, tokens=3),
    "strided": Case(strided=True, ignored=True, temperature_per_token=True, chunk=700),
    "strided, bfloat16": Case(strided=True, ignored=True, dtype=torch.bfloat16),
    "one token": Case(tokens=1),
    "no tokens": Case(tokens=0),
    "all ignored": Case(tokens=1, ignored=True),
    "three words": Case(vocab=3),
    "one word": Case(vocab=1, temperature=0.7, shift=-77.0),
    "shifted up": Case(shift=300.0),
    "shifted down": Case(shift=-300.0),
    "shifted down, chunks": Case(shift=-300.0, chunk=300, entropy=False, entropy_grad=False),
    "beyond what exp can hold": Case(shift=-130.0),
    "small sum of exps": Case(vocab=BLOCK + 76, shift=-9.0),
    "small sum of exps, chunks": Case(vocab=BLOCK + 76, shift=-9.0, chunk=500),
    "ignored tokens not a number": Case(ignored=True, nan="ignored"),
    "a token not a number": Case(nan="taken"),
}
REPEATED = ("float32", "bfloat16", "shifted down, chunks")


def arguments(case: Case) -> dict[str, Tensor]:
    """hidden, weight, labels and temperature [T] of a case; the same at every call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def viewed(values: Tensor) -> Tensor:
        """The same values, every second of a larger tensor."""
        if not case.strided:
            return values
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 17, dtype=values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]

    temperature = torch.full((case.tokens,), case.temperature)
    if case.temperature_per_token:
        temperature *= torch.linspace(0.5, 2.0, case.tokens)
    # Logits of spread 1 at any temperature, and a last component that shifts all those of a token.
    hidden = normal(case.tokens, case.hidden) * temperature[:, None]
    hidden[:, -1] = temperature
    weight = normal(case.vocab, case.hidden) / case.hidden**0.5
    weight[:, -1] = case.shift
    labels = torch.randint(0, case.valid_rows or case.vocab, (case.tokens,), generator=generator)
    if case.tokens > 1:
        labels[0], labels[1] = 0, (case.valid_rows or case.vocab) - 1
    if case.ignored:
        labels[::4] = IGNORED
    if case.nan == "ignored":
        hidden[::4] = torch.nan
    elif case.nan == "taken":
        hidden[5, 3] = torch.nan
    return {
        "hidden": viewed(hidden.to(case.dtype)),
        "weight": viewed(weight.to(case.dtype).t()).t() if case.strided else weight.to(case.dtype),
        "labels": viewed(labels),
        "temperature": viewed(temperature),
    }


def upstream_gradients(case: Case) -> Tensor:
    """[2, T]: of the log-probs and of the entropies."""
    return torch.randn(2, case.tokens, generator=torch.Generator().manual_seed(1))


def numbers(case: Case, impl: Literal["torch", "triton"]) -> dict[str, Tensor]:
    """Everything that ``linear_logprob`` gives, and the gradients; what is None is left out."""
    given = arguments(case)
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    found = linear_logprob(
        hidden,
        weight,
        given["labels"],
        temperature=given["temperature"] if case.temperature_per_token else case.temperature,
        valid_rows=case.valid_rows,
        entropy=case.entropy,
        entropy_grad=case.entropy_grad,
        lse=True,
        impl=impl,
        chunk=case.chunk,
    )
    of_logprob, of_entropy = upstream_gradients(case)
    loss = (found.logprob * of_logprob).sum()
    if case.entropy_grad and found.entropy is not None:
        loss = loss + (found.entropy * of_entropy).sum()
    loss.backward()
    named = {"logprob": found.logprob, "entropy": found.entropy, "lse": found.lse}
    named |= {"hidden_grad": hidden.grad, "weight_grad": weight.grad}
    return {name: value.detach() for name, value in named.items() if value is not None}


# Of two chunks of ROW_COLUMNS columns each; some are no place in 32 bits of which 32 would be one.
ROW_COLUMNS = 1300
LABEL_COLUMNS = (0, 7, 1023, 1024, ROW_COLUMNS - 1, ROW_COLUMNS, ROW_COLUMNS + 5, -1, -5000, 1 << 33, (1 << 33) + 3)
STATISTICS = ("maximum", "exp_sum", "moment", "label_logit", "n_labels")
ROW_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def row_logits() -> tuple[Tensor, Tensor]:
    """The logits of both chunks, [T, ROW_COLUMNS] each and views: between two rows there is something else."""
    shape = (2, len(LABEL_COLUMNS), ROW_COLUMNS + 10)
    first, second = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return first[:, 3:-7], second[:, 3:-7]


def row_inverse_temperature() -> Tensor:
    return torch.linspace(0.5, 2.0, len(LABEL_COLUMNS))


def row_upstream() -> Tensor:
    """[2, T]: of the log-probs and of the entropies."""
    return torch.randn(2, len(LABEL_COLUMNS), generator=torch.Generator().manual_seed(3))


def row_numbers(kernels: ModuleType, *, entropy: bool) -> dict[str, Tensor]:
    """What the row kernels of a back end make of the two chunks: statistics of both, gradients of the first."""
    columns = torch.tensor(LABEL_COLUMNS)
    inverse_temperature = row_inverse_temperature()
    statistics = new_statistics(len(columns), torch.device("cpu"), entropy=entropy)
    logits = row_logits()
    for number, chunk in enumerate(logits):
        kernels.update_statistics(statistics, chunk, columns - number * ROW_COLUMNS, inverse_temperature)
    found = {name: getattr(statistics, name) for name in ("maximum", "exp_sum", "moment", "label_logit", "n_labels")}
    of_logprob, of_entropy = row_upstream()
    exp_sum, moment = statistics.exp_sum, statistics.moment
    upstream = Upstream(
        maximum=statistics.maximum,
        exp_sum=exp_sum,
        entropy=None if moment is None else exp_sum.log() - moment / exp_sum,
        logprob_grad=of_logprob,
        entropy_grad=of_entropy if entropy else None,
    )
    found["logits after statistics"] = torch.stack(logits)
    for name, dtype in ROW_DTYPES.items():
        first, _ = row_logits()
        found[name] = kernels.logit_gradients(first, columns, inverse_temperature, upstream, dtype)
        found["logits after gradients"] = first
    return {name: value for name, value in found.items() if value is not None}


def results() -> dict[str, dict[str, Tensor]]:
    """By case, "rows" and "rows, entropy"; "again: " before those that are computed a second time."""
    from tba_megatron.kernels import triton_rows

    found = {name: numbers(case, "triton") for name, case in CASES.items()}
    found |= {f"again: {name}": numbers(CASES[name], "triton") for name in REPEATED}
    found["rows"] = row_numbers(triton_rows, entropy=False)
    found["rows, entropy"] = row_numbers(triton_rows, entropy=True)
    return found


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
