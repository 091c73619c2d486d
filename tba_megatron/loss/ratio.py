"""The ratio family: REINFORCE with advantages from the group, and its clipped forms, which weigh by pi / mu.

    loss = mean of weight * max(-A rho, -A clip(rho, 1 - low, 1 + high))

rho = pi / mu, of a token or of the whole completion, mu being the policy that wrote it: its log-probs as the engine
gave them, at the temperature it sampled with. Where nothing is clipped and pi = mu the gradient is that of REINFORCE,
- A grad(log pi). A member is an advantage, a ratio and a weight. T response positions, S sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tba_megatron.kernels.balance import segment_sum
from tba_megatron.loss.base import LossInputs, LossOutput, Needs, ReferenceNeed
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.regression import push
from tba_megatron.loss.sequences import Sequences, centred, leave_one_out, standardised
from tba_megatron.loss.statistics import kl_sums, output

_MOST_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """rho is held within 1 - low and 1 + high where that is the worse case; ``dual`` bounds the loss of a negative
    advantage by -A dual (dual-clip PPO, arXiv 1912.09729); infinite: no bound."""

    low: float
    high: float
    dual: float = math.inf


class Rloo:
    """- A log pi with A = r - beta kl less the mean of the others of the group (RLOO, arXiv 2402.14740). beta 0 needs
    no reference. It weighs nothing by age: off-policy it is biased."""

    def __init__(self, beta: float, guards: Guards) -> None:
        self._beta, self._guards = beta, guards

    @property
    def needs(self) -> Needs:
        return Needs(
            reference=ReferenceNeed.SUMS if self._beta else ReferenceNeed.NONE, behaviour=self._guards.needs_behaviour
        )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        s = Sequences(inputs)
        reward_S = s.reward_S - self._beta * s.kl_S if self._beta else s.reward_S
        advantage_S = leave_one_out(reward_S, s)
        return output(push(advantage_S, s, self._guards), advantage_S, s, self.needs.reference)


class Clipped:
    """A member with a ratio: ``by_sequence`` that of the whole completion, else one for each token."""

    by_sequence: ClassVar[bool] = False

    def __init__(self, clip: Clip, guards: Guards) -> None:
        self._clip, self._guards = clip, guards

    @property
    def needs(self) -> Needs:
        return Needs(behaviour=True)

    def advantage_S(self, s: Sequences) -> Tensor:
        """[S] without gradient."""
        raise NotImplementedError

    def weight_S(self, s: Sequences) -> Tensor:
        """[S] what a completion, or each of its tokens, counts."""
        return torch.ones_like(s.copies_S)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        s = Sequences(inputs)
        log_ratio = inputs.logprob_T.double() - inputs.behaviour_logprob_T
        with torch.no_grad():
            advantage_S = self.advantage_S(s)
            weight_S = s.copies_S * self.weight_S(s) / inputs.normaliser
        if self.by_sequence:
            log_ratio = segment_sum(log_ratio, inputs.sequence_index_T, inputs.n_sequences)
            advantage, weight, copies = advantage_S * self._guards.factor_S(advantage_S, s), weight_S, s.copies_S
        else:
            advantage = s.spread(advantage_S) * self._guards.factor_T(advantage_S, s)
            weight, copies = s.spread(weight_S), s.spread(s.copies_S)
        surrogate, clipped = clipped_surrogate(log_ratio, advantage, self._clip)
        # A clamp hides a ratio that is not known from the gradient. As NaN it makes the step be skipped, and counted.
        weight = weight + 0.0 * log_ratio.detach()
        loss = (weight * (surrogate + 0.0 * log_ratio)).sum()
        more = {"ratios": copies.sum(), "ratio/clipped": (copies * clipped).sum()}
        return output(loss, advantage_S, s, self.needs.reference, more)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """(loss, whether the bound is what counts, so that there is no gradient), by element; PPO, arXiv 1707.06347, Eq. 7.

    Beyond e^20 a ratio is e^20, and has no gradient: one more doubling would end in numbers that are not finite.
    """
    ratio = log_ratio.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO).exp()
    plain = -advantage * ratio
    loss = torch.maximum(plain, -advantage * ratio.clamp(1.0 - clip.low, 1.0 + clip.high))
    if clip.dual != math.inf:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * clip.dual), loss)
    return loss, (loss != plain).detach()


class PpoClip(Clipped):
    """PPO's clipped surrogate by token, with A = r - mean of the group in the place of a critic (arXiv 1707.06347)."""

    def advantage_S(self, s: Sequences) -> Tensor:
        return centred(s.reward_S, s)


class DrGrpo(PpoClip):
    """PPO's surrogate, summed over a completion and divided by a constant, so that length has no weight; A without the
    standard deviation, no KL (Dr. GRPO, arXiv 2503.20783)."""

    def __init__(self, clip: Clip, guards: Guards, max_new_tokens: int) -> None:
        super().__init__(clip, guards)
        self._max_new_tokens = max_new_tokens

    def weight_S(self, s: Sequences) -> Tensor:
        return torch.full_like(s.copies_S, 1.0 / self._max_new_tokens)


class Grpo(Clipped):
    """PPO's surrogate in the mean over a completion's tokens, with standardised A, and beta times the k3 estimate of
    the KL to the reference (GRPO, arXiv 2402.03300, Eq. 3 and 4). beta 0 needs no reference."""

    def __init__(self, beta: float, clip: Clip, guards: Guards) -> None:
        super().__init__(clip, guards)
        self._beta = beta

    @property
    def needs(self) -> Needs:
        return Needs(reference=ReferenceNeed.TOKENS if self._beta else ReferenceNeed.NONE, behaviour=True)

    def advantage_S(self, s: Sequences) -> Tensor:
        return standardised(s.reward_S, s)

    def weight_S(self, s: Sequences) -> Tensor:
        return 1.0 / s.length_S.clamp(min=1.0)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        found = super().__call__(inputs)
        return self._with_kl(found, inputs) if self._beta else found

    def _with_kl(self, found: LossOutput, inputs: LossInputs) -> LossOutput:
        assert inputs.reference_logprob_T is not None
        s = Sequences(inputs)
        weight_T = s.spread(self._beta * s.copies_S * self.weight_S(s) / inputs.normaliser)
        less_T = (inputs.reference_logprob_T - inputs.logprob_T.double()).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
        loss = found.loss + (weight_T * (less_T.exp() - less_T - 1.0)).sum()
        kl_S = s.logprob_S - segment_sum(inputs.reference_logprob_T, inputs.sequence_index_T, inputs.n_sequences)
        return replace(found, loss=loss, sums={**found.sums, "loss": loss.detach(), **kl_sums(kl_S, s)})


class ProximalRloo(Clipped):
    """PPO's surrogate with the ratio of the whole completion, and A = r - beta (log mu - log pi_ref) less the mean of
    the others (Proximal RLOO of async RLHF, arXiv 2410.18252). beta 0 needs no reference."""

    by_sequence = True

    def __init__(self, beta: float, clip: Clip, guards: Guards) -> None:
        super().__init__(clip, guards)
        self._beta = beta

    @property
    def needs(self) -> Needs:
        return Needs(reference=ReferenceNeed.SUMS if self._beta else ReferenceNeed.NONE, behaviour=True)

    def advantage_S(self, s: Sequences) -> Tensor:
        reward_S = s.reward_S - self._beta * (s.behaviour_S - s.reference_S) if self._beta else s.reward_S
        return leave_one_out(reward_S, s)
