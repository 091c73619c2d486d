import math
from collections import Counter

import numpy as np
import pytest
from rollout_factory import NEW_RUN, RolloutFactory, as_group

from tba_megatron.buffer.sampler import Fifo, RewardRecency, make_sampler, shard_rng
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.config_sections import FifoSampler, RewardRecencySampler
from tba_megatron.types import PolicyHistory, ShardReport


def recency(m: float = 0.5, age: int = 2, inverse_temperature: float = 0.0) -> RewardRecency:
    return RewardRecency(
        RewardRecencySampler(recent_probability=m, recent_age_steps=age, inverse_temperature=inverse_temperature)
    )


def report(n_prompts: int, n_recent: int = 0, n_fresh: int = 0) -> ShardReport:
    return ShardReport(n_prompts=n_prompts, n_recent=n_recent, n_fresh=n_fresh, n_rollouts=0, bytes=0)


def shard_of(*groups) -> ReplayShard:
    shard = ReplayShard(10_000, 1000)
    for group in groups:
        shard.add(group)
    return shard


def tokens_of(group) -> Counter:
    return Counter({int(r.token_ids[0]): n for r, n in zip(group.rollouts, group.copies, strict=True)})


def test_the_configuration_names_the_sampler():
    assert isinstance(make_sampler(FifoSampler()), Fifo)
    assert isinstance(make_sampler(RewardRecencySampler()), RewardRecency)


# The plan


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    reports = [report(50, 20, 5), report(40, 30, 10)]
    plans = [recency().plan(reports, 32, seed) for seed in (1, 1, 2, 3, 4)]
    assert plans[0] == plans[1]
    assert len(set(plans)) > 1


def test_the_number_of_shards_changes_placement_only():
    for seed in range(20):
        plans = [
            recency().plan(reports, 32, seed)
            for reports in (
                [report(80, 24, 8)],
                [report(40, 12, 4)] * 2,
                [report(0), report(80, 24, 8)],
                [report(20, 6, 2)] * 4,
            )
        ]
        assert len({(sum(p.n_recent), sum(p.n_replay), p.short_recent) for p in plans}) == 1
        assert all(sum(p.n_recent) + sum(p.n_replay) == 32 for p in plans)


def test_the_number_of_recent_prompts_is_binomial_and_its_split_hypergeometric():
    reports = [report(300, 100, 0), report(300, 200, 0)]
    plans = [recency(m=0.75).plan(reports, 16, seed) for seed in range(4000)]
    n_recent = np.array([p.n_recent for p in plans])
    assert n_recent.sum(1).mean() == pytest.approx(12, abs=0.15)
    assert n_recent.sum(1).var() == pytest.approx(16 * 0.75 * 0.25, rel=0.1)
    assert n_recent.mean(0) == pytest.approx([4, 8], abs=0.15)


def test_fresh_prompts_of_all_shards_come_before_other_recent_ones():
    plan = recency(m=1.0).plan([report(100, 90, 0), report(10, 10, 6)], 6, 0)
    assert plan.n_recent == (0, 6)


def test_too_few_recent_prompts_become_replay_and_are_counted():
    plan = recency(m=1.0).plan([report(10, 1), report(10, 2)], 8, 0)
    assert (plan.n_recent, sum(plan.n_replay), plan.short_recent, plan.repeated_prompts) == ((1, 2), 5, 5, 0)


@pytest.mark.parametrize("m", [0.0, 0.5, 1.0])
def test_with_fewer_prompts_than_the_step_needs_all_are_taken_before_any_repeats(m):
    reports = [report(2, 1), report(1, 1)]
    for n_prompts, per_prompt in ((7, (2, 3)), (9, (3, 3))):
        plan = recency(m).plan(reports, n_prompts, 3)
        drawn = np.add(plan.n_recent, plan.n_replay)
        assert drawn.sum() == n_prompts
        assert plan.repeated_prompts == n_prompts - 3
        assert per_prompt[0] * 2 <= drawn[0] <= per_prompt[1] * 2
        assert per_prompt[0] <= drawn[1] <= per_prompt[1]


def test_nothing_can_be_planned_from_empty_shards():
    assert recency().available([report(0)]) == 0
    with pytest.raises(ValueError, match="no shard holds a rollout"):
        recency().plan([report(0)], 1, 0)


# Recent draws


def test_recent_draws_follow_the_copies_without_replacement():
    shard = shard_of(RolloutFactory().group("p", [1] * 6 + [2, 3]))
    n_first = []
    for seed in range(2000):
        draw = recency().draw(shard, 1, 0, 4, shard_rng(seed, 0), NEW_RUN, 0)
        drawn = tokens_of(draw.groups[0])
        assert drawn.total() == 4
        assert drawn[2] <= 1
        assert drawn[3] <= 1
        assert draw.with_replacement == 0
        n_first.append(drawn[1])
    assert np.mean(n_first) == pytest.approx(4 * 6 / 8, abs=0.05)


