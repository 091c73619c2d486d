"""Supervised fine-tuning: the mean negative log-likelihood of the response tokens. T response positions."""

from __future__ import annotations

import torch

from tba_megatron.loss.base import LossInputs, LossOutput, Needs


class SupervisedLoss:
    """-sum(log pi) / ``normaliser``, the global number of response tokens of the step."""

    needs = Needs()

    def __call__(self, inputs: LossInputs) -> LossOutput:
        weight_T = inputs.copies_S[inputs.sequence_index_T]
        nll = -(weight_T * inputs.logprob_T.double()).sum()
        loss = nll / inputs.normaliser
        with torch.no_grad():
            sums = {
                "loss": loss.detach(),
                "token/nll": nll.detach(),
                "tokens": weight_T.sum(),
                "rollouts": inputs.copies_S.sum(),
            }
        return LossOutput(loss=loss, sums=sums)
