"""The row kernels of ``linear_logprob`` in plain torch: for CPUs, and the twin of the Triton kernels.

A row kernel sees the float32 logits of all T tokens at C columns of the vocabulary, one chunk after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """What is known of each token's logits so far; float32 [T] each, updated in place.

    ``moment`` is the sum of exp(x - maximum) (x - maximum), from which the entropy follows without cancellation;
    None where no entropy is wanted. ``label_logit`` is 0 and ``n_labels`` too until the label's column has been seen.
    """

    maximum: Tensor  # -inf before the first column
    exp_sum: Tensor  # of exp(x - maximum)
    moment: Tensor | None
    label_logit: Tensor
    n_labels: Tensor


def new_statistics(n_tokens: int, device: torch.device, *, entropy: bool) -> Statistics:
    """Those of no column at all."""

    def full(value: float) -> Tensor:
        return torch.full((n_tokens,), value, dtype=torch.float32, device=device)

    return Statistics(
        maximum=full(-torch.inf),
        exp_sum=full(0.0),
        moment=full(0.0) if entropy else None,
        label_logit=full(0.0),
        n_labels=full(0.0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream:
    """What the gradient of the logits depends on beside the logits; float32 [T] each.

    ``maximum`` and ``exp_sum`` are those of the whole vocabulary. With ``entropy_grad`` None there is no entropy term.
    """

    maximum: Tensor
    exp_sum: Tensor
    entropy: Tensor | None
    logprob_grad: Tensor
    entropy_grad: Tensor | None


def rescale(statistics: Statistics, maximum: Tensor) -> None:
    """Express ``exp_sum`` and ``moment`` with respect to ``maximum``, which is no smaller than their own."""
    # Before the first column exp_sum is 0 and the shift infinite: 0 times infinity would be NaN.
    shift = torch.where(statistics.exp_sum > 0, statistics.maximum - maximum, 0.0)
    decay = torch.exp(shift)
    if statistics.moment is not None:
        statistics.moment.add_(statistics.exp_sum * shift).mul_(decay)
    statistics.exp_sum.mul_(decay)
    statistics.maximum.copy_(maximum)


def update_statistics(statistics: Statistics, logits: Tensor, columns: Tensor, inverse_temperature: Tensor) -> None:
    """Add a chunk of ``logits`` [T, C], which is overwritten; the label is at ``columns`` [T] if that is in 0..C-1."""
    n_columns = logits.shape[1]
    scaled = logits.mul_(inverse_temperature[:, None])
    here = (columns >= 0) & (columns < n_columns)
    at_label = scaled.gather(1, columns.clamp(0, n_columns - 1)[:, None])[:, 0]
    statistics.label_logit.copy_(torch.where(here, at_label, statistics.label_logit))
    statistics.n_labels.add_(here)
    rescale(statistics, torch.maximum(statistics.maximum, scaled.amax(1)))
    shifted = scaled.sub_(statistics.maximum[:, None])
    if statistics.moment is None:
        statistics.exp_sum.add_(shifted.exp_().sum(1))
        return
    weights = shifted.exp()
    statistics.exp_sum.add_(weights.sum(1))
    statistics.moment.add_(weights.mul_(shifted).sum(1))


def logit_gradients(
    logits: Tensor, columns: Tensor, inverse_temperature: Tensor, upstream: Upstream, dtype: torch.dtype
) -> Tensor:
    """d loss / d logits of a chunk, [T, C] in ``dtype``; ``logits`` [T, C], before the temperature, is overwritten.

    With x the logits over the temperature and p their softmax: d logprob / d x = onehot - p, and
    d entropy / d x = -p (log p + entropy).
    """
    n_columns = logits.shape[1]
    here = ((columns >= 0) & (columns < n_columns)).nonzero()[:, 0]
    shifted = logits.mul_(inverse_temperature[:, None]).sub_(upstream.maximum[:, None])
    scale = inverse_temperature / upstream.exp_sum
    if upstream.entropy_grad is None or upstream.entropy is None:
        gradients = shifted.exp_().mul_((-upstream.logprob_grad * scale)[:, None])
    else:
        # p (-g - ge (x - maximum - log(exp_sum) + entropy)), in which only x - maximum depends on the column
        constant = upstream.logprob_grad + upstream.entropy_grad * (upstream.entropy - upstream.exp_sum.log())
        weights = shifted.exp()
        gradients = shifted.mul_(upstream.entropy_grad[:, None]).add_(constant[:, None])
        gradients.mul_(weights).mul_(-scale[:, None])
    gradients[here, columns[here]] += (upstream.logprob_grad * inverse_temperature)[here]
    return gradients.to(dtype)