def test_a_recent_draw_of_the_whole_multiset_is_the_multiset():
    shard = shard_of(RolloutFactory().group("p", [1, 1, 1, 2]))
    draw = recency().draw(shard, 1, 0, 4, shard_rng(0, 0), NEW_RUN, 0)
    assert tokens_of(draw.groups[0]) == {1: 3, 2: 1}
    assert draw.groups[0].n_tokens == 2 * (1 + 1)


def test_a_draw_from_too_small_a_multiset_is_with_replacement_and_counted():
    shard = shard_of(RolloutFactory().group("p", [1, 2]))
    for n_recent, n_replay in ((1, 0), (0, 1)):
        draw = recency().draw(shard, n_recent, n_replay, 8, shard_rng(0, 0), NEW_RUN, 0)
        assert (sum(draw.groups[0].copies), draw.with_replacement) == (8, 1)


def test_recent_draws_hold_only_recent_versions():
    make = RolloutFactory()
    shard = shard_of(make.group("p", [1, 2, 3], step=0), make.group("p", [4, 5], step=9))
    for seed in range(30):
        draw = recency().draw(shard, 1, 0, 6, shard_rng(seed, 0), NEW_RUN, 9)
        assert tokens_of(draw.groups[0]).keys() <= {4, 5}


def test_an_abandoned_branch_is_replayed_and_never_recent():
    shard = shard_of(RolloutFactory().group("p", [1, 2], step=12))
    resumed, sampler = PolicyHistory(base_steps=(0, 10)), recency()
    assert sampler.report(shard, resumed, 11).n_recent == 0
    with pytest.raises(ValueError, match="1 recent prompts are planned but the shard has 0"):
        sampler.draw(shard, 1, 0, 2, shard_rng(0, 0), resumed, 11)
    assert len(sampler.draw(shard, 0, 1, 2, shard_rng(0, 0), resumed, 11).groups) == 1


def test_fresh_prompts_come_first_by_version_and_then_arrival():
    make = RolloutFactory()
    trained = make.group("a", [1, 2], step=0)
    shard = shard_of(
        trained,
        make.group("d", [1, 2], step=1),
        make.group("c", [1, 2], step=2),
        make.group("b", [1, 2], step=1),
    )
    shard.mark_trained([trained.rollouts[0].rollout_id])
    for n, expected in ((1, "d"), (2, "db"), (3, "dbc"), (4, "dbca")):
        draw = recency().draw(shard, n, 0, 2, shard_rng(n, 0), NEW_RUN, 2)
        assert "".join(g.prompt_id for g in draw.groups) == expected


# Replay draws


def test_replay_prompts_are_uniform_without_replacement():
    make = RolloutFactory()
    shard = shard_of(*(make.group(p, [1] * (i + 1), reward=float(i)) for i, p in enumerate("abcde")))
    drawn = Counter()
    for seed in range(2000):
        prompts = [g.prompt_id for g in recency().draw(shard, 0, 2, 1, shard_rng(seed, 0), NEW_RUN, 99).groups]
        assert len(set(prompts)) == 2
        drawn.update(prompts)
    assert [drawn[p] / 2000 for p in "abcde"] == pytest.approx([0.4] * 5, abs=0.05)


def test_a_prompt_is_not_replayed_in_the_step_that_drew_it_as_recent_unless_unavoidable():
    make = RolloutFactory()
    shard = shard_of(make.group("old", [1], step=0), make.group("new", [1], step=9))
    for seed in range(10):
        draw = recency().draw(shard, 1, 1, 1, shard_rng(seed, 0), NEW_RUN, 9)
        assert [g.prompt_id for g in draw.groups] == ["new", "old"]
        draw = recency().draw(shard, 1, 4, 1, shard_rng(seed, 0), NEW_RUN, 9)
        assert sorted(Counter(g.prompt_id for g in draw.groups).values()) == [2, 3]


def test_one_replay_draw_is_the_softmax_of_the_rewards_over_copies():
    make = RolloutFactory()
    shard = shard_of(as_group("p", [make.rollout(t, reward=r) for t, r in ((1, 0.0), (1, 0.0), (2, 1.0))]))
    drawn = Counter()
    for seed in range(3000):
        drawn += tokens_of(
            recency(inverse_temperature=2.0).draw(shard, 0, 1, 1, shard_rng(seed, 0), NEW_RUN, 0).groups[0]
        )
    assert drawn[2] / 3000 == pytest.approx(math.e**2 / (math.e**2 + 2), abs=0.03)


