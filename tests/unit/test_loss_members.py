"""Every objective of the table: by hand, and the laws that hold for all of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import MEMBERS, assert_same, gradient_of, inputs_of, numbers, permuted, random_inputs
from rollout_factory import RolloutFactory, train_group

from tba_megatron import config_objective as section
from tba_megatron.loss.base import Loss, LossInputs, ReferenceNeed, loss_inputs, mean_statistics
from tba_megatron.loss.ratio import Clip, clipped_surrogate
from tba_megatron.loss.registry import LOSSES, make_loss
from tba_megatron.packing import pack, pack_into
from tba_megatron.trainer.step import Update
from tba_megatron.trainer.step_metrics import update_metrics

LONGEST = 10
GUARDS = [
    section.GuardsConfig(),
    section.GuardsConfig(negative_weight=0.3),
    section.GuardsConfig(lost_negative_ratio=0.8),
    section.GuardsConfig(lost_negative_ratio=0.8, by_token=True),
]
EACH = pytest.mark.parametrize("member", MEMBERS, ids=lambda m: " ".join(f"{v}" for v in m.model_dump().values()))


def loss_of(member, guards: section.GuardsConfig = GUARDS[0]) -> Loss:
    return make_loss(section.ObjectiveConfig(loss=member, guards=guards), LONGEST)


def full(inputs: LossInputs, seed: int = 0) -> LossInputs:
    """With behaviour and reference log-probs of each token near the policy's."""
    generator = torch.Generator().manual_seed(seed)
    logprob_T = inputs.logprob_T.detach()

    def near() -> torch.Tensor:
        return logprob_T + 0.4 * torch.randn(logprob_T.shape, generator=generator, dtype=torch.float64)

    reference_T = near()
    sums = torch.zeros(inputs.n_sequences, dtype=torch.float64).index_add(0, inputs.sequence_index_T, reference_T)
    return replace(inputs, behaviour_logprob_T=near(), reference_logprob_T=reference_T, reference_logprob_S=sums)


def two_completions() -> LossInputs:
    """Of 2 tokens with reward 1 and of 1 token with reward 0, each once."""
    double = {"dtype": torch.float64}
    return replace(
        inputs_of([2, 1], [0, 0], [1.0, 0.0]),
        logprob_T=torch.tensor([-1.0, -0.5, -2.0], **double, requires_grad=True),
        behaviour_logprob_T=torch.tensor([-1.2, -0.5, -1.5], **double),  # log-ratios 0.2, 0, -0.5; sums 0.2, -0.5
        reference_logprob_T=torch.tensor([-1.5, -0.5, -1.5], **double),  # kl by token 0.5, 0, -0.5; sums 0.5, -0.5
        reference_logprob_S=torch.tensor([-2.0, -1.5], **double),
        log_z_S=torch.tensor([2.0, 2.0], **double),
    )


VALUE = 0.5 * math.log((math.exp(2) + 1) / 2)  # tau log mean exp(r / tau)
A_GRPO = 0.5 / (math.sqrt(0.5) + 1e-4)
K3 = (math.exp(-0.5) + 0.5 - 1) / 2 + math.exp(0.5) - 0.5 - 1  # of the first in the mean of 2 tokens, and the second


