"""Both ops against their float64 specification on a device: small cases, each with its errors and their limits.

T tokens, H hidden size, V rows of the vocabulary, S sequences, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.head_methods import EPS, value_limit
from tba_megatron.kernels.balance import Impl, balance
from tba_megatron.kernels.linear_logprob import linear_logprob
from tba_megatron.kernels.reference import balance_reference, linear_logprob_reference

GRADIENT_LIMIT = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
BALANCE_LIMIT = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    tokens: int = 197
    hidden: int = 128
    vocabulary: int = 1000
    valid_rows: int | None = None
    temperature: float = 0.7
    temperature_by_token: bool = False
    ignored: bool = False  # every seventh token, whose hidden state is NaN
    entropy: bool = False  # with gradient
    main_grad: bool = False
    chunk: int | None = None
    shift: float = 0.0  # added to each logit
    roundings: int = 4  # of the largest logit that a value may be off by, and a quarter of it for a gradient


CASES = (
    Case(name="plain", temperature=1.0),
    Case(name="entropy", entropy=True),
    Case(name="entropy in chunks of 96", entropy=True, chunk=96),
    Case(name="chunks beyond a block", vocabulary=3001, chunk=1500, entropy=True),
    Case(name="padded rows", valid_rows=937, chunk=512, entropy=True),
    Case(name="temperature by token", temperature_by_token=True, entropy=True, chunk=300),
    Case(name="ignored tokens", ignored=True, entropy=True, chunk=300),
    Case(name="main_grad", main_grad=True, valid_rows=937, chunk=300),
    # All of the H terms of such a logit are added to a sum of that size, and rounded.
    Case(name="all logits near -300", shift=-300.0, roundings=16, entropy=True, chunk=300),
    Case(name="all logits near 300", shift=300.0, roundings=16, entropy=True, chunk=300),
    Case(name="temperature 0.05", temperature=0.05, entropy=True),
    Case(name="no token", tokens=0, entropy=True),
    Case(name="one token", tokens=1, hidden=16, vocabulary=3, entropy=True),
)


def compare(case: Case, dtype: torch.dtype, impl: Impl, device: torch.device) -> dict[str, Any]:
    """The largest error of each result (gradients: norm of the difference over norm), and ``ok`` against the limits.

    ``ok`` also asks for gradients of exactly 0 where there is nothing to learn, and for the same bits in a second run.
    """
    hidden, weight, labels, temperature = _inputs(case, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    upstream = torch.randn(2, case.tokens, generator=generator, device=device)
    found = _run(case, hidden, weight, labels, temperature, upstream, impl)
    again = _run(case, hidden, weight, labels, temperature, upstream, impl)

    exact_hidden, exact_weight = (x.double().requires_grad_() for x in (hidden, weight))
    out = linear_logprob_reference(
        exact_hidden, exact_weight, labels, temperature=temperature, valid_rows=case.valid_rows
    )
    total = (out.logprob * upstream[0]).sum()
    if case.entropy:
        total = total + (out.entropy * upstream[1]).sum()
    exact_grads = torch.autograd.grad(total, (exact_hidden, exact_weight))
    exact = {"logprob": out.logprob, "entropy": out.entropy, "lse": out.lse}
    gradients = dict(zip(("hidden_grad", "weight_grad"), exact_grads, strict=True))

    largest = _largest_logit(case, hidden, weight, labels, temperature)
    limit = value_limit(largest, case.roundings)
    # Where logits are large their own float32 rounding is what a gradient can know.
    gradient_limit = max(GRADIENT_LIMIT[dtype], case.roundings / 4 * EPS * largest)
    errors = {name: _distance(found[name], exact[name]) for name in exact if name in found}
    ok = all(error <= limit for error in errors.values())
    for name, gradient in gradients.items():
        errors[name] = _relative(found[name], gradient)
        ok = ok and errors[name] <= gradient_limit
    nothing = [found["hidden_grad"][labels < 0], found["weight_grad"][case.valid_rows or case.vocabulary :]]
    ok = ok and not any(bool(part.any()) for part in nothing)
    repeats = all(torch.equal(found[name], again[name]) for name in found)
    return {**errors, "value_limit": limit, "gradient_limit": gradient_limit, "ok": ok and repeats}


def _inputs(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(case.tokens, case.hidden, generator=generator, device=device)
    weight = torch.randn(case.vocabulary, case.hidden, generator=generator, device=device) * 0.3
    if case.shift:
        hidden[:, 0], weight[:, 0] = case.shift, 1.0
    n_labels = case.valid_rows or case.vocabulary
    labels = torch.randint(n_labels, (case.tokens,), generator=generator, device=device)
    if case.ignored:
        labels[::7] = -100
        hidden[::7] = math.nan
    temperature: float | Tensor = case.temperature
    if case.temperature_by_token:
        temperature = torch.linspace(0.3, 2.0, case.tokens, device=device)
    return hidden.to(dtype), weight.to(dtype), labels, temperature


def _run(
    case: Case,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    upstream: Tensor,
    impl: Impl,
) -> dict[str, Tensor]:
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    before = torch.ones(weight.shape, device=weight.device) if case.main_grad else None
    out = linear_logprob(
        hidden,
        weight,
        labels,
        temperature=temperature,
        valid_rows=case.valid_rows,
        entropy=case.entropy,
        entropy_grad=case.entropy,
        lse=True,
        impl=impl,
        chunk=case.chunk,
        main_grad=before,
    )
    total = (out.logprob * upstream[0]).sum()
    if out.entropy is not None:
        total = total + (out.entropy * upstream[1]).sum()
    total.backward()
    if hidden.grad is None or weight.grad is None or out.lse is None:
        raise RuntimeError(f"{case.name}: a result that was asked for is missing")
    found = {
        "logprob": out.logprob.detach(),
        "lse": out.lse,
        "hidden_grad": hidden.grad,
        "weight_grad": weight.grad if before is None else before - 1.0,
    }
    return found if out.entropy is None else found | {"entropy": out.entropy.detach()}


def _largest_logit(case: Case, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor) -> float:
    taken = labels >= 0
    if not taken.any():
        return 0.0
    logits = hidden[taken].double() @ weight[: case.valid_rows].double().t()
    by_token = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device).expand(len(labels))[taken]
    return float((logits / by_token[:, None]).abs().max())


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).detach().abs().max()) if exact.numel() else 0.0


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceInputs:
    """Arguments of ``balance``; tokens and sequences in no order, a sequence without tokens, groups of one and none."""

    logprob: Tensor
    sequence_index: Tensor
    group_index: Tensor
    reference: Tensor
    reward_over_beta: Tensor
    copies: Tensor
    n_groups: int

    def run(self, logprob: Tensor, impl: Impl, scale: float = 0.037):
        return balance(
            logprob,
            self.sequence_index,
            self.group_index,
            reference=self.reference,
            reward_over_beta=self.reward_over_beta,
            copies=self.copies,
            n_groups=self.n_groups,
            scale=scale,
            impl=impl,
        )


def balance_inputs(n_tokens: int, n_sequences: int, n_groups: int, device: torch.device) -> BalanceInputs:
    generator = torch.Generator(device).manual_seed(2)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, generator=generator, device=device)

    def among(most: int, n: int) -> Tensor:
        return torch.randint(most, (n,), generator=generator, device=device)

    group_index = among(max(1, n_groups - 2), n_sequences)
    group_index[0] = n_groups - 1
    return BalanceInputs(
        logprob=-3 * uniform(n_tokens),
        reference=-3 * uniform(n_tokens),
        sequence_index=among(max(1, n_sequences - 1), n_tokens),
        group_index=group_index,
        reward_over_beta=20 * uniform(n_sequences).double(),
        copies=among(4, n_sequences).double(),
        n_groups=n_groups,
    )


def compare_balance(inputs: BalanceInputs, impls: Sequence[Impl]) -> dict[str, Any]:
    """For each impl, what is off (relative, but absolute below 1) from the specification, and ``ok``."""
    leaf = inputs.logprob.double().requires_grad_()
    exact = balance_reference(
        leaf,
        inputs.reference,
        inputs.sequence_index,
        inputs.group_index,
        reward_over_beta=inputs.reward_over_beta,
        copies=inputs.copies,
        n_groups=inputs.n_groups,
        scale=0.037,
    )
    (exact_gradient,) = torch.autograd.grad(exact.loss, leaf)
    found: dict[str, Any] = {}
    for impl in impls:
        # In float64, so that the gradient is not rounded on its way out.
        logprob = inputs.logprob.double().requires_grad_()
        out = inputs.run(logprob, impl)
        (gradient,) = torch.autograd.grad(out.loss, logprob)
        again = inputs.run(logprob, impl)
        pairs = {
            "loss": (out.loss, exact.loss),
            "kl": (out.kl, exact.kl),
            "residual": (out.residual, exact.residual),
            "log_z": (out.log_z, exact.log_z),
            "gradient": (gradient, exact_gradient),
        }
        errors = {name: _scaled_distance(a.detach(), b.detach()) for name, (a, b) in pairs.items()}
        repeats = torch.equal(out.loss, again.loss) and torch.equal(out.residual, again.residual)
        found[impl] = {**errors, "ok": repeats and max(errors.values()) <= BALANCE_LIMIT}
    return found


def _scaled_distance(found: Tensor, exact: Tensor) -> float:
    return float(((found - exact).abs() / exact.abs().clamp_min(1.0)).max()) if exact.numel() else 0.0
