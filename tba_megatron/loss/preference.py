"""Objectives of pairs: the better of two completions of a prompt is to gain on the other. S sequences, P pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tba_megatron.kernels.balance import segment_sum
from tba_megatron.loss.base import LossInputs, LossOutput, Needs, ReferenceNeed
from tba_megatron.loss.sequences import Sequences
from tba_megatron.loss.statistics import output


class OnlineDpo:
    """- log sigmoid(beta (kl of the best - kl of the worst)) for each prompt (online DPO of async RLHF, arXiv
    2410.18252). Of several best or worst ones, each pair counts as much; a group of equal rewards has none.

    Its mean is over prompts, those without a pair counted in.
    """

    needs = Needs(reference=ReferenceNeed.SUMS)

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, inputs: LossInputs) -> LossOutput:
        s = Sequences(inputs)
        better_P, worse_P, weight_P = _pairs(s)
        logprob_S = segment_sum(inputs.logprob_T, inputs.sequence_index_T, inputs.n_sequences)
        kl_S = logprob_S - inputs.reference_logprob_S
        margin_P = self._beta * (kl_S[better_P] - kl_S[worse_P])
        loss = -(weight_P * logsigmoid(margin_P)).sum()
        with torch.no_grad():
            # d loss / d log pi of a sequence, as an advantage of it.
            pull_P = weight_P * self._beta * torch.sigmoid(-margin_P) * inputs.normaliser
            advantage_S = segment_sum(pull_P, better_P, inputs.n_sequences) - segment_sum(
                pull_P, worse_P, inputs.n_sequences
            )
            more = {"pair_prompts": weight_P.sum(), "pair_prompt/preferred": (weight_P * (margin_P > 0)).sum()}
        return output(loss, advantage_S / s.copies_S.clamp(min=1.0), s, self.needs.reference, more)


@torch.no_grad()
def _pairs(s: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """([P] the best, [P] the worst, [P] weights) of all groups whose rewards differ; the weights of a group add up to
    1 over the prompts of the step."""
    i = s.inputs
    present_S = i.copies_S > 0
    reward_S, group_S = i.reward_S, i.group_index_S

    def extreme_G(reduce: str) -> Tensor:
        zeros_G = reward_S.new_zeros(i.n_groups)
        return zeros_G.scatter_reduce(0, group_S[present_S], reward_S[present_S], reduce, include_self=False)

    differ_S = ~s.equal_rewards_G()[group_S] & present_S
    best = (differ_S & (reward_S == extreme_G("amax")[group_S])).nonzero()[:, 0]
    worst = (differ_S & (reward_S == extreme_G("amin")[group_S])).nonzero()[:, 0]
    at, to = (group_S[best][:, None] == group_S[worst]).nonzero(as_tuple=True)
    better_P, worse_P = best[at], worst[to]
    both_P = i.copies_S[better_P] * i.copies_S[worse_P]
    pairs_G = segment_sum(both_P, group_S[better_P], i.n_groups)
    n_prompts_S = i.normaliser / s.group_size_S  # of the step: all groups are of one size
    return better_P, worse_P, both_P / pairs_G[group_S[better_P]] / n_prompts_S[better_P]
