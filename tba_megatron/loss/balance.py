"""Trajectory balance: make log pi(y) - log pi_ref(y) - r / beta constant over the completions of a prompt.

TBA, arXiv 2503.18929. With kl = log pi - log pi_ref of a whole completion, log Z = mean(r / beta - kl) over
its group (Eq. 4), the residual is log Z + kl - r / beta (Eq. 5), and the advantage A = (r - mean r) - beta
(kl - mean kl) is -beta times the residual. No importance weight: completions of any policy are legal. T
response positions, S sequences, G groups.

A group of equal rewards still has a gradient, by intention: it lowers the completions whose kl is above the
mean of the group and raises the others, towards the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tba_megatron.kernels.balance import BalanceOut, balance, segment_sum
from tba_megatron.loss.base import LossInputs, LossOutput


class TbVarGradLoss:
    """beta / 2 times the squared residual, with log Z held fixed (Eq. 5).

    The factor makes the gradient -A grad(log pi), whose scale does not grow as 1 / beta; clipping needs that.
    """

    needs_reference = True

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, inputs: LossInputs) -> LossOutput:
        b = _balance(inputs, inputs.logprob_T, self._beta)
        return _output(b.loss, b, inputs, self._beta)


class TbaPrimeLoss:
    """-stop_grad(A) log pi (TBA', Eq. 7): the gradient of ``TbVarGradLoss`` in another form."""

    needs_reference = True

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, inputs: LossInputs) -> LossOutput:
        b = _balance(inputs, inputs.logprob_T.detach(), self._beta)
        # The coefficient of a sequence is -copies A / normaliser.
        loss = (b.coefficient[inputs.sequence_index_T] * inputs.logprob_T).sum()
        return _output(loss, b, inputs, self._beta)


def _balance(inputs: LossInputs, logprob_T: Tensor, beta: float) -> BalanceOut:
    return balance(
        logprob_T,
        inputs.sequence_index_T,
        inputs.group_index_S,
        reward_over_beta=inputs.reward_S / beta,
        copies=inputs.copies_S,
        n_groups=inputs.n_groups,
        scale=beta / 2 / inputs.normaliser,
        reference_sums=inputs.reference_logprob_S,
    )


@torch.no_grad()
def _output(loss: Tensor, b: BalanceOut, inputs: LossInputs, beta: float) -> LossOutput:
    copies_S = inputs.copies_S
    length_S = segment_sum(torch.ones_like(inputs.logprob_T), inputs.sequence_index_T, inputs.n_sequences)
    abs_advantage_S = beta * b.residual.abs()
    return LossOutput(
        loss=loss,
        sums={
            "loss": loss.detach(),
            "rollouts": copies_S.sum(),
            "groups": copies_S.new_tensor(float(inputs.n_groups)),
            "rollout/residual_square": (copies_S * b.residual.square()).sum(),
            "rollout/kl": (copies_S * b.kl).sum(),
            "group/log_z": b.log_z.sum(),
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
