"""Trajectory balance with a learned log Z: what the policy and what log Z learn."""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import gradient_of, inputs_of, random_inputs

from tba_megatron.loss.base import LossInputs, join_inputs, mean_statistics
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.regression import TbLearnedZ, TbVarGrad
from tba_megatron.trainer.step import Update
from tba_megatron.trainer.step_metrics import update_metrics

BETA = 0.3
OFF = Guards()


def estimated_log_z(inputs: LossInputs, beta: float) -> torch.Tensor:
    """[S] the VarGrad estimate of each sequence's group, by a loop."""
    found_S = torch.zeros(inputs.n_sequences, dtype=torch.float64)
    for g in range(inputs.n_groups):
        members = [s for s in range(inputs.n_sequences) if inputs.group_index_S[s] == g]
        one = [
            float(
                inputs.reward_S[s] / beta
                - inputs.logprob_T.detach()[inputs.sequence_index_T == s].sum()
                + inputs.reference_logprob_S[s]
            )
            for s in members
        ]
        copies = [float(inputs.copies_S[s]) for s in members]
        found_S[members] = sum(c * z for c, z in zip(copies, one, strict=True)) / sum(copies)
    return found_S


def test_a_case_computed_by_hand():
    inputs = replace(
        inputs_of([2, 1], [0, 0], [1.0, 0.0], copies=[3, 1]),
        logprob_T=torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True),
        reference_logprob_S=torch.tensor([-2.0, -1.5], dtype=torch.float64),
        log_z_S=torch.tensor([1.0, 3.0], dtype=torch.float64),
    )
    # r / beta = 2, 0; kl = 0.5, -0.5; log Z + kl - r / beta = -0.5, 2.5
    output = TbLearnedZ(0.5, OFF)(inputs)
    assert output.loss.item() == pytest.approx(0.5 / 2 * (3 * 0.5**2 + 2.5**2) / 4)
    assert gradient_of(TbLearnedZ(0.5, OFF), inputs).tolist() == pytest.approx(
        [-0.5 * 3 * 0.5 / 4, -0.5 * 3 * 0.5 / 4, 0.5 * 2.5 / 4]
    )
    assert output.log_z_gradient_S is not None
    assert output.log_z_gradient_S.tolist() == pytest.approx([-3 * 0.5 / 4, 2.5 / 4])
    found = mean_statistics({name: float(value) for name, value in output.sums.items()})
    # In the mean over four rollouts log Z is 1.5, and the estimate (3 * 1.5 + 0.5) / 4 = 1.25.
    assert (found["log_z"], found["log_z_square"], found["log_z_error_square"]) == pytest.approx((1.5, 2.25, 0.0625))
    metrics = update_metrics(Update(skipped=False, grad_norm=1.0, learning_rate=1.0, statistics=found), 0)
    assert (metrics["policy/log_z"], metrics["policy/log_z_error"]) == pytest.approx((1.5, 0.25))


def test_both_gradients_are_those_of_finite_differences():
    inputs, loss, h = random_inputs(3), TbLearnedZ(BETA, OFF), 1e-5
    assert inputs.log_z_S is not None
    found, output = gradient_of(loss, inputs), loss(inputs)
    assert output.log_z_gradient_S is not None and not output.log_z_gradient_S.requires_grad
    for name, gradient, scale in (("logprob_T", found, 1.0), ("log_z_S", output.log_z_gradient_S, BETA)):
        base = getattr(inputs, name).detach()
        for at in range(len(base)):
            step = torch.zeros_like(base)
            step[at] = h
            up, down = (loss(replace(inputs, **{name: base + sign * step})).loss.item() for sign in (1, -1))
            assert scale * gradient[at].item() == pytest.approx((up - down) / (2 * h), abs=1e-8)


