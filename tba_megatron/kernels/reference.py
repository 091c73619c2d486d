"""What the kernels compute, in float64 and without any care for memory or speed: the specification.

T tokens, H hidden size, V rows of the vocabulary, S sequences, G groups. Log-probs in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLogprob:
    """Float64, [T] each; 0 where the label is ignored, and differentiable with respect to hidden and weight."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float | Tensor = 1.0, valid_rows: int | None = None
) -> ReferenceLogprob:
    """``kernels.linear_logprob.linear_logprob`` of one rank that holds the whole vocabulary.

    ``hidden`` [T, H], ``weight`` [V, H], ``labels`` [T] (negative: ignored), ``temperature`` a number or [T]. Rows of
    ``weight`` from ``valid_rows`` on are padding. A token that is ignored has no gradient, whatever its hidden state.
    """
    taken = labels >= 0
    temperatures = torch.as_tensor(temperature, dtype=torch.float64, device=hidden.device).expand(len(labels))
    logits = hidden[taken].double() @ weight[:valid_rows].double().t() / temperatures[taken, None]
    logprobs = torch.log_softmax(logits, dim=-1)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(labels)).index_put((taken.nonzero()[:, 0],), values)

    return ReferenceLogprob(
        logprob=spread(logprobs.gather(1, labels[taken, None].long())[:, 0]),
        entropy=spread(-(logprobs.exp() * logprobs).sum(-1)),
        lse=spread(torch.logsumexp(logits, dim=-1)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceBalance:
    """Float64. ``loss`` is differentiable with respect to the log-probs."""

    loss: Tensor
    kl: Tensor  # [S] sum over the sequence of log-prob - reference
    residual: Tensor  # [S]
    log_z: Tensor  # [G]


def balance_reference(
    logprob: Tensor,
    reference: Tensor,
    sequence_index: Tensor,
    group_index: Tensor,
    *,
    reward_over_beta: Tensor,
    copies: Tensor,
    n_groups: int,
    scale: float,
) -> ReferenceBalance:
    """``kernels.balance.balance``, sequence by sequence and group by group (TBA, arXiv 2503.18929, Eq. 4 and 5).

    ``logprob``, ``reference``, ``sequence_index`` [T]; ``group_index``, ``reward_over_beta``, ``copies`` [S]. The loss
    is ``scale`` times the sum over sequences of copies * residual^2, log Z held fixed.
    """
    n_sequences = len(group_index)
    difference = logprob.double() - reference.double()
    sums = [difference[sequence_index == s].sum() for s in range(n_sequences)]
    kl = torch.stack(sums) if sums else difference.new_zeros(0)
    x = kl - reward_over_beta.double()
    log_z = []
    for g in range(n_groups):
        members = group_index == g
        total = copies.double()[members].sum()
        mean = (copies.double() * x.detach())[members].sum() / total if total > 0 else total
        log_z.append(-mean)
    log_z_G = torch.stack(log_z) if log_z else x.new_zeros(0)
    residual = x + log_z_G[group_index]
    loss = scale * (copies.double() * residual.square()).sum()
    return ReferenceBalance(loss=loss, kl=kl.detach(), residual=residual.detach(), log_z=log_z_G)
