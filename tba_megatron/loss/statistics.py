"""What every objective with groups reports of a microbatch, beside its loss. Sums and maxima, see ``LossOutput``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tba_megatron.loss.base import LossOutput, ReferenceNeed
from tba_megatron.loss.sequences import Sequences

LOST_RATIO = 0.8  # pi / mu of a completion that the policy has lost
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

    ``more`` are further sums, ``tau`` a coefficient that may change from step to step. What rests on behaviour
    log-probs is over the rollouts that have them.
    """
    copies_S = s.copies_S
    abs_advantage_S = advantage_S.abs()
    sums = {
        "loss": loss.detach(),
        "rollouts": copies_S.sum(),
        "groups": copies_S.new_tensor(float(s.inputs.n_groups)),
        "rollout/reward": total(s.reward_S, s),
        "rollout/abs_advantage": total(abs_advantage_S, s),
        "rollout/completion_tokens": total(s.length_S, s),
        "group/equal_rewards": s.equal_rewards_G().sum().double(),
        **(more or {}),
    }
    if reference is ReferenceNeed.SUMS:
        sums["rollout/kl"] = total(s.kl_S, s)
    sums |= _drift(advantage_S, s)
    maxima = {"max_abs_advantage": _max(abs_advantage_S), "max_completion_tokens": _max(s.length_S)}
    if tau is not None:
        maxima["tau"] = copies_S.new_tensor(tau)
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def _drift(advantage_S: Tensor, s: Sequences) -> dict[str, Tensor]:
    """How far the policy is from those that wrote the rollouts. ``ratio`` and ``ratio_square`` give the effective
    sample size, (sum w)^2 / sum w^2; ``lost_push`` over ``negative_push`` is the share of it on lost completions."""
    known_S = s.drift_S.isfinite() & (s.length_S > 0)
    copies_S = s.copies_S * known_S
    drift_S = torch.where(known_S, s.drift_S, 0.0)
    ratio_S = drift_S.clamp(-_MOST_DRIFT, _MOST_DRIFT).exp()
    push_S = copies_S * (-advantage_S).clamp(min=0.0)
    return {
        "drift_rollouts": copies_S.sum(),
        "drift_rollout/drift": (copies_S * drift_S).sum(),
        "drift_rollout/abs_drift": (copies_S * drift_S.abs()).sum(),
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
