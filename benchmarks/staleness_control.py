"""The control of the mask of lost completions: as many negative pushes are dropped, but at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tba_megatron.config import Config
from tba_megatron.loss.base import Loss
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.registry import LOSSES
from tba_megatron.loss.sequences import Sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class ScatteredGuards(Guards):
    """``Guards`` that drop, of the sequences with a negative advantage, as many as the mask would, whichever."""

    generator: torch.Generator

    def factor_S(self, advantage_S: Tensor, s: Sequences) -> Tensor:
        n_lost = int(((Guards.factor_S(self, advantage_S, s) == 0.0) & (advantage_S < 0)).sum())
        negative = (advantage_S < 0).nonzero()[:, 0]
        chosen = negative[torch.randperm(len(negative), generator=self.generator)[:n_lost]]
        factor_S = torch.ones_like(advantage_S, dtype=torch.float64).masked_fill(advantage_S < 0, self.negative_weight)
        factor_S[chosen] = 0.0
        return factor_S


def scattered_loss(config: Config, seed: int) -> Loss:
    """The configured loss with the control in the place of its guards."""
    objective = config.objective
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    guards = ScatteredGuards(**objective.guards.model_dump(), generator=generator)
    return LOSSES[type(objective.loss)](objective.loss, guards, config.search.max_new_tokens)
