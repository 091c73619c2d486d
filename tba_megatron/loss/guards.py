"""Guards on negative pushes: what an old completion may do to a policy that has moved on.

An advantage below 0 lowers a completion. Where the policy has lost it already, pushing it further down teaches nothing
and moves the weights all the same. Both guards depart from an objective's paper, and both are off by default.
T response positions, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tba_megatron.loss.sequences import Sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Guards:
    """``negative_weight`` multiplies negative advantages; 1: off. With ``lost_negative_ratio`` a negative push counts
    for nothing where pi / mu is below it, of the whole completion or (``by_token``) of the token; 0: off."""

    negative_weight: float = 1.0
    lost_negative_ratio: float = 0.0
    by_token: bool = False

    @property
    def needs_behaviour(self) -> bool:
        return self.lost_negative_ratio > 0.0

    def factor_T(self, advantage_S: Tensor, s: Sequences) -> Tensor:
        """[T] float64: what to multiply the push of each token with."""
        if self.by_token:
            return self._factor(s.spread(advantage_S), s.token_drift_T)
        return s.spread(self.factor_S(advantage_S, s))

    def factor_S(self, advantage_S: Tensor, s: Sequences) -> Tensor:
        """[S] float64: what to multiply the push of each sequence with, where it is one for all of its tokens."""
        return self._factor(advantage_S, s.drift_S)

    def _factor(self, advantage: Tensor, drift: Tensor) -> Tensor:
        weight = torch.ones_like(drift, dtype=torch.float64)
        negative, lost = advantage < 0, drift.exp() < self.lost_negative_ratio
        return weight.masked_fill(negative, self.negative_weight).masked_fill(negative & lost, 0.0)
