"""What every objective with groups reports of a microbatch, beside its loss. Sums and maxima, see ``LossOutput``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tba_megatron.loss.base import LossOutput, ReferenceNeed
from tba_megatron.loss.sequences import Sequences

LOST_RATIO = 0.8  # pi / mu of a completion that the policy has lost
_SIDE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
EDGES = (*(-edge for edge in reversed(_SIDE)), *_SIDE)
"""Of the bins that residuals and advantages are counted in, those of 0 in the middle one. An edge belongs to the bin
above it; the outermost bins hold what lies beyond them too."""
_MOST_DRIFT = 30.0  # nats either way; the square of e^30, sums of it and its inverse are far from the ends of float64


@torch.no_grad()
def output(
    loss: Tensor,
    advantage_S: Tensor,
    s: Sequences,
    reference: ReferenceNeed,
    more: Mapping[str, Tensor] | None = None,
    tau: float | None = None,
) -> LossOutput:
    """``loss`` with the statistics; ``advantage_S`` is what the objective pushes each sequence with, up to a factor.

    ``more`` are further sums, ``tau`` a coefficient that may change from step to step: with it ``advantage_S`` is a
    residual, which is counted in nats. What rests on behaviour log-probs is over the rollouts that have them.
    """
    copies_S = s.copies_S
    abs_advantage_S = advantage_S.abs()
    tokens = total(s.length_S, s)
    sums = {
        "loss": loss.detach(),
        "rollouts": copies_S.sum(),
        "groups": copies_S.new_tensor(float(s.inputs.n_groups)),
        "tokens": tokens,
        "rollout/reward": total(s.reward_S, s),
        "rollout/abs_advantage": total(abs_advantage_S, s),
        "rollout/completion_tokens": tokens,
        "group/equal_rewards": s.equal_rewards_G().sum().double(),
        **(more or {}),
    }
    if reference is ReferenceNeed.SUMS:
        sums |= kl_sums(s.kl_S, s)
    sums |= _drift(advantage_S, s)
    maxima = {"max_abs_advantage": _max(abs_advantage_S), "max_completion_tokens": _max(s.length_S)}
    if tau is None:
        histograms = {"advantage": counts(advantage_S, copies_S)}
    else:
        histograms = {"residual_nats": counts(advantage_S / tau, copies_S)}
        maxima["tau"] = copies_S.new_tensor(tau)
    return LossOutput(loss=loss, sums=sums, maxima=maxima, histograms=histograms)


def kl_sums(kl_S: Tensor, s: Sequences) -> dict[str, Tensor]:
    """Of log pi - log pi_ref of each completion: its mean and spread over rollouts, its mean over tokens."""
    kl = total(kl_S, s)
    return {"rollout/kl": kl, "rollout/kl_square": total(kl_S.square(), s), "token/kl_per_token": kl}


@torch.no_grad()
def entropy_sums(entropy_T: Tensor, copies_S: Tensor, sequence_index_T: Tensor) -> dict[str, Tensor]:
    """Of the policy's entropy at each response position, in nats: its mean over ``tokens``, which the loss counts."""
    return {"token/entropy": (copies_S[sequence_index_T] * entropy_T.double()).sum()}


def counts(values_S: Tensor, copies_S: Tensor) -> Tensor:
    """[bins] how many copies lie in each bin of ``EDGES``; what is not a number lies in none."""
    inner = torch.tensor(EDGES[1:-1], dtype=values_S.dtype, device=values_S.device)
    bin_S = torch.bucketize(values_S, inner, right=True)
    known_S = torch.where(values_S.isnan(), 0.0, copies_S)
    return known_S.new_zeros(len(EDGES) - 1).index_add(0, bin_S, known_S)


def _drift(advantage_S: Tensor, s: Sequences) -> dict[str, Tensor]:
    """How far the policy is from those that wrote the rollouts. ``ratio`` and ``ratio_square`` give the effective
    sample size, (sum w)^2 / sum w^2; ``lost_push`` over ``negative_push`` is the share of it on lost completions."""
    known_S = s.drift_S.isfinite() & (s.length_S > 0)
    copies_S = s.copies_S * known_S
    drift_S = torch.where(known_S, s.drift_S, 0.0)
    ratio_S = drift_S.clamp(-_MOST_DRIFT, _MOST_DRIFT).exp()
    push_S = copies_S * (-advantage_S).clamp(min=0.0)
    drift = (copies_S * drift_S).sum()
    return {
        "drift_rollouts": copies_S.sum(),
        "drift_rollout/drift": drift,
        "drift_rollout/drift_square": (copies_S * drift_S.square()).sum(),
        "drift_rollout/abs_drift": (copies_S * drift_S.abs()).sum(),
        "drift_tokens": (copies_S * s.length_S).sum(),
        "drift_token/drift_per_token": drift,
        "drift_rollout/ratio": (copies_S * ratio_S).sum(),
        "drift_rollout/ratio_square": (copies_S * ratio_S.square()).sum(),
        "drift_rollout/negative_push": push_S.sum(),
        "drift_rollout/lost_push": (push_S * (ratio_S < LOST_RATIO)).sum(),
    }


def total(values_S: Tensor, s: Sequences) -> Tensor:
    """The sum over sequences, by copies; one without copies counts for nothing, whatever its value is."""
    return torch.where(s.copies_S != 0, s.copies_S * values_S, 0.0).sum()


def _max(values_S: Tensor) -> Tensor:
    return values_S.max() if len(values_S) else values_S.new_zeros(())
