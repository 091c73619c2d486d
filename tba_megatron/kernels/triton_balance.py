"""``kernels.balance`` in Triton: one program sums a segment, so that no atomics are needed and no bit changes.

Imported only where it is used, since Triton may not be installed. T tokens, S sequences, G groups. The order of the
values within a segment is that of the input (a stable sort by index), and the sort is made whether it is needed or not:
to ask would stop the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tba_megatron.kernels.balance import Coefficients

TOKEN_BLOCK = 1024  # tokens that a program has in registers at once
MEMBER_BLOCK = 64  # sequences


@triton.jit
def segment_sum_kernel(
    logprob_ptr,  # [T] float32 or float64
    reference_ptr,  # [T] float32 or float64; not read without HAS_REFERENCE
    order_ptr,  # [T] int64, tokens by segment
    start_ptr,  # [S + 1] int64, where each segment begins in the order
    sum_ptr,  # [S] float64
    difference_ptr,  # [S] float64; not written without HAS_REFERENCE
    HAS_REFERENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a segment: the sums of its log-probs, and of their differences to the reference."""
    segment = tl.program_id(0)
    start = tl.load(start_ptr + segment)
    end = tl.load(start_ptr + segment + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    difference = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        token = tl.load(order_ptr + place, mask=inside, other=0)
        logprob = tl.load(logprob_ptr + token, mask=inside, other=0.0).to(tl.float64)
        total += logprob
        if HAS_REFERENCE:
            difference += logprob - tl.load(reference_ptr + token, mask=inside, other=0.0).to(tl.float64)
    tl.store(sum_ptr + segment, tl.sum(total, 0))
    if HAS_REFERENCE:
        tl.store(difference_ptr + segment, tl.sum(difference, 0))


@triton.jit
def group_kernel(
    kl_ptr,  # [S] float64
    reward_over_beta_ptr,  # [S] float64
    copies_ptr,  # [S] float64
    order_ptr,  # [S] int64, sequences by group
    start_ptr,  # [G + 1] int64
    residual_ptr,  # [S] float64
    pull_ptr,  # [S] float64, copies * residual
    log_z_ptr,  # [G] float64
    square_ptr,  # [G] float64, sum of copies * residual^2
    BLOCK: tl.constexpr,
):
    """One program a group: its log Z, then the residuals of its sequences."""
    group = tl.program_id(0)
    start = tl.load(start_ptr + group)
    end = tl.load(start_ptr + group + 1)
    weight = tl.zeros((BLOCK,), tl.float64)
    weighted = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        sequence = tl.load(order_ptr + place, mask=inside, other=0)
        copies = tl.load(copies_ptr + sequence, mask=inside, other=0.0)
        log_z_of_one = tl.load(reward_over_beta_ptr + sequence, mask=inside, other=0.0)
        log_z_of_one -= tl.load(kl_ptr + sequence, mask=inside, other=0.0)
        weight += copies
        weighted += tl.where(copies != 0.0, copies * log_z_of_one, 0.0)
    total = tl.sum(weight, 0)
    log_z = tl.sum(weighted, 0) / tl.where(total != 0.0, total, 1.0)
    square = tl.zeros((BLOCK,), tl.float64)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        sequence = tl.load(order_ptr + place, mask=inside, other=0)
        copies = tl.load(copies_ptr + sequence, mask=inside, other=0.0)
        log_z_of_one = tl.load(reward_over_beta_ptr + sequence, mask=inside, other=0.0)
        log_z_of_one -= tl.load(kl_ptr + sequence, mask=inside, other=0.0)
        residual = log_z - log_z_of_one
        pull = tl.where(copies != 0.0, copies * residual, 0.0)
        square += tl.where(copies != 0.0, pull * residual, 0.0)
        tl.store(residual_ptr + sequence, residual, mask=inside)
        tl.store(pull_ptr + sequence, pull, mask=inside)
    tl.store(log_z_ptr + group, log_z)
    tl.store(square_ptr + group, tl.sum(square, 0))


def sums(logprob: Tensor, reference: Tensor | None, index: Tensor, n_sequences: int) -> tuple[Tensor, Tensor]:
    """[S] float64 sums of the log-probs, and of their differences to the reference (without one: the first again)."""
    total = logprob.new_empty(n_sequences, dtype=torch.float64)
    difference = total if reference is None else torch.empty_like(total)
    if n_sequences:
        order, start = _segments(index, n_sequences)
        segment_sum_kernel[(n_sequences,)](
            logprob.contiguous(),
            (logprob if reference is None else reference).contiguous(),
            order,
            start,
            total,
            difference,
            HAS_REFERENCE=reference is not None,  # type: ignore[arg-type]
            BLOCK=TOKEN_BLOCK,  # type: ignore[arg-type]
            enable_fp_fusion=False,  # type: ignore[call-arg]
        )
    return total, difference


def coefficients(
    kl: Tensor, reward_over_beta: Tensor, copies: Tensor, group_index: Tensor, n_groups: int, *, scale: float
) -> Coefficients:
    """``kernels.balance.coefficients``, unchecked; ``kl`` float64 and contiguous."""
    # A sequence whose group is out of range stays NaN.
    residual, pull = torch.full_like(kl, torch.nan), torch.full_like(kl, torch.nan)
    log_z, square = kl.new_empty(n_groups), kl.new_empty(n_groups)
    if n_groups:
        order, start = _segments(group_index, n_groups)
        group_kernel[(n_groups,)](
            kl,
            reward_over_beta.double().contiguous(),
            copies.double().contiguous(),
            order,
            start,
            residual,
            pull,
            log_z,
            square,
            BLOCK=MEMBER_BLOCK,  # type: ignore[arg-type]
            enable_fp_fusion=False,  # type: ignore[call-arg]
        )
    # The scale stays outside: Triton takes a Python float as float32.
    return Coefficients(residual=residual, log_z=log_z, coefficient=pull * (2 * scale), loss=square.sum() * scale)


def _segments(index: Tensor, n_segments: int) -> tuple[Tensor, Tensor]:
    """(order, start): the places of segment i are ``order[start[i] : start[i + 1]]``, ascending; int64."""
    by_segment, order = torch.sort(index.long(), stable=True)
    return order, torch.searchsorted(by_segment, torch.arange(n_segments + 1, device=index.device))
