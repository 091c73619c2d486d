import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import assert_same, gradient_of, inputs_of, numbers, permuted, random_inputs
from rollout_factory import RolloutFactory, as_batch, as_group, train_group

from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.loss.base import LossInputs, loss_inputs, mean_statistics
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.regression import TbaPrime, TbVarGrad
from tba_megatron.loss.statistics import EDGES
from tba_megatron.packing import pack, pack_into

BETA = 0.3
OFF = Guards()
# What rests on behaviour log-probs, of which these inputs have none.
DRIFT = [
    "drift_rollouts",
    "drift",
    "drift_square",
    "abs_drift",
    "drift_tokens",
    "drift_per_token",
    "ratio",
    "ratio_square",
    "negative_push",
    "lost_push",
]
BOTH = pytest.mark.parametrize("loss_class", [TbVarGrad, TbaPrime])


def gradient(loss_class, inputs: LossInputs, beta: float = BETA) -> torch.Tensor:
    return gradient_of(loss_class(beta, OFF), inputs)


# The loss


def test_a_case_computed_by_hand():
    inputs = replace(
        inputs_of([2, 1], [0, 0], [1.0, 0.0]),
        logprob_T=torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True),
        reference_logprob_S=torch.tensor([-2.0, -1.5], dtype=torch.float64),
    )
    # kl = 0.5, -0.5; r / beta = 2, 0; log Z = mean(1.5, 0.5) = 1; residual = -0.5, 0.5
    output = TbVarGrad(0.5, OFF)(inputs)
    assert output.loss.item() == pytest.approx(0.5 / 2 * 0.25)
    # advantage = -beta * residual = 0.25, -0.25; gradient = -advantage / 2
    assert gradient(TbVarGrad, inputs, 0.5).tolist() == pytest.approx([-0.125, -0.125, 0.125])
    prime = TbaPrime(0.5, OFF)(inputs)
    assert prime.loss.item() == pytest.approx(-(0.25 * -1.5 + -0.25 * -2.0) / 2)
    for out in (output, prime):
        assert mean_statistics({k: float(v) for k, v in out.sums.items()}) == pytest.approx(
            {
                "loss": out.loss.item(),
                "rollouts": 2,
                "groups": 1,
                "tokens": 3,
                "residual_square": 0.25,
                "kl": 0.0,
                "kl_square": 0.25,
                "kl_per_token": 0.0,
                "log_z": 1.0,
                "reward": 0.5,
                "abs_advantage": 0.25,
                "completion_tokens": 1.5,
                "log_z_square": 1.0,
                **dict.fromkeys(DRIFT, 0.0),
                "equal_rewards": 0.0,
            }
        )
        assert {k: float(v) for k, v in out.maxima.items()} == {
            "max_abs_advantage": 0.25,
            "max_completion_tokens": 2.0,
            "tau": 0.5,
        }
        spread = out.histograms["residual_nats"]  # 0.5 is the lower edge of its bin, - 0.5 too
        assert {EDGES[i]: float(n) for i, n in enumerate(spread) if n} == {-0.5: 1, 0.5: 1}


