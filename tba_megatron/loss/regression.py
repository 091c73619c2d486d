"""The regression family: make r - b - tau (log pi - anchor) zero for each completion, by least squares.

    loss = 1 / (2 tau) * mean of w (r - b - tau (log pi - anchor))^2       gradient: - w A grad(log pi)

where A is the residual: reward units, an advantage. tau is in reward units per nat, the anchor is the log-prob of the
completion under another policy, b is the baseline of its prompt, and w are the guards, of the gradient alone. The
factor keeps the size of the gradient apart from tau, which clipping and Adam's moments need. No importance weights:
completions of any policy are legal. A member is an anchor and a baseline. T response positions, S sequences, G groups.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from tba_megatron.kernels.balance import balance
from tba_megatron.loss.base import LossInputs, LossOutput, Needs, ReferenceNeed
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.sequences import Sequences, centred
from tba_megatron.loss.statistics import output, total


class Anchor(StrEnum):
    """Whose log-probs a policy is held to."""

    REFERENCE = "reference"
    BEHAVIOUR = "behaviour"  # who wrote the completion


class Regression:
    """A member of the family. ``tau`` in reward units per nat."""

    anchor: ClassVar[Anchor] = Anchor.REFERENCE

    def __init__(self, tau: float, guards: Guards) -> None:
        self._tau, self._guards = tau, guards

    @property
    def needs(self) -> Needs:
        to_behaviour = self.anchor is Anchor.BEHAVIOUR
        return Needs(
            reference=ReferenceNeed.NONE if to_behaviour else ReferenceNeed.SUMS,
            behaviour=to_behaviour or self._guards.needs_behaviour,
        )

    def residual_S(self, s: Sequences) -> Tensor:
        """[S] r - b - tau (log pi - anchor), without gradient."""
        raise NotImplementedError

    def log_ratio_S(self, s: Sequences) -> Tensor:
        """[S] log pi - anchor."""
        return s.drift_S if self.anchor is Anchor.BEHAVIOUR else s.kl_S

    def __call__(self, inputs: LossInputs) -> LossOutput:
        s = Sequences(inputs)
        with torch.no_grad():
            residual_S = self.residual_S(s)
            value = total(residual_S.square(), s) / (2 * self._tau * inputs.normaliser)
        pushes = push(residual_S, s, self._guards)
        return self._output(value + pushes - pushes.detach(), residual_S, s)

    def log_z_S(self, s: Sequences) -> Tensor:
        """[S] nats, of the group: what makes its residuals zero in the mean."""
        return s.group_mean(s.reward_S / self._tau - self.log_ratio_S(s))

    def _output(self, loss: Tensor, residual_S: Tensor, s: Sequences) -> LossOutput:
        return output(loss, residual_S, s, self.needs.reference, self._more(residual_S, s), self._tau)

    def _more(self, residual_S: Tensor, s: Sequences) -> dict[str, Tensor]:
        """The square of log Z gives its spread."""
        log_z_S = self.log_z_S(s)
        in_group_S = 1.0 / s.group_size_S
        return {
            "rollout/residual_square": total((residual_S / self._tau).square(), s),
            "group/log_z": total(in_group_S * log_z_S, s),
            "group/log_z_square": total(in_group_S * log_z_S.square(), s),
        }


def push(advantage_S: Tensor, s: Sequences, guards: Guards) -> Tensor:
    """- mean of A log pi, guarded, with gradient: REINFORCE with the advantages as they are given."""
    with torch.no_grad():
        weight_S = torch.where(s.copies_S != 0, s.copies_S * advantage_S, 0.0) / s.inputs.normaliser
        weight_T = s.spread(weight_S) * guards.factor_T(advantage_S, s)
    return -(weight_T * s.inputs.logprob_T.double()).sum()


class TbVarGrad(Regression):
    """Trajectory balance, b = mean of r - tau kl, which is tau log Z (TBA, arXiv 2503.18929, Eq. 4 and 5).

    Holding log Z fixed changes nothing: the residuals of a group add up to 0. A group of equal rewards still has a
    gradient, by intention: towards the reference.
    """

    def residual_S(self, s: Sequences) -> Tensor:
        i = s.inputs
        found = balance(
            i.logprob_T.detach(),
            i.sequence_index_T,
            i.group_index_S,
            reward_over_beta=i.reward_S / self._tau,
            copies=i.copies_S,
            n_groups=i.n_groups,
            scale=1.0,
            reference_sums=i.reference_logprob_S,
        )
        return -self._tau * found.residual


class TbaPrime(TbVarGrad):
    """- stop_grad(A) log pi with the same A (TBA', Eq. 7): the gradient of ``TbVarGrad`` in another form. The paper has
    ``objective.reference.reset_every_steps`` 50 beside it, and a constant beta of 0.005."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        s = Sequences(inputs)
        residual_S = self.residual_S(s)
        return self._output(push(residual_S, s, self._guards), residual_S, s)


class KimiK15(Regression):
    """(r - mean r - tau (log pi - log pi_ref))^2 with a reference that is the policy of a while ago: the gradient of
    - (r - mean r) log pi + tau / 2 (log pi - log pi_ref)^2 (Kimi K1.5, arXiv 2501.12599, section 2.3.2). Kimi resets it
    in each iteration. The baseline lacks what ``TbVarGrad`` has, tau mean(log pi - log pi_ref)."""

    def residual_S(self, s: Sequences) -> Tensor:
        return centred(s.reward_S, s) - self._tau * s.kl_S


class TbLearnedZ(Regression):
    """Trajectory balance with a learned log Z, b = tau log Z(x), as GFlowNet red-teaming has it (Lee et al., arXiv
    2405.18540; Eq. 3 of TBA, arXiv 2503.18929): (log Z(x) + log pi - log pi_ref - r / tau)^2.

    log Z is an input, and its gradient an output: what it is a function of is not known here. Unlike the estimate from
    the group it tells a good group from a bad one: residuals of a group need not add up to 0, and a group of one
    rollout teaches too. Guards do not touch what log Z learns from.
    """

    @property
    def needs(self) -> Needs:
        return replace(super().needs, log_z=True)

    def residual_S(self, s: Sequences) -> Tensor:
        return s.reward_S - self._tau * (_learned_S(s) + s.kl_S)

    def log_z_S(self, s: Sequences) -> Tensor:
        """The learned one."""
        return s.group_mean(_learned_S(s))

    @torch.no_grad()
    def _output(self, loss: Tensor, residual_S: Tensor, s: Sequences) -> LossOutput:
        gradient_S = -s.copies_S * residual_S / (self._tau * s.inputs.normaliser)
        found = super()._output(loss, residual_S, s)
        return replace(found, log_z_gradient_S=torch.where(s.copies_S != 0, gradient_S, 0.0))

    def _more(self, residual_S: Tensor, s: Sequences) -> dict[str, Tensor]:
        """``log_z_error_square`` is how far the learned log Z is from the estimate from the group."""
        error_S = self.log_z_S(s) - super().log_z_S(s)
        error = total(error_S.square() / s.group_size_S, s)
        return {**super()._more(residual_S, s), "group/log_z_error_square": error}


def _learned_S(s: Sequences) -> Tensor:
    log_z_S = s.inputs.log_z_S
    assert log_z_S is not None, "a loss that needs log Z was called without it"
    return log_z_S


class KimiK2(Regression):
    """(r - mean r - tau (log pi - log mu))^2 with the policy mu that wrote the completion (Kimi K2, arXiv 2507.20534,
    section 3.2.3). Its gradient is that of trajectory balance anchored in mu, plus tau mean(log pi - log mu) grad(log
    pi), which pushes a whole group up or down."""

    anchor = Anchor.BEHAVIOUR

    def residual_S(self, s: Sequences) -> Tensor:
        return centred(s.reward_S, s) - self._tau * s.drift_S


class Oapl(Regression):
    """b = tau log mean exp(r / tau), the optimal value of the policy mu that wrote the completions, anchored in mu
    (OAPL, arXiv 2602.19362, with one temperature for both)."""

    anchor = Anchor.BEHAVIOUR

    def residual_S(self, s: Sequences) -> Tensor:
        i = s.inputs
        # Shifted by the largest of the group: exp(r / tau) would overflow.
        top_G = i.reward_S.new_zeros(i.n_groups).scatter_reduce(
            0, i.group_index_S, i.reward_S, "amax", include_self=False
        )
        top_S = top_G[i.group_index_S]
        value_S = top_S + self._tau * s.group_mean(((i.reward_S - top_S) / self._tau).exp()).log()
        return i.reward_S - value_S - self._tau * s.drift_S
