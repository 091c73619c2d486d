"""Trajectory balance: make log pi(y) - log pi_ref(y) - r / beta constant over the completions of a prompt.

TBA, arXiv 2503.18929. With kl = log pi - log pi_ref of a whole completion, log Z = mean(r / beta - kl) over
its group (Eq. 4), the residual is log Z + kl - r / beta (Eq. 5), and the advantage A = (r - mean r) - beta
(kl - mean kl) is -beta times the residual. No importance weight: completions of any policy are legal. T
response positions, S sequences, G groups.

A group of equal rewards still has a gradient, by intention: it lowers the completions whose kl is above the
mean of the group and raises the others, towards the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tba_megatron.loss.base import LossInputs, LossOutput, segment_mean, segment_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class _Balance:
    """The terms of the family. ``logprob_S`` has a gradient, the others have none."""

    logprob_S: Tensor
    kl_S: Tensor
    log_z_G: Tensor
    advantage_S: Tensor


def _balance(inputs: LossInputs, beta: float) -> _Balance:
    logprob_S = segment_sum(inputs.logprob_T, inputs.sequence_index_T, inputs.n_sequences)
    kl_S = (logprob_S - inputs.reference_logprob_S).detach()
    log_z_G = segment_mean(inputs.reward_S / beta - kl_S, inputs.copies_S, inputs.group_index_S, inputs.n_groups)
    advantage_S = inputs.reward_S - beta * (kl_S + log_z_G[inputs.group_index_S])
    return _Balance(logprob_S=logprob_S, kl_S=kl_S, log_z_G=log_z_G, advantage_S=advantage_S)


class TbVarGradLoss:
    """beta / 2 times the squared residual, with log Z held fixed (Eq. 5).

    The factor makes the gradient -A grad(log pi), whose scale does not grow as 1 / beta; clipping needs that.
    """

    needs_reference = True

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, inputs: LossInputs) -> LossOutput:
        b = _balance(inputs, self._beta)
        residual_S = (
            b.log_z_G[inputs.group_index_S] + b.logprob_S - inputs.reference_logprob_S - inputs.reward_S / self._beta
        )
        loss = (inputs.copies_S * residual_S.square()).sum() * (self._beta / 2 / inputs.normaliser)
        return _output(loss, b, inputs, self._beta)


class TbaPrimeLoss:
    """-stop_grad(A) log pi (TBA', Eq. 7): the gradient of ``TbVarGradLoss`` in another form."""

    needs_reference = True

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, inputs: LossInputs) -> LossOutput:
        b = _balance(inputs, self._beta)
        loss = -(inputs.copies_S * b.advantage_S * b.logprob_S).sum() / inputs.normaliser
        return _output(loss, b, inputs, self._beta)


@torch.no_grad()
def _output(loss: Tensor, b: _Balance, inputs: LossInputs, beta: float) -> LossOutput:
    copies_S = inputs.copies_S
    length_S = segment_sum(torch.ones_like(inputs.logprob_T), inputs.sequence_index_T, inputs.n_sequences)
    abs_advantage_S = b.advantage_S.abs()
    return LossOutput(
        loss=loss,
        sums={
            "loss": loss.detach().double(),
            "rollouts": copies_S.sum(),
            "groups": copies_S.new_tensor(float(inputs.n_groups)),
            "rollout/residual_square": (copies_S * (b.advantage_S / beta).square()).sum(),
            "rollout/kl": (copies_S * b.kl_S).sum(),
            "group/log_z": b.log_z_G.sum(),
            "rollout/reward": (copies_S * inputs.reward_S).sum(),
            "rollout/abs_advantage": (copies_S * abs_advantage_S).sum(),
            "rollout/completion_tokens": (copies_S * length_S).sum(),
            "group/equal_rewards": _equal_reward_groups(inputs),
        },
        maxima={
            "max_abs_advantage": _max(abs_advantage_S),
            "max_completion_tokens": _max(length_S),
        },
    )


def _equal_reward_groups(inputs: LossInputs) -> Tensor:
    """How many groups have one reward: they teach nothing about the task."""
    zeros_G = inputs.reward_S.new_zeros(inputs.n_groups)
    largest_G, smallest_G = (
        zeros_G.scatter_reduce(0, inputs.group_index_S, inputs.reward_S, reduce, include_self=False)
        for reduce in ("amax", "amin")
    )
    return (largest_G == smallest_G).sum().double()


def _max(values_S: Tensor) -> Tensor:
    return values_S.max() if len(values_S) else values_S.new_zeros(())