def test_replay_by_reward_without_replacement_equals_successive_draws():
    make = RolloutFactory()
    rewards = (0.0, 1.0, 2.0, 0.5)
    shard = shard_of(as_group("p", [make.rollout(t, reward=r) for t, r in enumerate(rewards)]))
    fast, slow, n = np.zeros(4), np.zeros(4), 4000
    weights = np.exp(rewards)
    rng = np.random.default_rng(0)
    for seed in range(n):
        draw = recency(inverse_temperature=1.0).draw(shard, 0, 1, 2, shard_rng(seed, 0), NEW_RUN, 0)
        fast[list(tokens_of(draw.groups[0]))] += 1
        slow[rng.choice(4, 2, replace=False, p=weights / weights.sum())] += 1
    assert fast / n == pytest.approx(slow / n, abs=0.04)


def test_an_extreme_inverse_temperature_takes_the_best_and_stays_finite():
    make = RolloutFactory()
    shard = shard_of(as_group("p", [make.rollout(t, reward=float(t)) for t in range(5)]))
    for k, with_replacement in ((2, 0), (8, 1)):
        draw = recency(inverse_temperature=1e6).draw(shard, 0, 1, k, shard_rng(0, 0), NEW_RUN, 0)
        assert draw.with_replacement == with_replacement
        assert set(tokens_of(draw.groups[0])) == ({3, 4} if k == 2 else {4})


def test_groups_of_equal_rewards_are_counted():
    make = RolloutFactory()
    mixed = as_group("q", [make.rollout(1, reward=0.0), make.rollout(2, reward=1.0)])
    draw = recency().draw(shard_of(make.group("p", [1, 2]), mixed), 2, 0, 2, shard_rng(0, 0), NEW_RUN, 0)
    assert draw.equal_reward_groups == 1


def test_a_restored_shard_continues_the_same_sequence_of_draws():
    make = RolloutFactory()
    shard = shard_of(*(make.group(f"p{i % 7}", [i % 5, i % 3, i], step=i // 8) for i in range(40)))
    restored = ReplayShard(10_000, 1000)
    restored.restore(shard.state_arrays())
    sampler = recency(inverse_temperature=0.5)
    for step in range(5):
        draws = []
        for s in (shard, restored):
            plan = sampler.plan([sampler.report(s, NEW_RUN, step)], 5, step)
            draw = sampler.draw(s, plan.n_recent[0], plan.n_replay[0], 4, shard_rng(step, 0), NEW_RUN, step)
            s.mark_trained([r.rollout_id for g in draw.groups for r in g.rollouts])
            draws.append([(g.prompt_id, [r.rollout_id for r in g.rollouts], g.copies) for g in draw.groups])
        assert draws[0] == draws[1]


# First in, first out


def fifo_step(shard: ReplayShard, n: int, k: int):
    draw = Fifo().draw(shard, n, 0, k, shard_rng(0, 0), NEW_RUN, 0)
    shard.mark_trained([r.rollout_id for g in draw.groups for r in g.rollouts])
    return draw


def test_fifo_draws_each_rollout_once_the_oldest_groups_first():
    make = RolloutFactory()
    groups = [make.group(p, [4 * i, 4 * i + 1, 4 * i + 1]) for i, p in enumerate("bacb")]
    shard = shard_of(*groups)
    drawn = []
    while n := min(2, Fifo().available([Fifo().report(shard, NEW_RUN, 0)])):
        draw = fifo_step(shard, n, 3)
        assert draw.with_replacement == 0
        drawn += [(g.prompt_id, tokens_of(g)) for g in draw.groups]
    assert drawn == [("b", {0: 1, 1: 2}), ("a", {4: 1, 5: 2}), ("c", {8: 1, 9: 2}), ("b", {12: 1, 13: 2})]
    assert shard.counts().held_untrained == 0


def test_what_a_visit_leaves_over_joins_the_next_visit():
    make = RolloutFactory()
    shard = shard_of(make.group("p", [1, 2, 3]))
    assert tokens_of(fifo_step(shard, 1, 2).groups[0]) == {1: 1, 2: 1}
    assert Fifo().report(shard, NEW_RUN, 0).n_fresh == 0
    shard.add(make.group("p", [4, 5, 6]))
    assert tokens_of(fifo_step(shard, 1, 2).groups[0]) == {3: 1, 4: 1}


def test_a_short_visit_is_filled_up_and_counted_so_that_nothing_waits_for_ever():
    shard = shard_of(RolloutFactory().group("p", [1, 2]))
    draw = fifo_step(shard, 1, 4)
    assert (sum(draw.groups[0].copies), draw.with_replacement) == (4, 1)


def test_fifo_plans_no_more_prompts_than_wait():
    plan = Fifo().plan([report(9, 9, 3), report(9, 9, 5)], 8, 0)
    assert (plan.n_recent, plan.n_replay) == ((3, 5), (0, 0))
    with pytest.raises(ValueError, match="9 prompts are planned but only 8 wait"):
        Fifo().plan([report(9, 9, 3), report(9, 9, 5)], 9, 0)
