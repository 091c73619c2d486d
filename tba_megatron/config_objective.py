"""The sections about what is optimised: the objective, its guards, and what counts as a reward.

What each objective computes, and where it comes from, is with its class in ``loss/``.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from tba_megatron.config_sections import Constant, CountOrZero, Fraction, Line, NonNegative, Section

# Far beyond what makes sense, and as far from what would be infinite or nothing in float32.
Coefficient = Annotated[float, Field(ge=1e-9, le=1e9)]
CoefficientOrZero = Annotated[float, Field(ge=0.0, le=1e9)]


class LinearBeta(Line):
    """GSM8K of the paper: target 0.004, both steps 500; TL;DR: target 0.05, target_step 128, stop_step 32 (A.4)."""

    target: Coefficient


BetaSchedule = Annotated[Constant | LinearBeta, Field(discriminator="kind")]


class Annealed(Section):
    """What has a beta that may change with the optimizer step, counted from 1."""

    beta: Coefficient
    """Reward units per nat of KL to the reference."""
    beta_schedule: BetaSchedule = Constant()

    def beta_at(self, step: int) -> float:
        return self.beta_schedule.value_at(self.beta, step)

    def at(self, step: int) -> Self:
        """With the beta of ``step``."""
        return self.model_copy(update={"beta": self.beta_at(step)})


class TbVarGrad(Annealed):
    """Trajectory balance, VarGrad estimate of log Z (TBA, Eq. 5)."""

    kind: Literal["tb_vargrad"] = "tb_vargrad"


class TbaPrime(Annealed):
    """TBA' (Eq. 7): - stop_grad(advantage) * log pi, with the KL to the reference in the reward."""

    kind: Literal["tba_prime"] = "tba_prime"


class TbLearnedZ(Annealed):
    """Trajectory balance with a learned log Z, linear in the mean of the prompt's last hidden states (Lee et al.).

    log Z is of the order of reward / beta, so a schedule of beta moves what it has to learn.
    """

    kind: Literal["tb_learned_z"] = "tb_learned_z"
    log_z_learning_rate: Coefficient = 0.05
    """Nats that log Z may move in a step, about: Adam's rate for its bias, and over the hidden size for its weights. It
    needs far more than the policy, and with a small beta more still; it knows no schedule."""


class KimiK15(Section):
    """Kimi K1.5: least squares, held to the policy of the last reset of the reference."""

    kind: Literal["kimi_k15"] = "kimi_k15"
    tau: Coefficient
    """Reward units per nat of log pi / pi_ref."""


class KimiK2(Section):
    """Kimi K2: least squares, held to the policy that wrote each completion."""

    kind: Literal["kimi_k2"] = "kimi_k2"
    tau: Coefficient
    """Reward units per nat of log pi / mu."""


class Oapl(Section):
    """OAPL: as Kimi K2, with the optimal value of the policy that wrote the completions for the mean reward."""

    kind: Literal["oapl"] = "oapl"
    tau: Coefficient
    """Reward units per nat of log pi / mu."""


class Rloo(Section):
    """REINFORCE with the mean of the others as baseline, without a ratio."""

    kind: Literal["rloo"] = "rloo"
    beta: CoefficientOrZero = 0.0
    """Reward units per nat of KL to the reference, in the reward; 0: no reference."""


class ProximalRloo(Section):
    """RLOO with the clipped ratio of whole completions."""

    kind: Literal["proximal_rloo"] = "proximal_rloo"
    beta: CoefficientOrZero = 0.0
    """Reward units per nat of log mu / pi_ref, in the reward; 0: no reference."""
    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2


class PpoClip(Section):
    """PPO's clipped surrogate by token, with the group's mean reward for a critic."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: NonNegative = 0.0
    """Bounds the loss of a negative advantage to so many times the advantage; 0: no bound, else more than 1."""


class Grpo(Section):
    """GRPO: standardised advantages, the mean over a completion's tokens."""

    kind: Literal["grpo"] = "grpo"
    beta: CoefficientOrZero = 0.0
    """Weight of the KL to the reference in the loss (k3), whose log-probs are then computed in every step; 0: none."""
    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2