@pytest.mark.parametrize(
    ("member", "loss", "gradient"),
    [
        # A = (0.5 - 0.25, -0.5 + 0.25): the residuals
        (section.TbVarGrad(beta=0.5), 2 * 0.25**2 / (2 * 0.5 * 2), [-0.125, -0.125, 0.125]),
        (section.TbaPrime(beta=0.5), (0.25 * 1.5 - 0.25 * 2) / 2, [-0.125, -0.125, 0.125]),
        # A = (1, 0) - 0.5 * (log Z = 2 + kl)
        (section.TbLearnedZ(beta=0.5), (0.25**2 + 0.75**2) / (2 * 0.5 * 2), [0.125, 0.125, 0.375]),
        # The same, because the mean of kl is 0
        (section.KimiK15(tau=0.5), 2 * 0.25**2 / (2 * 0.5 * 2), [-0.125, -0.125, 0.125]),
        # A = (0.5 - 0.5 * 0.2, -0.5 + 0.5 * 0.5)
        (section.KimiK2(tau=0.5), (0.4**2 + 0.25**2) / (2 * 0.5 * 2), [-0.2, -0.2, 0.125]),
        (
            section.Oapl(tau=0.5),
            ((0.9 - VALUE) ** 2 + (0.25 - VALUE) ** 2) / (2 * 0.5 * 2),
            [(VALUE - 0.9) / 2, (VALUE - 0.9) / 2, (VALUE - 0.25) / 2],
        ),
        # K / (K - 1) = 2: A = (1, -1); with the KL in the reward r = (0.75, 0.25)
        (section.Rloo(), (1.5 - 2) / 2, [-0.5, -0.5, 0.5]),
        (section.Rloo(beta=0.5), (0.5 * 1.5 - 0.5 * 2) / 2, [-0.25, -0.25, 0.25]),
        # Ratios e^0.2 and e^-0.5 are both clipped on the side that counts; log mu - ref = (0.3, 0)
        (section.ProximalRloo(), (-1.2 + 0.8) / 2, [0.0, 0.0, 0.0]),
        (section.ProximalRloo(beta=0.5), 0.85 * (-1.2 + 0.8) / 2, [0.0, 0.0, 0.0]),
        (section.ProximalRloo(clip_high=0.5), (-math.exp(0.2) + 0.8) / 2, [-math.exp(0.2) / 2] * 2 + [0.0]),
        # A = (0.5, -0.5); the second token alone, of ratio 1, is not clipped
        (section.PpoClip(clip_low=0.1, clip_high=0.1), 0.5 * (-1.1 - 1 + 0.9) / 2, [0.0, -0.25, 0.0]),
        (section.DrGrpo(clip_low=0.1, clip_high=0.1), 0.5 * (-1.1 - 1 + 0.9) / 20, [0.0, -0.025, 0.0]),
        (section.Grpo(clip_low=0.1, clip_high=0.1), A_GRPO * (-1.05 + 0.9) / 2, [0.0, -A_GRPO / 4, 0.0]),
        (
            section.Grpo(clip_low=0.1, clip_high=0.1, beta=0.5),
            A_GRPO * (-1.05 + 0.9) / 2 + 0.5 * K3 / 2,
            [0.125 * (1 - math.exp(-0.5)), -A_GRPO / 4, 0.25 * (1 - math.exp(0.5))],
        ),
        # The margin is 1
        (
            section.OnlineDpo(beta=1.0),
            math.log1p(math.exp(-1)),
            [-1 / (1 + math.e), -1 / (1 + math.e), 1 / (1 + math.e)],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, section.Section) else "",
)
def test_a_case_computed_by_hand(member, loss, gradient):
    inputs = two_completions()
    assert loss_of(member)(inputs).loss.item() == pytest.approx(loss)
    assert gradient_of(loss_of(member), inputs).tolist() == pytest.approx(gradient, abs=1e-12)


def test_every_configured_objective_is_tested_and_says_what_it_needs():
    assert {type(member) for member in MEMBERS} == set(LOSSES)
    for member in MEMBERS:
        for guards in GUARDS:
            objective = section.ObjectiveConfig(loss=member, guards=guards)
            needs = make_loss(objective, LONGEST).needs
            assert needs.reference == objective.reads_reference
            needs_behaviour = needs.behaviour
            if not isinstance(member, section.OnlineDpo):  # which takes no guards
                assert needs_behaviour == objective.needs_behaviour


@EACH
def test_what_an_objective_does_not_need_it_does_not_read(member):
    loss, inputs = loss_of(member), full(random_inputs(1), 1)
    nan_S, nan_T = torch.full_like(inputs.reward_S, math.nan), torch.full_like(inputs.behaviour_logprob_T, math.nan)
    blind = replace(
        inputs,
        reference_logprob_S=inputs.reference_logprob_S if loss.needs.reference is ReferenceNeed.SUMS else nan_S,
        reference_logprob_T=inputs.reference_logprob_T if loss.needs.reference is ReferenceNeed.TOKENS else None,
        behaviour_logprob_T=inputs.behaviour_logprob_T if loss.needs.behaviour else nan_T,
        log_z_S=inputs.log_z_S if loss.needs.log_z else None,
    )
    assert torch.equal(gradient_of(loss, blind), gradient_of(loss, inputs))
    assert all(map(math.isfinite, numbers(loss(blind)).values()))


@EACH
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15)
def test_permuting_sequences_and_renaming_groups_changes_nothing(member, seed):
    loss, inputs = loss_of(member), full(random_inputs(seed), seed)
    generator = torch.Generator().manual_seed(seed)
    new = permuted(inputs, torch.randperm(inputs.n_sequences, generator=generator))
    names = torch.randperm(inputs.n_groups, generator=generator)
    new = replace(new, group_index_S=names[new.group_index_S])
    assert_same(numbers(loss(new)), numbers(loss(inputs)))
    torch.testing.assert_close(gradient_of(loss, new), gradient_of(loss, inputs))


