import numpy as np
import pytest
import torch

from tba_megatron.loss.base import Needs, loss_inputs, mean_statistics
from tba_megatron.loss.supervised import SupervisedLoss
from tba_megatron.packing import demonstration_groups, pack_into

PAIRS = [(np.int32([1]), np.int32([2] * n)) for n in (3, 1, 0, 2)]


def run(n_microbatches: int) -> tuple[float, dict, dict]:
    """Loss, gradient by demonstration, means; position t of demonstration i has log-prob -(i + t / 10)."""
    loss, grads, sums = 0.0, {}, {}
    for p in pack_into(demonstration_groups(PAIRS), n_microbatches):
        mb = p.microbatch
        demonstrations = [p.rollout_ids[s].sequence for s in mb.sequence_index[mb.response]]
        values = -(np.array(demonstrations) + mb.positions[mb.response] / 10)
        logprob_T = torch.tensor(values, dtype=torch.float32, requires_grad=True)
        output = SupervisedLoss()(loss_inputs(mb, logprob_T, normaliser=6))
        output.loss.backward()
        loss += output.loss.item()
        for i, grad in zip(demonstrations, logprob_T.grad.tolist(), strict=True):
            grads.setdefault(i, []).append(grad)
        for name, value in output.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return loss, grads, mean_statistics(sums)


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_response_tokens():
    loss, grads, means = run(1)
    expected = (0 + 0.1 + 0.2 + 1 + 3 + 3.1) / 6
    assert loss == pytest.approx(expected)
    assert means == pytest.approx({"loss": expected, "nll": expected, "tokens": 6, "rollouts": 4})
    assert grads == {
        0: [pytest.approx(-1 / 6)] * 3,
        1: [pytest.approx(-1 / 6)],
        3: [pytest.approx(-1 / 6)] * 2,
    }


@pytest.mark.parametrize("n_microbatches", [2, 3, 4])
def test_splitting_over_microbatches_changes_nothing(n_microbatches):
    loss, grads, means = run(n_microbatches)
    whole_loss, whole_grads, whole_means = run(1)
    assert loss == pytest.approx(whole_loss)
    assert grads == whole_grads
    assert means == pytest.approx(whole_means)


def test_it_needs_no_reference():
    assert SupervisedLoss().needs == Needs()
