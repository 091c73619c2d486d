"""How residuals and advantages of a step are counted in bins, and the metrics of spread and of single tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import MEMBERS, inputs_of, random_inputs

from tba_megatron import config_objective as section
from tba_megatron.loss.base import LossInputs, mean_statistics
from tba_megatron.loss.registry import make_loss
from tba_megatron.loss.regression import Regression
from tba_megatron.loss.statistics import EDGES, counts
from tba_megatron.metrics import CHARTS
from tba_megatron.trainer.buffer_metrics import AGE_EDGES, age_histogram
from tba_megatron.trainer.step import Update
from tba_megatron.trainer.step_metrics import update_histograms, update_metrics

FAR = (-EDGES[0], 5000.0, math.inf)
VALUES = st.one_of(st.floats(-2000, 2000), st.sampled_from([*EDGES, 0.0, *FAR, *(-far for far in FAR)]))


def by_numpy(values, copies) -> list[int]:
    clipped = np.clip(np.repeat(values, copies), EDGES[0], EDGES[-1])
    return np.histogram(clipped, EDGES)[0].tolist()


@given(st.lists(st.tuples(VALUES, st.integers(0, 3)), max_size=30))
def test_counts_are_those_of_numpy_with_each_copy_counted(pairs):
    values, copies = [v for v, _ in pairs], [c for _, c in pairs]
    found = counts(torch.tensor(values, dtype=torch.float64), torch.tensor(copies, dtype=torch.float64))
    assert found.tolist() == by_numpy(values, copies)


def test_what_is_not_a_number_is_in_no_bin():
    found = counts(torch.tensor([math.nan, 0.0, 2000.0]).double(), torch.ones(3).double())
    assert found.sum() == 2 and found[-1] == 1 and found[len(found) // 2] == 1


def known(inputs: LossInputs) -> LossInputs:
    """With all that any objective reads."""
    generator = torch.Generator().manual_seed(3)
    other_T = inputs.logprob_T.detach() + 0.4 * torch.randn(len(inputs.logprob_T), generator=generator).double()
    sums_S = torch.zeros(inputs.n_sequences).double().index_add(0, inputs.sequence_index_T, other_T)
    return replace(inputs, behaviour_logprob_T=other_T, reference_logprob_T=other_T, reference_logprob_S=sums_S)


def loss_of(member):
    return make_loss(section.ObjectiveConfig(loss=member), 10)


@pytest.mark.parametrize("seed", range(5))
def test_residuals_are_counted_in_nats_and_advantages_as_they_are(seed):
    inputs = known(random_inputs(seed))
    group, copies, reward = (t.numpy() for t in (inputs.group_index_S, inputs.copies_S, inputs.reward_S))
    copies = copies.astype(int)
    index = inputs.sequence_index_T.numpy()
    ratio_T = (inputs.logprob_T.detach() - inputs.behaviour_logprob_T).numpy()
    log_ratio = np.bincount(index, ratio_T, inputs.n_sequences)

    def centred(values):
        means = [np.average(values[group == g], weights=copies[group == g]) for g in range(inputs.n_groups)]
        return values - np.array(means)[group]

    tau = 0.05
    expected = {
        section.TbVarGrad(beta=tau): ("residual_nats", centred(reward / tau - log_ratio)),
        section.KimiK2(tau=tau): ("residual_nats", centred(reward) / tau - log_ratio),
        section.PpoClip(): ("advantage", centred(reward)),
    }
    for member, (name, values) in expected.items():
        found = loss_of(member)(inputs).histograms
        assert list(found) == [name]
        assert found[name].tolist() == by_numpy(np.round(values, 12), copies)


def metrics_of(output) -> dict[str, float]:
    statistics = mean_statistics({name: float(value) for name, value in output.sums.items()})
    maxima = {name: float(value) for name, value in output.maxima.items()}
    return update_metrics(Update(skipped=False, grad_norm=1.0, learning_rate=1.0, statistics=statistics | maxima), 0)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.kind)
def test_every_objective_counts_each_rollout_once(member):
    inputs = known(random_inputs(4))
    output = loss_of(member)(inputs)
    (spread,) = output.histograms.values()
    assert spread.sum() == inputs.copies_S.sum() and not spread.requires_grad
    done = Update(
        skipped=False,
        grad_norm=1.0,
        learning_rate=1.0,
        statistics={},
        histograms={name: value.tolist() for name, value in output.histograms.items()},
    )
    ((name, histogram),) = update_histograms(done).items()
    assert name == ("policy/residual_nats" if isinstance(loss_of(member), Regression) else "policy/advantage")
    assert len(histogram.counts) == len(histogram.edges) - 1


@pytest.mark.parametrize(
    "member", [section.TbVarGrad(beta=0.5), section.Grpo(beta=0.5), section.Rloo(beta=0.5)], ids=lambda m: m.kind
)
def test_log_ratios_have_their_spread_over_rollouts_and_their_mean_over_tokens(member):
    inputs = replace(
        inputs_of([2, 1, 4], [0, 0, 0], [1.0, 0.0, 1.0], copies=[1, 2, 1]),
        logprob_T=torch.tensor([-1.0, -0.5, -2.0, -1, -1, -1, -1], dtype=torch.float64, requires_grad=True),
        reference_logprob_S=torch.tensor([-2.0, -1.5, -7.0], dtype=torch.float64),  # kl 0.5, -0.5, 3
        reference_logprob_T=torch.tensor([-1.5, -0.5, -1.5, -2, -2, -2, -1], dtype=torch.float64),
        behaviour_logprob_T=torch.tensor([-1.5, -0.5, -2.5, -1, -1, -1, -0.5], dtype=torch.float64),
    )
    found = metrics_of(loss_of(member)(inputs))
    kl, drift = [0.5, -0.5, -0.5, 3.0], [0.5, 0.5, 0.5, -0.5]  # of each copy; they have 8 tokens
    assert (found["policy/kl_ref"], found["policy/drift"]) == pytest.approx((np.mean(kl), np.mean(drift)))
    assert (found["policy/kl_ref_std"], found["policy/drift_std"]) == pytest.approx((np.std(kl), np.std(drift)))
    per_token = (found["policy/kl_ref_per_token"], found["policy/drift_per_token"])
    assert per_token == pytest.approx((sum(kl) / 8, sum(drift) / 8))


def test_what_is_drawn_is_reported_by_trajectory_balance_or_by_others_than_the_loss():
    named = {name for chart in CHARTS["RL health"].values() for name in chart[1]}
    found = metrics_of(loss_of(section.TbVarGrad(beta=0.5))(known(random_inputs(4))))
    assert {name for name in named if name.startswith("policy/")} <= {*found, "policy/entropy"}
    assert {
        "policy/log_z",
        "policy/log_z_std",
        "policy/ess_frac",
        "reward/equal_groups_frac",
        "optim/grad_norm",
    } <= set(found)


def test_ages_are_counted_by_their_bins():
    ages = {0: 4, 1: 1, 6: 2, 7: 1, 8: 5, 100_000: 3}
    expected = np.histogram(np.clip(np.repeat(list(ages), list(ages.values())), 0, AGE_EDGES[-1]), AGE_EDGES)[0]
    assert list(age_histogram(ages).counts) == expected.tolist()