@EACH
@pytest.mark.parametrize("guards", GUARDS, ids=["plain", "x 0.3", "lost", "lost tokens"])
def test_three_copies_equal_three_equal_sequences(member, guards):
    one = full(inputs_of([2, 3, 1], [0, 0, 0], [1.0, 0.0, 0.0], copies=[1, 3, 1]))
    at = [0, 1, *[2, 3, 4] * 3, 5]
    three = replace(
        inputs_of([2, 3, 3, 3, 1], [0] * 5, [1.0, 0.0, 0.0, 0.0, 0.0]),
        logprob_T=one.logprob_T.detach()[at].requires_grad_(),
        behaviour_logprob_T=one.behaviour_logprob_T[at],
        reference_logprob_T=one.reference_logprob_T[at],
        reference_logprob_S=one.reference_logprob_S[[0, 1, 1, 1, 2]],
        log_z_S=None if one.log_z_S is None else one.log_z_S[[0, 1, 1, 1, 2]],
    )
    loss = loss_of(member, guards)
    assert_same(numbers(loss(one)), numbers(loss(three)))
    grad = gradient_of(loss, three)
    added = torch.cat([grad[:2], grad[2:5] + grad[5:8] + grad[8:11], grad[11:]])
    torch.testing.assert_close(gradient_of(loss, one), added)


@EACH
def test_adding_a_constant_to_the_rewards_of_a_group_changes_no_gradient(member):
    loss, inputs = loss_of(member), full(random_inputs(6), 6)
    shift_S = torch.tensor([3.0, -7.0, 11.0, 0.5])[inputs.group_index_S % 4].double()
    shifted = replace(inputs, reward_S=inputs.reward_S + shift_S)
    if loss.needs.log_z:  # which has the constant to learn
        assert inputs.log_z_S is not None
        shifted = replace(shifted, log_z_S=inputs.log_z_S + shift_S / member.beta)
    torch.testing.assert_close(gradient_of(loss, shifted), gradient_of(loss, inputs))


@EACH
def test_splitting_over_microbatches_and_replicas_gives_the_same_gradient(member):
    rng, make = np.random.default_rng(0), RolloutFactory()
    groups = []
    for i in range(8):
        rollouts = [
            make.rollout(
                [1] * n,
                reward=float(rng.integers(0, 2)),
                reference=-1.0,
                behaviour_logprobs=-rng.random(n, np.float32),
            )
            for n in rng.integers(1, 5, 4).tolist()
        ]
        groups.append(train_group("p" * (i + 1), rollouts))
    rollouts = [r for g in groups for r in g.rollouts]
    logprobs = {r.rollout_id: -torch.from_numpy(rng.random(len(r.token_ids))) for r in rollouts}
    loss = loss_of(member)

    def trained(packs) -> tuple[dict, dict]:
        grads, sums = {}, {}
        for p in packs:
            per_sequence = [logprobs[r] for r in p.rollout_ids]
            logprob_T = torch.cat(per_sequence).requires_grad_()
            output = loss(
                loss_inputs(
                    p.microbatch,
                    logprob_T,
                    normaliser=len(rollouts),
                    reference_logprob_T=logprob_T.detach() - 0.1,
                    log_z_S=torch.tensor([0.1 * r.sequence for r in p.rollout_ids], dtype=torch.float64),
                )
            )
            output.loss.backward()
            parts = logprob_T.grad.split([len(x) for x in per_sequence])
            grads |= dict(zip(p.rollout_ids, [g.tolist() for g in parts], strict=True))
            for name, value in output.sums.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        return grads, sums

    expected, statistics = trained(pack_into(groups, 1))
    for packs in (pack_into(groups, 2), pack_into(groups, 8), pack(groups, 56, 8)):
        grads, sums = trained(packs)
        assert grads.keys() == expected.keys()
        for rollout_id, grad in grads.items():
            assert grad == pytest.approx(expected[rollout_id], abs=1e-12)
        assert_same(sums, statistics)