def test_the_gradient_is_that_of_finite_differences():
    inputs = random_inputs(3)

    def loss_of(logprob_T: torch.Tensor, log_z: torch.Tensor) -> torch.Tensor:
        """The paper's loss with log Z as a number that the differences do not move."""
        logprob_S = torch.zeros(inputs.n_sequences, dtype=torch.float64).index_add(
            0, inputs.sequence_index_T, logprob_T
        )
        residual_S = log_z + logprob_S - inputs.reference_logprob_S - inputs.reward_S / BETA
        return BETA / 2 * (inputs.copies_S * residual_S**2).sum() / inputs.normaliser

    log_z_S = torch.zeros(inputs.n_sequences, dtype=torch.float64)
    base = inputs.logprob_T.detach()
    for g in range(inputs.n_groups):
        members = [s for s in range(inputs.n_sequences) if inputs.group_index_S[s] == g]
        terms, weights = [], []
        for s in members:
            kl = base[inputs.sequence_index_T == s].sum() - inputs.reference_logprob_S[s]
            terms.append(float(inputs.reward_S[s] / BETA - kl))
            weights.append(float(inputs.copies_S[s]))
        log_z_S[members] = float(np.average(terms, weights=weights))
    assert float(loss_of(base, log_z_S)) == pytest.approx(TbVarGrad(BETA, OFF)(inputs).loss.item())
    h, found = 1e-5, gradient(TbVarGrad, inputs)
    for t in range(len(base)):
        step = torch.zeros_like(base)
        step[t] = h
        difference = (loss_of(base + step, log_z_S) - loss_of(base - step, log_z_S)) / (2 * h)
        assert found[t].item() == pytest.approx(float(difference), abs=1e-8)


def test_letting_the_gradient_through_log_z_changes_nothing():
    """Finite differences of the whole loss, log Z moving too: the residuals of a group sum to zero."""
    inputs = random_inputs(4)
    loss = TbVarGrad(BETA, OFF)
    h, found = 1e-5, gradient(TbVarGrad, inputs)
    for t in range(len(inputs.logprob_T)):
        values = []
        for sign in (1, -1):
            logprob_T = inputs.logprob_T.detach().clone()
            logprob_T[t] += sign * h
            values.append(loss(replace(inputs, logprob_T=logprob_T)).loss.item())
        assert found[t].item() == pytest.approx((values[0] - values[1]) / (2 * h), abs=1e-8)


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_both_objectives_have_one_gradient(seed):
    inputs = random_inputs(seed)
    torch.testing.assert_close(gradient(TbVarGrad, inputs), gradient(TbaPrime, inputs))


@pytest.mark.parametrize("beta", [0.014, 0.3, 2.0])
def test_the_plain_squared_loss_is_two_over_beta_times_reinforce_with_kl_in_the_reward(beta):
    inputs = random_inputs(5)
    inputs = replace(inputs, copies_S=torch.ones_like(inputs.copies_S))
    logprob_T = inputs.logprob_T.detach().requires_grad_()
    logprob_S = torch.zeros(inputs.n_sequences, dtype=torch.float64).index_add(0, inputs.sequence_index_T, logprob_T)
    regularised_S = (inputs.reward_S - beta * (logprob_S - inputs.reference_logprob_S)).detach()
    reinforce = torch.zeros((), dtype=torch.float64)
    for g in range(inputs.n_groups):
        members = inputs.group_index_S == g
        advantage = regularised_S[members] - regularised_S[members].mean()
        reinforce = reinforce - (advantage * logprob_S[members]).sum() / inputs.normaliser
    reinforce.backward()
    plain_squared = gradient(TbVarGrad, inputs, beta) / (beta / 2)
    torch.testing.assert_close(plain_squared, 2 / beta * logprob_T.grad)


@BOTH
def test_adding_a_constant_to_the_rewards_of_a_group_changes_no_gradient(loss_class):
    inputs = random_inputs(6)
    shift_S = torch.tensor([3.0, -7.0, 11.0, 0.5])[inputs.group_index_S % 4].double()
    shifted = replace(inputs, reward_S=inputs.reward_S + shift_S)
    torch.testing.assert_close(gradient(loss_class, shifted), gradient(loss_class, inputs))
    assert loss_class(BETA, OFF)(shifted).loss.item() == pytest.approx(loss_class(BETA, OFF)(inputs).loss.item())


@BOTH
def test_query_major_and_interleaved_groups_give_the_same(loss_class):
    lengths, rewards = [1, 2, 3, 4, 2, 1], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    major = inputs_of(lengths, [0, 0, 0, 1, 1, 1], rewards)
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    mixed = permuted(major, order)
    assert mixed.group_index_S.tolist() == [0, 1, 0, 1, 0, 1]
    assert_same(numbers(loss_class(BETA, OFF)(mixed)), numbers(loss_class(BETA, OFF)(major)))


