"""The objectives by the name they have in the configuration."""

from __future__ import annotations

from collections.abc import Callable

from tba_megatron import config_sections
from tba_megatron.loss.balance import TbaPrimeLoss, TbVarGradLoss
from tba_megatron.loss.base import Loss

LOSSES: dict[str, Callable[[float], Loss]] = {
    "tb_vargrad": TbVarGradLoss,
    "tba_prime": TbaPrimeLoss,
}


def make_loss(objective: config_sections.Objective) -> Loss:
    """The loss that ``objective.loss`` names."""
    return LOSSES[objective.kind](objective.beta)