@EACH
@pytest.mark.parametrize("guards", GUARDS, ids=["plain", "x 0.3", "lost", "lost tokens"])
@pytest.mark.parametrize(
    "inputs",
    [
        inputs_of([0, 0], [0, 0], [1.0, 0.0]),
        inputs_of([0, 3, 1], [0, 0, 1], [1.0, 0.0, 1.0]),
        inputs_of([4], [0], [1.0], copies=[8]),
        inputs_of([1, 2, 3, 4], [0, 1, 1, 1], [1.0, 1.0, 1.0, 1.0]),
        inputs_of([3, 3], [0, 0], [1e6, -1e6]),
    ],
    ids=["all empty", "one empty", "K identical", "sizes differ, equal rewards", "large rewards"],
)
def test_everything_is_finite(member, guards, inputs):
    loss, inputs = loss_of(member, guards), full(inputs)
    far = replace(inputs, behaviour_logprob_T=inputs.behaviour_logprob_T - 500.0)  # mu had all but ruled it out
    lost = replace(inputs, behaviour_logprob_T=inputs.behaviour_logprob_T + 500.0)
    for case in (inputs, far, lost):
        output = loss(case)
        assert all(map(math.isfinite, numbers(output).values()))
        assert gradient_of(loss, case).isfinite().all()
        assert not any(value.requires_grad for value in (output.sums | output.maxima).values())
        means = mean_statistics({name: float(value) for name, value in output.sums.items()})
        done = Update(skipped=False, grad_norm=1.0, learning_rate=1.0, statistics=means)
        assert all(map(math.isfinite, update_metrics(done, 0).values()))


@pytest.mark.parametrize("member", [m for m in MEMBERS if loss_of(m).needs.behaviour], ids=lambda m: m.kind)
def test_a_writer_that_is_not_known_makes_no_step(member):
    inputs = two_completions()
    blind = replace(inputs, behaviour_logprob_T=torch.full_like(inputs.behaviour_logprob_T, math.nan))
    assert not gradient_of(loss_of(member), blind).isfinite().all()


RATIOS = [section.PpoClip(), section.Rloo(), section.ProximalRloo()]


@pytest.mark.parametrize("member", RATIOS, ids=lambda m: m.kind)
def test_on_fresh_data_the_ratio_family_is_reinforce(member):
    inputs = random_inputs(9)
    inputs = replace(inputs, behaviour_logprob_T=inputs.logprob_T.detach())
    found = gradient_of(loss_of(member), inputs)
    k_S = (
        torch.zeros(inputs.n_groups).double().index_add(0, inputs.group_index_S, inputs.copies_S)[inputs.group_index_S]
    )
    total_G = (
        torch.zeros(inputs.n_groups).double().index_add(0, inputs.group_index_S, inputs.copies_S * inputs.reward_S)
    )
    centred_S = inputs.reward_S - total_G[inputs.group_index_S] / k_S
    leave_one_out_S = centred_S if isinstance(member, section.PpoClip) else centred_S * k_S / (k_S - 1).clamp(min=1)
    expected_S = -inputs.copies_S * leave_one_out_S / inputs.normaliser
    torch.testing.assert_close(found, expected_S[inputs.sequence_index_T])