@BOTH
@given(seed=st.integers(0, 10_000))
@settings(max_examples=30)
def test_permuting_sequences_and_renaming_groups_changes_nothing(loss_class, seed):
    inputs = random_inputs(seed)
    generator = torch.Generator().manual_seed(seed)
    new = permuted(inputs, torch.randperm(inputs.n_sequences, generator=generator))
    names = torch.randperm(inputs.n_groups, generator=generator)
    new = replace(new, group_index_S=names[new.group_index_S])
    assert_same(numbers(loss_class(BETA, OFF)(new)), numbers(loss_class(BETA, OFF)(inputs)))
    torch.testing.assert_close(gradient(loss_class, new), gradient(loss_class, inputs))


@BOTH
def test_three_copies_equal_three_equal_sequences(loss_class):
    one = inputs_of([2, 3], [0, 0], [1.0, 0.0], copies=[3, 1])
    three = replace(
        inputs_of([2, 2, 2, 3], [0] * 4, [1.0, 1.0, 1.0, 0.0]),
        logprob_T=torch.cat([one.logprob_T[:2]] * 3 + [one.logprob_T[2:]]).detach().requires_grad_(),
        reference_logprob_S=one.reference_logprob_S[[0, 0, 0, 1]],
    )
    assert_same(numbers(loss_class(BETA, OFF)(one)), numbers(loss_class(BETA, OFF)(three)))
    grad = gradient(loss_class, three)
    assert gradient(loss_class, one).tolist() == pytest.approx(
        (grad[0:2] + grad[2:4] + grad[4:6]).tolist() + grad[6:].tolist()
    )


def test_the_loss_is_zero_exactly_at_the_optimum():
    inputs = random_inputs(7, max_length=1)
    inputs = replace(
        inputs,
        logprob_T=torch.zeros(inputs.n_sequences, dtype=torch.float64, requires_grad=True),
        sequence_index_T=torch.arange(inputs.n_sequences),
        behaviour_logprob_T=torch.full((inputs.n_sequences,), math.nan, dtype=torch.float64),
    )
    log_z_G = torch.linspace(-3, 3, inputs.n_groups, dtype=torch.float64)
    optimum = inputs.reference_logprob_S + inputs.reward_S / BETA - log_z_G[inputs.group_index_S]
    at_optimum = replace(inputs, logprob_T=optimum)
    assert TbVarGrad(BETA, OFF)(at_optimum).loss.item() == pytest.approx(0, abs=1e-25)
    assert gradient(TbVarGrad, at_optimum).abs().max().item() < 1e-12
    moved = optimum.clone()
    in_company = torch.bincount(inputs.group_index_S)[inputs.group_index_S] > 1
    moved[int(in_company.nonzero()[0])] += 0.1
    assert TbVarGrad(BETA, OFF)(replace(inputs, logprob_T=moved)).loss.item() > 1e-6


# Through packing


def packed_gradients(loss_class, packs, logprobs, normaliser: float) -> tuple[dict, dict]:
    """Gradient by rollout, and the added statistics."""
    grads, sums = {}, {}
    for p in packs:
        mb = p.microbatch
        per_sequence = [logprobs[r] for r in p.rollout_ids]
        logprob_T = torch.cat(per_sequence).requires_grad_()
        output = loss_class(BETA, OFF)(loss_inputs(mb, logprob_T, normaliser=normaliser))
        output.loss.backward()
        parts = logprob_T.grad.split([len(x) for x in per_sequence])
        grads |= dict(zip(p.rollout_ids, [g.tolist() for g in parts], strict=True))
        for name, value in output.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return grads, sums