class DrGrpo(Section):
    """Dr. GRPO: no standard deviation, and a constant, ``search.max_new_tokens``, for each completion's length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2


class OnlineDpo(Section):
    """Online DPO: the best of a group against its worst."""

    kind: Literal["online_dpo"] = "online_dpo"
    beta: Coefficient = 0.1
    """1 / nat: how much of a margin over the reference counts as won."""


Objective = Annotated[
    TbVarGrad
    | TbaPrime
    | TbLearnedZ
    | KimiK15
    | KimiK2
    | Oapl
    | Rloo
    | ProximalRloo
    | PpoClip
    | Grpo
    | DrGrpo
    | OnlineDpo,
    Field(discriminator="kind"),
]


class GuardsConfig(Section):
    """On pushes that lower a completion. Both depart from an objective's paper; both are off by default."""

    negative_weight: CoefficientOrZero = 1.0
    """Multiplies negative advantages. 1: off; needs nothing of the rollouts, but moves the optimum, at no lag too."""
    lost_negative_ratio: Fraction = 0.0
    """A negative push counts for nothing where pi / mu is below this: where the policy has lost the completion since it
    was written. 0: off. On completions of the newest policy it does what the gap between engine and trainer makes of
    it: nothing in float32; in bfloat16 that gap grows with the length, so prefer ``by_token`` there."""
    by_token: bool = False
    """``lost_negative_ratio`` looks at each token alone, not at whole completions."""


class ReferenceConfig(Section):
    """pi_ref, which starts as the start model."""

    placement: Literal["device", "host", "searcher"] = "device"
    """``device``: a second model beside the policy. ``host``: in host memory, swapped with the policy's weights for the
    passes that score with it; of what has no log-prob yet, or for ``grpo`` with ``beta``, in each step. ``searcher``:
    each searcher holds it, and scores what it writes before sending it."""
    reset_every_steps: CountOrZero = 0
    """After each multiple of it the reference is the policy of that step, and the log-probs of a stored rollout are
    computed anew when it is drawn (TBA': 50); 0: never."""


class ObjectiveConfig(Section):
    loss: Objective
    reference: ReferenceConfig = ReferenceConfig()
    guards: GuardsConfig = GuardsConfig()
    temperature: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Divides the logits of policy and reference in the objective, whatever a searcher sampled with."""
    truncated: Literal["keep", "drop", "penalise"] = "keep"
    """What happens to a completion without EOS; counted in each case. ``drop`` makes its rollout invalid."""
    truncated_penalty: NonNegative = 1.0
    """Taken from the reward with ``truncated: penalise``."""

    @property
    def needs_behaviour(self) -> bool:
        """Whether a rollout is worth something only with the log-probs of the policy that wrote it."""
        return self.guards.lost_negative_ratio > 0.0 or isinstance(
            self.loss, KimiK2 | Oapl | ProximalRloo | PpoClip | Grpo | DrGrpo
        )

    @property
    def reads_reference(self) -> Literal["none", "sums", "tokens"]:
        """What the loss reads of the reference, as ``ReferenceNeed`` of ``loss/base.py``."""
        if isinstance(self.loss, TbVarGrad | TbaPrime | TbLearnedZ | KimiK15 | OnlineDpo):
            return "sums"
        if isinstance(self.loss, Rloo | ProximalRloo) and self.loss.beta:
            return "sums"
        return "tokens" if isinstance(self.loss, Grpo) and self.loss.beta else "none"

    @property
    def needs_reference(self) -> bool:
        """Whether a rollout is worth something only with the reference's log-prob, because no trainer computes it."""
        return self.reference.placement == "searcher"