def test_kimi_k2_is_trajectory_balance_held_to_the_writer_and_a_push_of_the_whole_group():
    tau, inputs = 0.3, full(random_inputs(11), 11)
    drift_T = inputs.logprob_T.detach() - inputs.behaviour_logprob_T
    drift_S = torch.zeros(inputs.n_sequences).double().index_add(0, inputs.sequence_index_T, drift_T)
    anchored = replace(inputs, reference_logprob_S=_sums(inputs) - drift_S)
    k_G = torch.zeros(inputs.n_groups).double().index_add(0, inputs.group_index_S, inputs.copies_S)
    mean_G = torch.zeros(inputs.n_groups).double().index_add(0, inputs.group_index_S, inputs.copies_S * drift_S) / k_G
    extra_S = tau * mean_G[inputs.group_index_S] * inputs.copies_S / inputs.normaliser
    torch.testing.assert_close(
        gradient_of(loss_of(section.KimiK2(tau=tau)), inputs),
        gradient_of(loss_of(section.TbVarGrad(beta=tau)), anchored) + extra_S[inputs.sequence_index_T],
    )


def test_kimi_k15_is_reinforce_with_a_square_of_the_log_ratio_to_the_reference():
    tau, inputs = 0.3, full(random_inputs(12), 12)
    logprob_T = inputs.logprob_T.detach().requires_grad_()
    logprob_S = torch.zeros(inputs.n_sequences).double().index_add(0, inputs.sequence_index_T, logprob_T)
    group_S, copies_S = inputs.group_index_S, inputs.copies_S
    k_G = torch.zeros(inputs.n_groups).double().index_add(0, group_S, copies_S)
    mean_G = torch.zeros(inputs.n_groups).double().index_add(0, group_S, copies_S * inputs.reward_S) / k_G
    advantage_S = inputs.reward_S - mean_G[group_S]
    square_S = tau / 2 * (logprob_S - inputs.reference_logprob_S).square()
    (copies_S * (square_S - advantage_S * logprob_S)).sum().div(inputs.normaliser).backward()
    torch.testing.assert_close(gradient_of(loss_of(section.KimiK15(tau=tau)), inputs), logprob_T.grad)


def _sums(inputs: LossInputs) -> torch.Tensor:
    zeros = torch.zeros(inputs.n_sequences).double()
    return zeros.index_add(0, inputs.sequence_index_T, inputs.logprob_T.detach())