@BOTH
def test_splitting_over_microbatches_and_replicas_gives_the_same_gradient(loss_class):
    rng, make = np.random.default_rng(0), RolloutFactory()
    groups = [
        train_group(
            "p" * (i + 1),
            [
                make.rollout([1] * int(rng.integers(0, 5)), reward=float(rng.integers(0, 2)), reference=-1.0)
                for _ in range(int(rng.integers(2, 5)))
            ],
        )
        for i in range(8)
    ]
    rollouts = [r for g in groups for r in g.rollouts]
    logprobs = {r.rollout_id: -torch.from_numpy(rng.random(len(r.token_ids))) for r in rollouts}
    whole = packed_gradients(loss_class, pack_into(groups, 1), logprobs, len(rollouts))
    splits = [pack_into(groups, 2), pack_into(groups, 8), pack(groups, 56, 8)]
    splits.append(pack_into(groups[::2], 2) + pack_into(groups[1::2], 4))
    for packs in splits:
        grads, sums = packed_gradients(loss_class, packs, logprobs, len(rollouts))
        assert grads.keys() == whole[0].keys()
        for rollout_id, grad in grads.items():
            assert grad == pytest.approx(whole[0][rollout_id], abs=1e-12)
        assert_same(sums, whole[1])


def test_a_group_with_one_reward_that_is_not_a_number_gives_a_finite_loss():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    rewards = [1.0, 0.0, math.nan, 1.0]
    rollouts = [make.rollout([i], reward=r, reference=-1.0) for i, r in enumerate(rewards)]
    group = train_group("p", rollouts)
    shard.add(as_batch(as_group("p", rollouts)))
    rows, sizes = shard.rows_of(np.array([shard.prompts.number("p")]))
    held = shard.batch(np.array([shard.prompts.number("p")]), sizes, rows, np.ones(len(rows))).groups()[0].rollouts
    (p,) = pack([replace(group, rollouts=tuple(held), copies=(1,) * len(held))], 100)
    output = TbVarGrad(BETA, OFF)(loss_inputs(p.microbatch, torch.full((3,), -0.5, requires_grad=True), normaliser=3))
    assert math.isfinite(output.loss.item())
    assert shard.counts().invalid == 1


# What must stay finite


@BOTH
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
def test_everything_is_finite(loss_class, inputs):
    output = loss_class(BETA, OFF)(inputs)
    assert all(map(math.isfinite, numbers(output).values()))
    assert gradient(loss_class, inputs).isfinite().all()


@BOTH
def test_identical_completions_have_no_gradient(loss_class):
    assert gradient(loss_class, inputs_of([4], [0], [1.0], copies=[8])).abs().max() < 1e-12


def test_equal_rewards_still_push_towards_the_reference_by_intention():
    inputs = replace(
        inputs_of([1, 1], [0, 0], [1.0, 1.0]),
        reference_logprob_S=torch.tensor([-1.0, -1.0], dtype=torch.float64),
        logprob_T=torch.tensor([-0.5, -3.0], dtype=torch.float64),
    )
    output = TbVarGrad(BETA, OFF)(inputs)
    assert float(output.sums["group/equal_rewards"]) == 1
    too_likely, too_rare = gradient(TbVarGrad, inputs).tolist()
    assert too_likely > 0 > too_rare  # a descent step lowers the first and raises the second


@BOTH
def test_long_completions_are_summed_in_float64(loss_class):
    inputs = inputs_of([50_000, 1], [0, 0], [1.0, 0.0], dtype=torch.float32)
    exact = replace(inputs, logprob_T=inputs.logprob_T.detach().double())
    found, expected = numbers(loss_class(BETA, OFF)(inputs)), numbers(loss_class(BETA, OFF)(exact))
    assert found == pytest.approx(expected, rel=1e-12)
    assert gradient(loss_class, inputs).dtype == torch.float32


def test_statistics_carry_no_gradient():
    output = TbVarGrad(BETA, OFF)(random_inputs(1))
    assert output.loss.requires_grad
    assert not any(value.requires_grad for value in (output.sums | output.maxima).values())
    assert all(value.shape == () for value in (output.sums | output.maxima).values())
