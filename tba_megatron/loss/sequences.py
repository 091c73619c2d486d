"""Sums over completions and statistics of groups, which every objective with groups is written in.

Log-probs of a completion are plain sums over its tokens, in nats and float64. Everything counts copies: a sequence of
three copies is three equal sequences. T response positions, S sequences, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tba_megatron.kernels.balance import segment_sum
from tba_megatron.loss.base import LossInputs


@dataclass(frozen=True, eq=False)
class Sequences:
    """``inputs`` seen as sequences. All of it is without gradient."""

    inputs: LossInputs

    @cached_property
    def logprob_S(self) -> Tensor:
        return self._sum(self.inputs.logprob_T.detach())

    @cached_property
    def behaviour_S(self) -> Tensor:
        """NaN where it is not known."""
        return self._sum(self.inputs.behaviour_logprob_T)

    @cached_property
    def length_S(self) -> Tensor:
        return self._sum(torch.ones_like(self.inputs.logprob_T))

    @property
    def reference_S(self) -> Tensor:
        return self.inputs.reference_logprob_S

    @property
    def reward_S(self) -> Tensor:
        return self.inputs.reward_S

    @property
    def copies_S(self) -> Tensor:
        return self.inputs.copies_S

    @cached_property
    def kl_S(self) -> Tensor:
        """log pi - log pi_ref."""
        return self.logprob_S - self.reference_S

    @cached_property
    def drift_S(self) -> Tensor:
        """log pi - log mu, of the policy that wrote the completion; 0 for what this policy wrote itself."""
        return self.logprob_S - self.behaviour_S

    @cached_property
    def token_drift_T(self) -> Tensor:
        """``drift_S`` of each token alone."""
        return self.inputs.logprob_T.detach().double() - self.inputs.behaviour_logprob_T

    @cached_property
    def group_size_S(self) -> Tensor:
        """K: the copies of all sequences of the group."""
        return self.group_sum(torch.ones_like(self.copies_S))

    def group_sum(self, values_S: Tensor) -> Tensor:
        """[S] the sum over each sequence's group."""
        return self.per_group(values_S)[self.inputs.group_index_S]

    def group_mean(self, values_S: Tensor) -> Tensor:
        """[S] the mean over each sequence's group."""
        return self.group_sum(values_S) / self.group_size_S.clamp(min=1.0)

    def per_group(self, values_S: Tensor) -> Tensor:
        """[G] the sum over each group; a sequence without copies counts for nothing, whatever its value is."""
        weighted = torch.where(self.copies_S != 0, self.copies_S * values_S, 0.0)
        return segment_sum(weighted, self.inputs.group_index_S, self.inputs.n_groups)

    def equal_rewards_G(self) -> Tensor:
        """[G] whether a group has one reward: it teaches nothing about the task."""
        zeros_G = self.reward_S.new_zeros(self.inputs.n_groups)
        largest_G, smallest_G = (
            zeros_G.scatter_reduce(0, self.inputs.group_index_S, self.reward_S, reduce, include_self=False)
            for reduce in ("amax", "amin")
        )
        return largest_G == smallest_G

    def spread(self, values_S: Tensor) -> Tensor:
        """[T] the value of each token's sequence."""
        return values_S[self.inputs.sequence_index_T]

    def _sum(self, values_T: Tensor) -> Tensor:
        return segment_sum(values_T, self.inputs.sequence_index_T, self.inputs.n_sequences)


def centred(values_S: Tensor, s: Sequences) -> Tensor:
    """[S] less the mean of the group."""
    return values_S - s.group_mean(values_S)


def leave_one_out(values_S: Tensor, s: Sequences) -> Tensor:
    """[S] less the mean of the others of the group: K / (K - 1) of ``centred`` (RLOO, arXiv 2402.14740)."""
    return centred(values_S, s) * s.group_size_S / (s.group_size_S - 1.0).clamp(min=1.0)


def standardised(values_S: Tensor, s: Sequences) -> Tensor:
    """[S] ``centred`` over the standard deviation (of K - 1 degrees) of the group, 0 where all are equal (GRPO)."""
    deviation_S = centred(values_S, s)
    variance_S = s.group_sum(deviation_S.square()) / (s.group_size_S - 1.0).clamp(min=1.0)
    return deviation_S / (variance_S.sqrt() + STANDARD_DEVIATION_FLOOR)


STANDARD_DEVIATION_FLOOR = 1e-4  # as TRL 0.17 adds to it
