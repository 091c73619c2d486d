"""What a loss sees, what it returns, and the protocol of a loss.

A loss is a function of one packed microbatch. Everything it returns is additive over microbatches and ranks,
or a maximum; the division by global numbers happens outside, once. T response positions (those that predict
a token of a completion), S sequences, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tba_megatron.types import PackedMicrobatch


class ReferenceNeed(StrEnum):
    """What an objective reads of the reference policy."""

    NONE = "none"
    SUMS = "sums"  # one number a rollout, which is kept with the rollout
    TOKENS = "tokens"  # computed anew in each step


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a loss reads beside the policy's log-probs and the rewards."""

    reference: ReferenceNeed = ReferenceNeed.NONE
    behaviour: bool = False  # the log-probs of the policy that wrote the rollout
    log_z: bool = False  # the learned log Z of the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One packed microbatch. Log-probs are in nats at the objective's temperature.

    ``normaliser`` is global: the rollouts B K of the whole step (for a supervised loss, its response
    tokens), so that the gradient does not depend on how groups are split over microbatches and ranks.
    """

    logprob_T: Tensor  # with grad, response positions only
    sequence_index_T: Tensor  # int64 in 0..S-1
    group_index_S: Tensor  # int64 in 0..G-1
    copies_S: Tensor  # float64
    reward_S: Tensor  # float64
    reference_logprob_S: Tensor  # float64, sums over the completions
    n_groups: int
    normaliser: float
    behaviour_logprob_T: Tensor  # float64, NaN where it is not known
    reference_logprob_T: Tensor | None = None  # float64, for a loss that needs ``ReferenceNeed.TOKENS``
    log_z_S: Tensor | None = None  # float64, nats, without gradient, for a loss that needs ``log_z``

    @property
    def n_sequences(self) -> int:
        return len(self.group_index_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """``loss`` is this microbatch's part of the step's loss. Statistics are detached 0-dim float64 tensors.

    ``sums`` are added over microbatches and ranks, ``maxima`` maximised. A sum named ``unit/x`` is a part of
    the mean of x over ``units``, which is a sum of its own: ``rollout/kl`` and ``rollouts``. ``histograms`` are counts
    in the bins of ``statistics.EDGES``, [bins] each, which are added as sums are.

    ``log_z_gradient_S``, of a loss that needs ``log_z``: the gradient, with respect to the log Z of each sequence, of
    this microbatch's part of half the mean of the squared residual in nats. That is the loss over tau, so that what log
    Z learns from is no weaker with a smaller tau.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    histograms: Mapping[str, Tensor] = field(default_factory=dict)
    log_z_gradient_S: Tensor | None = None  # float64


class Loss(Protocol):
    """An objective. It holds settings only."""

    @property
    def needs(self) -> Needs: ...

    def __call__(self, inputs: LossInputs) -> LossOutput: ...


LossAt = Callable[[int], Loss]
"""The loss of an optimizer step, counted from 1: what it weighs may change with it, what it needs does not."""


def loss_inputs(
    microbatch: PackedMicrobatch,
    logprob_T: Tensor,
    *,
    normaliser: float,
    reference_logprob_T: Tensor | None = None,
    log_z_S: Tensor | None = None,
) -> LossInputs:
    """The inputs for ``microbatch``, on the device of ``logprob_T``: its log-probs at ``response``."""
    device = logprob_T.device
    mb = microbatch

    def float64(array: object) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float64, device=device)

    return LossInputs(
        logprob_T=logprob_T,
        sequence_index_T=torch.as_tensor(mb.sequence_index[mb.response], dtype=torch.int64, device=device),
        group_index_S=torch.as_tensor(mb.group_index, dtype=torch.int64, device=device),
        copies_S=float64(mb.copies),
        reward_S=float64(mb.reward),
        reference_logprob_S=float64(mb.reference_logprob),
        behaviour_logprob_T=float64(mb.behaviour_logprob[mb.response]),
        reference_logprob_T=None if reference_logprob_T is None else reference_logprob_T.double(),
        log_z_S=log_z_S,
        n_groups=mb.n_groups,
        normaliser=normaliser,
    )


def join_inputs(parts: Sequence[LossInputs]) -> LossInputs:
    """The parts of one group, each from a microbatch of its own, as the inputs of the whole group."""
    first_S = np.cumsum([0, *(part.n_sequences for part in parts)])

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    names = ["logprob_T", "behaviour_logprob_T", "group_index_S", "copies_S", "reward_S", "reference_logprob_S"]
    names += [name for name in ("reference_logprob_T", "log_z_S") if getattr(parts[0], name) is not None]
    return replace(
        parts[0],
        sequence_index_T=torch.cat(
            [part.sequence_index_T + int(first) for part, first in zip(parts, first_S, strict=False)]
        ),
        **{name: joined(name) for name in names},
    )


def mean_statistics(sums: Mapping[str, float]) -> dict[str, float]:
    """For each globally added sum ``unit/x``: the mean ``x`` over ``units``. Others stay sums."""
    means: dict[str, float] = {}
    for name, value in sums.items():
        unit, slash, statistic = name.rpartition("/")
        count = sums[f"{unit}s"] if slash else 1.0
        means[statistic] = value / count if count else 0.0
    return means
