"""A gradient that is not finite changes nothing, on any rank."""

from __future__ import annotations

import dataclasses
import math

import pytest
import tiny
import torch
from ranks import run_ranks


GROUPS = tiny.train_groups(4)


def with_reward(reward: float):
    first, *others = GROUPS[0].rollouts
    return [dataclasses.replace(GROUPS[0], rollouts=(dataclasses.replace(first, reward=reward), *others)), *GROUPS[1:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def state(policy) -> list[torch.Tensor]:
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    return [value.clone() for part in parts for entry in part.optimizer.state.values() for value in entry.values()]


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_an_infinite_gradient_skips_the_step_on_all_ranks_and_the_next_one_is_normal(sizes, model):
    def body(groups):
        rank = tiny.Rank(groups, tiny.trainer_config(**sizes), model)
        rank.step(GROUPS)
        parameters = [p.detach().clone() for p in rank.policy.chunks[0].parameters()]
        moments = state(rank.policy)
        bad = rank.step(with_reward(1e38))
        assert bad.skipped and not math.isfinite(bad.grad_norm)
        for before, after in zip(parameters, rank.policy.chunks[0].parameters(), strict=True):
            assert torch.equal(before, after)
        assert all(torch.equal(a, b) for a, b in zip(moments, state(rank.policy), strict=True))
        good = rank.step(GROUPS)
        assert not good.skipped and math.isfinite(good.grad_norm)
        return good.grad_norm

    assert len(set(run_ranks(body, **sizes))) == 1