def test_dual_clip_bounds_what_a_negative_advantage_costs():
    log_ratio = torch.tensor([2.0, 2.0], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    loss, clipped = clipped_surrogate(log_ratio, advantage, Clip(low=0.2, high=0.2, dual=3.0))
    assert loss.tolist() == pytest.approx([3.0, -1.2]) and clipped.tolist() == [True, True]
    loss.sum().backward()
    assert log_ratio.grad is not None and log_ratio.grad.tolist() == [0.0, 0.0]


# Guards


def test_guards_take_from_negative_pushes_alone():
    inputs = two_completions()  # pi / mu of the second, whose advantage is negative, is e^-0.5 = 0.61
    plain = gradient_of(loss_of(section.TbVarGrad(beta=0.5)), inputs)
    weighed = gradient_of(loss_of(section.TbVarGrad(beta=0.5), section.GuardsConfig(negative_weight=0.3)), inputs)
    torch.testing.assert_close(weighed, plain * torch.tensor([1.0, 1.0, 0.3]))
    masked = gradient_of(loss_of(section.TbVarGrad(beta=0.5), section.GuardsConfig(lost_negative_ratio=0.8)), inputs)
    torch.testing.assert_close(masked, plain * torch.tensor([1.0, 1.0, 0.0]))
    kept = gradient_of(loss_of(section.TbVarGrad(beta=0.5), section.GuardsConfig(lost_negative_ratio=0.6)), inputs)
    torch.testing.assert_close(kept, plain)


def test_by_token_a_push_is_dropped_where_the_token_is_lost():
    inputs = replace(
        inputs_of([1, 3], [0, 0], [1.0, 0.0]),
        logprob_T=torch.tensor([-1.0, -1.0, -2.0, -1.0], dtype=torch.float64),
        behaviour_logprob_T=torch.tensor([-1.0, -1.0, -1.0, -1.9], dtype=torch.float64),  # in all 0.9: e^-0.1
    )
    guards = section.GuardsConfig(lost_negative_ratio=0.8, by_token=True)
    plain = gradient_of(loss_of(section.Rloo()), inputs)
    torch.testing.assert_close(
        gradient_of(loss_of(section.Rloo(), guards), inputs), plain * torch.tensor([1.0, 1.0, 0.0, 1.0])
    )
    whole = section.GuardsConfig(lost_negative_ratio=0.8)
    torch.testing.assert_close(gradient_of(loss_of(section.Rloo(), whole), inputs), plain)


def test_on_fresh_data_lost_pushes_are_none():
    inputs = random_inputs(3)
    fresh = replace(inputs, behaviour_logprob_T=inputs.logprob_T.detach())
    guards = section.GuardsConfig(lost_negative_ratio=1.0)
    torch.testing.assert_close(
        gradient_of(loss_of(section.TbVarGrad(beta=0.3), guards), fresh),
        gradient_of(loss_of(section.TbVarGrad(beta=0.3)), fresh),
    )


# Statistics


def test_drift_is_over_the_rollouts_that_say_what_their_writer_thought():
    inputs = two_completions()
    half = replace(
        inputs, behaviour_logprob_T=torch.where(inputs.sequence_index_T == 0, inputs.behaviour_logprob_T, math.nan)
    )
    found = mean_statistics({k: float(v) for k, v in loss_of(section.TbVarGrad(beta=0.5))(half).sums.items()})
    assert (found["drift_rollouts"], found["drift"]) == pytest.approx((1, 0.2))
    assert found["ratio"] == pytest.approx(math.exp(0.2))
    assert (found["negative_push"], found["lost_push"]) == (0, 0)
    both = mean_statistics({k: float(v) for k, v in loss_of(section.TbVarGrad(beta=0.5))(inputs).sums.items()})
    assert both["ratio_square"] == pytest.approx((math.exp(0.4) + math.exp(-1)) / 2)
    assert both["lost_push"] == both["negative_push"] == pytest.approx(0.125)


def test_a_group_of_equal_rewards_has_no_pair():
    inputs = full(inputs_of([1, 2, 1, 1], [0, 0, 1, 1], [1.0, 1.0, 1.0, 0.0]))
    gradient = gradient_of(loss_of(section.OnlineDpo()), inputs)
    assert gradient[:3].abs().max() == 0 and gradient[3:].abs().min() > 0


def test_of_several_best_ones_each_pair_counts_as_much():
    inputs = full(inputs_of([1, 1, 1], [0, 0, 0], [1.0, 1.0, 0.0]))
    kl_S = inputs.logprob_T.detach() - inputs.reference_logprob_S
    expected = torch.log1p(torch.exp(-0.1 * (kl_S[:2] - kl_S[2]))).mean()
    assert loss_of(section.OnlineDpo())(inputs).loss.item() == pytest.approx(expected.item())


# Schedules


def test_beta_falls_in_a_line_and_jumps_at_its_stop_step():
    """TL;DR of the paper: 0.777 at step 31, then 0.05."""
    line = {"kind": "linear", "target": 0.05, "target_step": 128, "stop_step": 32}
    objective = section.TbVarGrad(beta=1.0, beta_schedule=line)
    assert [objective.beta_at(step) for step in (1, 31, 32, 500)] == pytest.approx(
        [1.0, 1 - 0.95 * 30 / 128, 0.05, 0.05]
    )
    late = section.TbVarGrad(beta=0.014, beta_schedule=line | {"target": 0.004, "target_step": 10, "stop_step": 40})
    assert [late.beta_at(step) for step in (6, 11, 30)] == pytest.approx([0.009, 0.004, 0.004])


@pytest.mark.parametrize("kind", [section.TbVarGrad, section.TbaPrime, section.TbLearnedZ])
def test_the_loss_of_a_step_has_the_beta_of_that_step(kind):
    line = {"kind": "linear", "target": 0.1, "target_step": 10, "stop_step": 10}
    objective = section.ObjectiveConfig(loss=kind(beta=0.5, beta_schedule=line))
    inputs = two_completions()
    for step, beta in ((1, 0.5), (6, 0.3), (10, 0.1)):
        found, expected = make_loss(objective, LONGEST, step), loss_of(kind(beta=beta))
        torch.testing.assert_close(gradient_of(found, inputs), gradient_of(expected, inputs))
        assert float(found(inputs).maxima["tau"]) == pytest.approx(beta)