@pytest.mark.parametrize("guards", [OFF, Guards(negative_weight=0.3)])
def test_with_the_estimate_of_the_group_for_log_z_the_policy_learns_what_vargrad_teaches_it(guards):
    inputs = random_inputs(5)
    at_estimate = replace(inputs, log_z_S=estimated_log_z(inputs, BETA))
    torch.testing.assert_close(
        gradient_of(TbLearnedZ(BETA, guards), at_estimate), gradient_of(TbVarGrad(BETA, guards), inputs)
    )
    output = TbLearnedZ(BETA, guards)(at_estimate)
    assert output.loss.item() == pytest.approx(TbVarGrad(BETA, guards)(inputs).loss.item())
    assert float(output.sums["group/log_z_error_square"]) == pytest.approx(0.0, abs=1e-20)
    assert output.log_z_gradient_S is not None  # nothing left to learn in the mean of a group
    for g in range(inputs.n_groups):
        assert float(output.log_z_gradient_S[inputs.group_index_S == g].sum()) == pytest.approx(0.0, abs=1e-12)


def test_the_optimal_policy_with_the_true_log_z_has_no_loss():
    """Of three completions, which are all that there are: pi = pi_ref exp(r / beta) / Z."""
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reward = torch.tensor([0.0, 1.0, 0.4], dtype=torch.float64)
    z = (reference * (reward / BETA).exp()).sum()
    policy = reference * (reward / BETA).exp() / z
    inputs = replace(
        inputs_of([1, 1, 1], [0, 0, 0], reward.tolist(), copies=[1, 2, 5]),
        logprob_T=policy.log(),
        reference_logprob_S=reference.log(),
        log_z_S=z.log().expand(3),
    )
    output = TbLearnedZ(BETA, OFF)(inputs)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-24)
    assert output.log_z_gradient_S is not None and output.log_z_gradient_S.abs().max() < 1e-12
    assert gradient_of(TbLearnedZ(BETA, OFF), inputs).abs().max() < 1e-12


def test_guards_do_not_touch_what_log_z_learns_from():
    inputs = random_inputs(7)
    plain, guarded = (TbLearnedZ(BETA, guards)(inputs).log_z_gradient_S for guards in (OFF, Guards(negative_weight=0)))
    assert plain is not None and guarded is not None and plain.abs().max() > 0
    torch.testing.assert_close(guarded, plain, rtol=0, atol=0)


def test_a_sequence_without_copies_teaches_log_z_nothing():
    inputs = replace(
        inputs_of([1, 1], [0, 0], [1.0, 0.0], copies=[2, 0]),
        reference_logprob_S=torch.tensor([-1.0, math.nan]).double(),
    )
    gradient_S = TbLearnedZ(BETA, OFF)(inputs).log_z_gradient_S
    assert gradient_S is not None and gradient_S[0] != 0 and gradient_S[1] == 0


def test_parts_of_a_group_join_with_their_log_z():
    whole = inputs_of([2, 1, 3], [0, 0, 0], [1.0, 0.0, 0.5], copies=[1, 2, 1])
    assert whole.log_z_S is not None
    parts = [
        replace(
            whole,
            logprob_T=whole.logprob_T.detach()[tokens],
            behaviour_logprob_T=whole.behaviour_logprob_T[tokens],
            sequence_index_T=whole.sequence_index_T[tokens] - first,
            **{
                name: getattr(whole, name)[first:last]
                for name in ("group_index_S", "copies_S", "reward_S", "reference_logprob_S", "log_z_S")
            },
        )
        for tokens, first, last in ((slice(0, 3), 0, 2), (slice(3, 6), 2, 3))
    ]
    joined = join_inputs(parts)
    assert joined.log_z_S is not None and torch.equal(joined.log_z_S, whole.log_z_S)
    found, expected = TbLearnedZ(BETA, OFF)(joined), TbLearnedZ(BETA, OFF)(whole)
    assert found.log_z_gradient_S is not None and expected.log_z_gradient_S is not None
    torch.testing.assert_close(found.log_z_gradient_S, expected.log_z_gradient_S)
