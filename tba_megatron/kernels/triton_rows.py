"""The row kernels of ``linear_logprob`` in Triton, the twins of ``torch_rows``: one program for each token.

They hold no matrix product: logits come out of the library's GEMM in float32, a chunk of C columns at a time. So they
need neither atomics nor tensor cores, every run gives the same bits, and Triton's interpreter computes what a GPU does
(except that it cuts to bfloat16 where a GPU rounds). Imported only where it is used, since a machine without a GPU may
have no Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tba_megatron.kernels.torch_rows import Statistics, Upstream

LAUNCH: dict[str, Any] = {
    "BLOCK": 1024,  # columns that a program has in registers at once
    "num_warps": 8,
    # Fused, logit / temperature - maximum would not be 0 at the maximum itself, which has been rounded.
    "enable_fp_fusion": False,
}


@triton.jit
def update_statistics_kernel(
    logits_ptr,
    row_stride,
    n_columns,
    columns_ptr,
    inverse_temperature_ptr,
    maximum_ptr,
    exp_sum_ptr,
    moment_ptr,
    label_logit_ptr,
    n_labels_ptr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of one token, a chunk of C columns further (online softmax; Milakov & Gimelshein, 2018)."""
    row = tl.program_id(0).to(tl.int64)  # T x C elements can exceed 32 bits
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    column = tl.load(columns_ptr + row)
    maximum = tl.load(maximum_ptr + row)
    exp_sum = tl.load(exp_sum_ptr + row)
    moment = 0.0
    if ENTROPY:
        moment = tl.load(moment_ptr + row)
    for start in range(0, n_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n_columns
        # Columns beyond the chunk must have no weight: with 0 in their place each would add exp(0 - maximum).
        x = tl.load(logits_ptr + row * row_stride + offsets, mask=inside, other=float("-inf")) * inverse_temperature
        larger = tl.maximum(maximum, tl.max(x, 0))
        shift = tl.where(exp_sum > 0.0, maximum - larger, 0.0)  # -inf before the first column
        decay = tl.exp(shift)
        shifted = x - larger
        weights = tl.exp(shifted)
        if ENTROPY:
            moment = (moment + exp_sum * shift) * decay + tl.sum(tl.where(inside, weights * shifted, 0.0), 0)
        exp_sum = exp_sum * decay + tl.sum(weights, 0)
        maximum = larger
    if (column >= 0) & (column < n_columns):
        tl.store(label_logit_ptr + row, tl.load(logits_ptr + row * row_stride + column) * inverse_temperature)
        tl.store(n_labels_ptr + row, tl.load(n_labels_ptr + row) + 1.0)
    tl.store(maximum_ptr + row, maximum)
    tl.store(exp_sum_ptr + row, exp_sum)
    if ENTROPY:
        tl.store(moment_ptr + row, moment)


@triton.jit
def logit_gradients_kernel(
    logits_ptr,
    row_stride,
    n_columns,
    gradients_ptr,
    gradient_row_stride,
    columns_ptr,
    inverse_temperature_ptr,
    maximum_ptr,
    exp_sum_ptr,
    entropy_ptr,
    logprob_grad_ptr,
    entropy_grad_ptr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d loss / d logits of one token at the C columns of a chunk; the formula is in ``torch_rows.logit_gradients``."""
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    column = tl.load(columns_ptr + row)
    maximum = tl.load(maximum_ptr + row)
    exp_sum = tl.load(exp_sum_ptr + row)
    logprob_grad = tl.load(logprob_grad_ptr + row)
    scale = inverse_temperature / exp_sum
    slope = 0.0
    constant = logprob_grad
    if ENTROPY:
        slope = tl.load(entropy_grad_ptr + row)
        constant += slope * (tl.load(entropy_ptr + row) - tl.log(exp_sum))
    for start in range(0, n_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n_columns
        x = tl.load(logits_ptr + row * row_stride + offsets, mask=inside, other=0.0) * inverse_temperature
        shifted = x - maximum
        gradient = -scale * tl.exp(shifted) * (constant + slope * shifted if ENTROPY else constant)
        gradient += tl.where(offsets == column, logprob_grad * inverse_temperature, 0.0)
        stored = gradient.to(gradients_ptr.dtype.element_ty)
        tl.store(gradients_ptr + row * gradient_row_stride + offsets, stored, mask=inside)


def update_statistics(statistics: Statistics, logits: Tensor, columns: Tensor, inverse_temperature: Tensor) -> None:
    """As ``torch_rows.update_statistics``; ``logits`` stay as they are."""
    update_statistics_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        logits.shape[1],
        columns,
        inverse_temperature,
        statistics.maximum,
        statistics.exp_sum,
        statistics.exp_sum if statistics.moment is None else statistics.moment,
        statistics.label_logit,
        statistics.n_labels,
        ENTROPY=statistics.moment is not None,  # type: ignore[arg-type]
        **LAUNCH,
    )


def logit_gradients(
    logits: Tensor, columns: Tensor, inverse_temperature: Tensor, upstream: Upstream, dtype: torch.dtype
) -> Tensor:
    """As ``torch_rows.logit_gradients``; ``logits`` stay as they are."""
    gradients = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    entropy = upstream.entropy is not None and upstream.entropy_grad is not None
    logit_gradients_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        logits.shape[1],
        gradients,
        gradients.stride(0),
        columns,
        inverse_temperature,
        upstream.maximum,
        upstream.exp_sum,
        upstream.entropy if entropy else upstream.maximum,
        upstream.logprob_grad,
        upstream.entropy_grad if entropy else upstream.maximum,
        ENTROPY=entropy,  # type: ignore[arg-type]
        **LAUNCH,
    )
    return gradients
