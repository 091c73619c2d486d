"""The objectives by the name they have in the configuration: one line each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tba_megatron import config_objective as section
from tba_megatron.loss.base import Loss
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.preference import OnlineDpo
from tba_megatron.loss.ratio import Clip, DrGrpo, Grpo, PpoClip, ProximalRloo, Rloo
from tba_megatron.loss.regression import KimiK2, KimiK15, Oapl, TbaPrime, TbLearnedZ, TbVarGrad

# Of the objective's section, the guards, and the most tokens that a completion may have.
LOSSES: dict[type[section.Section], Callable[[Any, Guards, int], Loss]] = {
    section.TbVarGrad: lambda o, guards, _: TbVarGrad(o.beta, guards),
    section.TbaPrime: lambda o, guards, _: TbaPrime(o.beta, guards),
    section.TbLearnedZ: lambda o, guards, _: TbLearnedZ(o.beta, guards),
    section.KimiK15: lambda o, guards, _: KimiK15(o.tau, guards),
    section.KimiK2: lambda o, guards, _: KimiK2(o.tau, guards),
    section.Oapl: lambda o, guards, _: Oapl(o.tau, guards),
    section.Rloo: lambda o, guards, _: Rloo(o.beta, guards),
    section.ProximalRloo: lambda o, guards, _: ProximalRloo(o.beta, _clip(o), guards),
    section.PpoClip: lambda o, guards, _: PpoClip(_clip(o, o.dual_clip or math.inf), guards),
    section.Grpo: lambda o, guards, _: Grpo(o.beta, _clip(o), guards),
    section.DrGrpo: lambda o, guards, longest: DrGrpo(_clip(o), guards, longest),
    section.OnlineDpo: lambda o, *_: OnlineDpo(o.beta),
}


def make_loss(objective: section.ObjectiveConfig, max_new_tokens: int, step: int = 1) -> Loss:
    """The loss that ``objective.loss`` names, with its guards, as it is at optimizer step ``step``."""
    guards = Guards(**objective.guards.model_dump())
    loss = objective.loss.at(step) if isinstance(objective.loss, section.Annealed) else objective.loss
    return LOSSES[type(loss)](loss, guards, max_new_tokens)


def _clip(o: Any, dual: float = math.inf) -> Clip:
    return Clip(low=o.clip_low, high=o.clip_high, dual=dual)
