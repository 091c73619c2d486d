"""The trajectory-balance loss of log-probs, by index, and its gradient in closed form.

TBA, arXiv 2503.18929, Eq. 4 and 5. T tokens, S sequences, G groups. Log-probs in nats. What is summed is summed in
float64 and in an order that the input fixes, so that every rank of a tensor-parallel group, and every run, finds the
same bits. ``kernels.reference.balance_reference`` is the specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tba_megatron.errors import KernelError
from tba_megatron.kernels.back_end import Impl, uses_triton

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """What the group statistics make of the sequences; float64, without gradient."""

    residual: Tensor  # [S] kl - r/beta + log Z of its group
    log_z: Tensor  # [G] mean over copies of r/beta - kl; 0 for a group without copies
    coefficient: Tensor  # [S] d loss / d log-prob of any token of the sequence = 2 scale copies residual
    loss: Tensor  # 0-dim, scale * sum of copies residual^2


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceOut:
    """Float64. ``loss`` has a gradient with respect to the log-probs, everything else has none."""

    loss: Tensor  # 0-dim
    logprob: Tensor  # [S] sums
    kl: Tensor  # [S] log-prob - reference of the whole sequence
    residual: Tensor  # [S]
    log_z: Tensor  # [G]
    coefficient: Tensor  # [S]


def segment_sum(values: Tensor, index: Tensor, n_segments: int) -> Tensor:
    """Sums of ``values`` by ``index``, in float64; [n_segments], 0 where a segment has no values."""
    zeros = torch.zeros(n_segments, dtype=torch.float64, device=values.device)
    if values.is_cuda:
        # index_add uses atomics there (torch 2.13), in any order; index_put sorts before it adds.
        return zeros.index_put((index,), values.double(), accumulate=True)
    return zeros.index_add(0, index, values.double())


@torch.no_grad()
def coefficients(
    kl: Tensor, reward_over_beta: Tensor, copies: Tensor, group_index: Tensor, n_groups: int, *, scale: float
) -> Coefficients:
    """Residuals and the gradient of the loss from ``kl`` [S] alone, wherever its sums were made.

    ``kl``, ``reward_over_beta``, ``copies`` [S]; ``group_index`` [S] in 0..n_groups-1, in any order. Groups must be
    whole. A sequence of 0 copies adds nothing to mean, loss and gradient, whatever its other values are; any other
    value that is not finite makes the loss NaN. Raises KernelError for lengths that differ or a scale that is not
    finite; an index out of range is an error on the CPU and not looked for on other devices, which would stop them.
    """
    _check_sequences(group_index, n_groups, scale, kl=kl, reward_over_beta=reward_over_beta, copies=copies)
    copies = copies.double()
    present = copies != 0
    log_z_of_one = reward_over_beta.double() - kl.double()
    # where, not a product alone: 0 * NaN is NaN.
    total_G = segment_sum(copies, group_index, n_groups)
    log_z = segment_sum(torch.where(present, copies * log_z_of_one, 0.0), group_index, n_groups)
    log_z = log_z / total_G.where(total_G != 0, 1.0)
    residual = log_z[group_index] - log_z_of_one
    return Coefficients(
        residual=residual,
        log_z=log_z,
        coefficient=torch.where(present, copies * residual, 0.0) * (2 * scale),
        loss=torch.where(present, copies * residual.square(), 0.0).sum() * scale,
    )


def balance(
    logprob: Tensor,
    sequence_index: Tensor,
    group_index: Tensor,
    *,
    reward_over_beta: Tensor,
    copies: Tensor,
    n_groups: int,
    scale: float,
    reference: Tensor | None = None,
    reference_sums: Tensor | None = None,
    impl: Impl = "auto",
) -> BalanceOut:
    """``scale`` times the sum over sequences of copies * residual^2, with log Z held fixed.

    ``logprob`` [T] float32 or float64, ``sequence_index`` [T] in 0..S-1, ``group_index`` [S] in 0..n_groups-1; both
    in any order, and with sequences and groups that have no members. ``reward_over_beta``, ``copies`` [S]. Exactly
    one of ``reference`` [T], whose difference to ``logprob`` is summed, and ``reference_sums`` [S].

    Holding log Z fixed changes nothing: the residuals of a whole group, counted by copies, add up to 0. ``impl`` auto
    is triton for CUDA tensors and torch elsewhere. What is not finite, and what raises: see ``coefficients``.
    """
    _check_tokens(logprob, sequence_index, len(group_index), reference, reference_sums)
    terms = {"reward_over_beta": reward_over_beta, "copies": copies}
    terms |= {} if reference_sums is None else {"reference_sums": reference_sums}
    _check_sequences(group_index, n_groups, scale, **terms)
    n_sequences = len(group_index)
    sums_of, coefficients_of = _back_end(impl, logprob)
    with torch.no_grad():
        logprob_sums, kl = sums_of(logprob, reference, sequence_index, n_sequences)
        if reference_sums is not None:
            kl = logprob_sums - reference_sums.double()
        found = coefficients_of(kl, reward_over_beta, copies, group_index, n_groups, scale=scale)
    return BalanceOut(
        loss=_Loss.apply(logprob, sequence_index, found.coefficient, found.loss),
        logprob=logprob_sums,
        kl=kl,
        residual=found.residual,
        log_z=found.log_z,
        coefficient=found.coefficient,
    )


class _Loss(torch.autograd.Function):
    """The loss, whose gradient with respect to a log-prob is the coefficient of its sequence."""

    @staticmethod
    def forward(ctx, logprob: Tensor, sequence_index: Tensor, coefficient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(sequence_index, coefficient)
        ctx.dtype = logprob.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        sequence_index, coefficient = ctx.saved_tensors
        return (coefficient * upstream).to(ctx.dtype)[sequence_index], None, None, None


def _torch_sums(logprob: Tensor, reference: Tensor | None, index: Tensor, n_sequences: int) -> tuple[Tensor, Tensor]:
    """[S] sums of the log-probs, and of their differences to the reference (without one: the log-probs again)."""
    sums = segment_sum(logprob, index, n_sequences)
    if reference is None:
        return sums, sums
    # Float32 sums of 32k tokens would be off by thousandths of a nat, and so would be their difference.
    return sums, segment_sum(logprob.double() - reference.double(), index, n_sequences)


def _back_end(impl: Impl, logprob: Tensor):
    """(sums, coefficients) of the back end."""
    if not uses_triton("balance", impl, logprob.device):
        return _torch_sums, coefficients
    from tba_megatron.kernels import triton_balance

    return triton_balance.sums, triton_balance.coefficients


def _check_tokens(
    logprob: Tensor,
    sequence_index: Tensor,
    n_sequences: int,
    reference: Tensor | None,
    reference_sums: Tensor | None,
) -> None:
    if logprob.ndim != 1 or logprob.dtype not in (torch.float32, torch.float64):
        raise KernelError(
            f"balance: logprob is {logprob.dtype} of shape {list(logprob.shape)}; give float32 or float64 [T]"
        )
    if (reference is None) == (reference_sums is None):
        given = "neither" if reference is None else "both"
        raise KernelError(f"balance: {given} of reference [T] and reference_sums [S] given; give exactly one")
    if reference is not None and reference.shape != logprob.shape:
        raise KernelError(f"balance: reference has shape {list(reference.shape)}, logprob {list(logprob.shape)}")
    if sequence_index.shape != logprob.shape:
        raise KernelError(
            f"balance: sequence_index has shape {list(sequence_index.shape)}, logprob {list(logprob.shape)}"
        )
    _check_index("sequence_index", sequence_index, n_sequences)


def _check_sequences(group_index: Tensor, n_groups: int, scale: float, **terms: Tensor) -> None:
    if not math.isfinite(scale):
        raise KernelError(f"balance: scale is {scale}; give a finite number")
    for name, term in terms.items():
        if term.shape != group_index.shape or term.ndim != 1:
            raise KernelError(
                f"balance: {name} has shape {list(term.shape)}, group_index {list(group_index.shape)}; give [S] to both"
            )
    _check_index("group_index", group_index, n_groups)
    copies = terms["copies"]
    if copies.device.type == "cpu" and (copies < 0).any():
        raise KernelError(f"balance: copies[{int(copies.argmin())}] is {float(copies.min())}; give counts")


def _check_index(name: str, index: Tensor, n: int) -> None:
    if index.dtype not in _INDEX_DTYPES:
        raise KernelError(f"balance: {name} is {index.dtype}; give int32 or int64")
    # On another device the answer would have to be waited for.
    if index.device.type == "cpu" and len(index):
        low, high = (int(end) for end in torch.aminmax(index))
        if low < 0 or high >= n:
            raise KernelError(f"balance: {name} goes from {low} to {high}; give 0 to {n - 1}")
