"""Ways from hidden states to log-probs that are held side by side, and the problems they are given.

T tokens, H hidden size, V rows of the vocabulary. Needs torch alone; triton and liger-kernel where they are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tba_megatron.kernels.linear_logprob import linear_logprob

LogProb = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [T, H], weight [V, H], labels [T] -> [T] float32

LIGER = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
EPS = torch.finfo(torch.float32).eps
LOGIT_STD = 3.0
EXACT_COLUMNS = 8192
EXACT_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    tokens: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.hidden} x {self.vocabulary}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Inputs whose logits have a standard deviation of ``LOGIT_STD``, and what arrives at each log-prob."""

    hidden: Tensor  # [T, H], a leaf with gradient
    weight: Tensor  # [V, H], a leaf with gradient
    labels: Tensor  # [T] int64, none ignored: the trainer takes response tokens only
    upstream: Tensor  # [T] float32, d loss / d log-prob

    def forward(self, logprob: LogProb) -> Tensor:
        return logprob(self.hidden, self.weight, self.labels)

    def forward_backward(self, logprob: LogProb) -> None:
        """Leaves gradients in the leaves, which had none."""
        self.hidden.grad = self.weight.grad = None
        (self.forward(logprob) * self.upstream).sum().backward()

    def drop_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


def make_problem(shape: Shape, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    labels = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    weight = normal(shape.vocabulary, shape.hidden).mul_(LOGIT_STD / shape.hidden**0.5)
    return Problem(
        hidden=normal(shape.tokens, shape.hidden).to(dtype).requires_grad_(),
        weight=weight.to(dtype).requires_grad_(),
        labels=labels,
        upstream=normal(shape.tokens),
    )


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits of the model's dtype, whole, then a float32 log-softmax of them."""
    return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, labels[:, None])[:, 0]


def ours(**options: Any) -> LogProb:
    def logprob(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_logprob(hidden, weight, labels, **options).logprob

    return logprob


def liger(device: torch.device) -> tuple[LogProb | None, str]:
    """liger-kernel's per-token op, and which of its implementations ``device`` gets; None and why it cannot be had."""
    try:
        module = importlib.import_module(LIGER)
    except ModuleNotFoundError as error:
        return None, "not installed" if error.name == "liger_kernel" else f"not importable: no module {error.name}"
    except Exception as error:  # built for another torch or triton, it raises what it likes
        return None, f"not importable: {type(error).__name__}: {error}"
    try:
        implementation = module._resolve_implementation(device)
    except Exception as error:
        # Its kernel for this card needs more packages; its torch fallback runs anywhere.
        note = f"torch fallback, since its own kernel is not importable: {error}"
        return _negated(module._FusedLinearPPOFallbackFunction, (1.0, -100, False)), note
    return _negated(module.LigerFusedLinearScaledCrossEntropyFunction, ()), implementation.__name__


def _negated(function: Any, rest: tuple[Any, ...]) -> LogProb:
    return lambda hidden, weight, labels: -function.apply(hidden, weight, labels, *rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    logprob: Tensor  # [n] float64, of the first n tokens
    limit: float  # how far a float32 log-prob may be from it, in nats
    unrounded_limit: float  # the same where a product's partial sums are cut and not rounded, as in tensor cores

    def error(self, logprob: Tensor) -> float:
        """The largest one of ``logprob`` [T], T >= n."""
        return float(self._errors(logprob).abs().max())

    def mean_error(self, logprob: Tensor) -> float:
        """With its sign: partial sums that are cut are all off to one side."""
        return float(self._errors(logprob).mean())

    def _errors(self, logprob: Tensor) -> Tensor:
        return logprob[: len(self.logprob)].detach().double() - self.logprob


@torch.no_grad()
def exact_logprob(problem: Problem, n_tokens: int = EXACT_TOKENS) -> Exact:
    """In float64, the weight converted some rows at a time."""
    hidden, labels = problem.hidden[:n_tokens].double(), problem.labels[:n_tokens]
    logits = torch.cat([hidden @ rows.double().t() for rows in problem.weight.split(EXACT_COLUMNS)], dim=1)
    return Exact(
        logprob=torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0],
        limit=value_limit(float(logits.abs().max())),
        # A tensor core adds 8 or 16 terms at a time. Logits in bfloat16 are off by some ten thousand roundings.
        unrounded_limit=value_limit(float(logits.abs().max()), max(4, hidden.shape[1] // 8)),
    )


def value_limit(largest_logit: float, roundings: int = 4) -> float:
    """5e-6 nats, or some float32 roundings of the largest logit where that is more."""
    return max(5e-6, roundings * EPS * largest_logit)
