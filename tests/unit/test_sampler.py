import warnings
from collections import Counter

import numpy as np
import pytest
from rollout_factory import RolloutFactory, as_batch
from sampler_steps import (
    SAMPLERS,
    draw_all,
    draw_one,
    every_sampler,
    every_sampler_but_fifo,
    groups_of,
    one_prompt,
    pool,
    prioritised,
    prompts_of,
    recency,
    shard_of,
    step_of,
    tokens_of,
)

from tba_megatron.buffer.sampler import Fifo, Prioritised, RewardRecency, Sampler, Uniform, make_sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.config_sections import FifoSampler, PrioritisedSampler, RewardRecencySampler, UniformSampler
from tba_megatron.types import PolicyHistory, ShardReport


def report(n_prompts: int, n_recent: int = 0, n_fresh: int = 0) -> ShardReport:
    return ShardReport(n_prompts=n_prompts, n_recent=n_recent, n_fresh=n_fresh, n_rollouts=0, bytes=0)


def test_the_configuration_names_the_sampler():
    for configured, sampler in (
        (FifoSampler(), Fifo),
        (RewardRecencySampler(), RewardRecency),
        (UniformSampler(), Uniform),
        (PrioritisedSampler(), Prioritised),
    ):
        assert type(make_sampler(configured)) is sampler


@every_sampler
def test_as_many_prompts_are_available_as_could_be_drawn(sampler: Sampler):
    reports = [report(9, 7, 3), report(8, 7, 5)]
    assert sampler.available(reports) == (8 if isinstance(sampler, Fifo) else 17)
    assert sampler.available([report(0)]) == 0


def test_what_a_sampler_may_never_draw_is_not_fresh_for_ever():
    shard = shard_of(pool(RolloutFactory(), "a", [0.0], step=0), pool(RolloutFactory(), "b", [0.0], step=9))
    history = PolicyHistory(base_steps=(0,))
    found = {name: sampler.report(shard, history, 9).n_fresh for name, sampler in SAMPLERS.items()}
    assert found == {"reward_recency": 1, "uniform": 1, "prioritised": 1, "fifo": 2}


@every_sampler
def test_a_draw_changes_nothing_and_names_its_rows(sampler: Sampler):
    make = RolloutFactory()
    shard = shard_of(*(pool(make, prompt, [0.0, 1.0, 1.0]) for prompt in "abcd"))
    first = draw_one(sampler, shard, 3, 2)
    assert shard.counts().trained == 0
    assert groups_of(first) == groups_of(draw_one(sampler, shard, 3, 2))
    assert first.rows.tolist() == [
        next(row for row in shard.rows.living().tolist() if shard.rows.sequence[row] == sequence)
        for sequence in first.batch.sequence_S.tolist()
    ]


# Where there is little


@every_sampler
def test_nothing_can_be_drawn_from_empty_shards(sampler: Sampler):
    for n_shards in (1, 2):
        with pytest.raises(ValueError, match=r"(no shard holds a rollout|only 0 wait).*; wait for searchers"):
            draw_all(sampler, [shard_of() for _ in range(n_shards)], 2, 4)


@every_sampler
def test_a_shard_that_holds_nothing_gives_no_groups(sampler: Sampler):
    shards = [shard_of(), shard_of(pool(RolloutFactory(), "a", [0.0, 1.0])), shard_of()]
    draws = draw_all(sampler, shards, 1, 2)
    assert [draw.batch.n_groups for draw in draws] == [0, 1, 0]
    assert [(len(draw.rows), len(draw.places)) for draw in draws] == [(0, 0), (2, 1), (0, 0)]


@every_sampler
def test_one_prompt_alone_can_be_drawn(sampler: Sampler):
    shard = shard_of(pool(RolloutFactory(), "a", [0.0, 1.0, 2.0]))
    draw = draw_one(sampler, shard, 1, 3)
    assert (prompts_of(draw), tokens_of(draw)) == ("a", {0: 1, 1: 1, 2: 1})
    assert (draw.repeated_prompts, draw.with_replacement) == (0, 0)


@every_sampler_but_fifo
def test_with_fewer_prompts_than_the_step_needs_all_are_taken_before_any_repeats(sampler: Sampler):
    make = RolloutFactory()
    for n_shards in (1, 2):
        shards = [shard_of() for _ in range(n_shards)]
        for i, prompt in enumerate("abc"):
            shards[i % n_shards].add(as_batch(pool(make, prompt, [0.0] * 8, step=9 * (i == 0))))
        for seed in range(10):
            for n_prompts, per_prompt in ((7, [2, 2, 3]), (9, [3, 3, 3])):
                draws = draw_all(sampler, shards, n_prompts, 2, seed, 9)
                step = step_of(draws)
                for begin in (0, 3):
                    assert sorted(prompt for prompt, _ in step[begin : begin + 3]) == list("abc")
                assert sorted(Counter(prompt for prompt, _ in step).values()) == per_prompt
                assert {draw.repeated_prompts for draw in draws} == {n_prompts - 3}
        assert len({rollouts for prompt, rollouts in step if prompt == "b"}) > 1  # each round draws anew


@every_sampler_but_fifo
def test_which_prompts_repeat_does_not_follow_from_the_first_round(sampler: Sampler):
    shard = shard_of(*(pool(RolloutFactory(), prompt, [0.0] * 4) for prompt in "abc"))
    steps = [prompts_of(draw_one(sampler, shard, 4, 2, seed)) for seed in range(60)]
    assert len({step[:3].index(step[3]) for step in steps}) == 3


@every_sampler
def test_a_draw_from_too_small_a_pool_is_with_replacement_and_counted(sampler: Sampler):
    shard = shard_of(pool(RolloutFactory(), "a", [0.0, 0.5]), pool(RolloutFactory(), "b", [0.0] * 8))
    draw = draw_one(sampler, shard, 2, 8)
    assert draw.with_replacement == 1
    assert [sum(copies for _, copies in rollouts) for _, rollouts in groups_of(draw)] == [8, 8]
    assert tokens_of(draw, prompts_of(draw).index("b")) == dict.fromkeys(range(8), 1)


@every_sampler
def test_a_draw_of_the_whole_multiset_is_the_multiset(sampler: Sampler):
    shard = shard_of(RolloutFactory().group("p", [1, 1, 1, 2]))
    draw = draw_one(sampler, shard, 1, 4)
    assert tokens_of(draw) == {1: 3, 2: 1}
    assert draw.batch.train_groups()[0].n_tokens == 2 * (1 + 1)
    assert draw.with_replacement == 0


@every_sampler
def test_groups_of_equal_rewards_are_counted(sampler: Sampler):
    make = RolloutFactory()
    shard = shard_of(pool(make, "a", [1.0, 1.0]), pool(make, "b", [0.0, 1.0]), pool(make, "c", [0.5]))
    assert draw_one(sampler, shard, 3, 2).equal_reward_groups == 2


# Recent draws


def test_recent_draws_hold_only_recent_versions():
    make = RolloutFactory()
    shard = shard_of(make.group("p", [1, 2, 3], step=0), make.group("p", [4, 5], step=9))
    for seed in range(30):
        assert tokens_of(draw_one(recency(1.0), shard, 1, 6, seed, 9)).keys() <= {4, 5}


def test_without_a_recent_part_everything_is_drawn_from_whole_pools_and_counted():
    shard = shard_of(pool(RolloutFactory(), "a", [0.0, 1.0]), pool(RolloutFactory(), "b", [0.0, 1.0]))
    draw = draw_one(recency(1.0), shard, 2, 2, step=99)
    assert (sorted(prompts_of(draw)), draw.short_recent, draw.repeated_prompts) == (["a", "b"], 2, 0)


def test_too_few_recent_prompts_over_all_shards_are_counted():
    make = RolloutFactory()
    shards = [
        shard_of(*(pool(make, f"{i}{j}", [0.0], step=9 * (j <= i)) for j in range(10))) for i in range(2)
    ]  # 1 and 2 of 10 prompts are recent
    for seed in range(10):
        draws = draw_all(recency(1.0), shards, 8, 1, seed, 9)
        assert [(draw.short_recent, draw.repeated_prompts) for draw in draws] == [(5, 0)] * 2
        chosen = [prompt for prompt, _ in step_of(draws)]
        assert sorted(chosen[:3]) == ["00", "10", "11"]
        assert len(set(chosen)) == 8


def test_fresh_prompts_come_first_the_soonest_too_old_before_the_others():
    make = RolloutFactory()
    shards = [
        shard_of(make.group("a", [1, 2], step=0), make.group("d", [1, 2], step=0)),
        shard_of(make.group("c", [1, 2], step=2), make.group("b", [1, 2], step=1)),
    ]
    trained = [row for row in shards[0].rows.living().tolist() if shards[0].rows.prompt[row] == 0]
    shards[0].mark_trained(np.array(trained))  # a
    for seed in range(10):
        for n, expected in ((1, "d"), (2, "db"), (3, "dbc"), (4, "dbca")):
            step = step_of(draw_all(recency(1.0), shards, n, 2, seed, 2))
            assert "".join(prompt for prompt, _ in step) == expected


def test_a_fresh_prompt_is_as_urgent_as_its_oldest_untrained_recent_rollout():
    make = RolloutFactory()
    shard = shard_of(make.group("a", [1, 2], step=3), make.group("b", [1], step=0), make.group("b", [2], step=4))
    shard.add(as_batch(make.group("c", [1], step=2), make.group("c", [2], step=4)))
    for seed in range(10):
        # b's untrained rollout of step 0 is too old to count at step 4; c's of step 2 is not.
        assert prompts_of(draw_one(recency(1.0), shard, 3, 1, seed, 4)) == "cab"
    shard.mark_trained(np.flatnonzero(shard.rows.version == 2))
    for seed in range(10):
        assert prompts_of(draw_one(recency(1.0), shard, 1, 1, seed, 4)) == "a"  # c's of step 2 is trained


def test_a_prompt_is_not_replayed_in_the_step_that_drew_it_as_recent_unless_unavoidable():
    make = RolloutFactory()
    shard = shard_of(*(make.group(prompt, [1], step=9 * (prompt == "n")) for prompt in "nop"))
    seen = set()
    for seed in range(20):
        draw = draw_one(recency(0.5), shard, 3, 1, seed, 9)
        assert sorted(prompts_of(draw)) == list("nop")
        seen.add(draw.short_recent)
        draw = draw_one(recency(0.5), shard, 5, 1, seed, 9)
        assert sorted(Counter(prompts_of(draw)).values()) == [1, 2, 2]
    assert seen == {0, 1, 2}


def test_an_abandoned_branch_is_replayed_and_never_recent():
    shard = shard_of(RolloutFactory().group("p", [1, 2], step=12))
    resumed = PolicyHistory(base_steps=(0, 10))
    assert recency().report(shard, resumed, 11).n_recent == 0
    draw = draw_one(recency(1.0), shard, 1, 2, 0, 11, history=resumed)
    assert (draw.short_recent, tokens_of(draw)) == (1, {1: 1, 2: 1})


# What official TBA (src/buffer_utils.py at c6075e2) gets wrong


def test_completions_that_are_generated_again_do_not_make_old_ones_recent():
    # There, 3 new items sampled three times count as n_online = 9 of the 5 items held, so "online" ones are drawn from
    # range(5 - 9, 5): of its 9 indices, -4 (the second item), 0 and 1 are old items.
    make = RolloutFactory()
    shard = shard_of(make.group("p", [0, 1], step=0), *(make.group("p", [10, 11, 12], step=9) for _ in range(3)))
    for seed in range(20):
        draw = draw_one(recency(1.0), shard, 1, 9, seed, 9)
        assert (tokens_of(draw), draw.with_replacement) == ({10: 3, 11: 3, 12: 3}, 0)


def test_a_recent_part_is_never_larger_than_its_pool():
    # There, 9 new items of which the capacity of 4 keeps the last are n_online = 9: range(4 - 9, 4) begins at -5, which
    # is no index of 4 items; the others draw each item from two or more indices.
    make = RolloutFactory()
    shard = ReplayShard(1000, 4)
    shard.add(as_batch(make.group("p", list(range(9)), step=9)))
    draw = draw_one(recency(1.0), shard, 1, 4, 0, 9)
    assert (tokens_of(draw), draw.with_replacement, draw.short_recent) == ({5: 1, 6: 1, 7: 1, 8: 1}, 0, 0)


def test_a_rollout_is_as_old_as_the_policy_that_wrote_it_however_late_it_arrives():
    # There, items are labelled with the trainer's step last heard, while weights change at every k-th step alone: with
    # k = 10, policy 0 sampled at step 9 is labelled 9, age 0 instead of 9.
    make = RolloutFactory()
    shard = shard_of(make.group("late", [1], step=0), make.group("new", [2], step=8))
    for seed in range(20):
        draw = draw_one(recency(1.0), shard, 2, 1, seed, 9)
        assert (list(draw.batch.prompt_ids), draw.short_recent) == (["new", "late"], 1)


# Draws by reward


@pytest.mark.parametrize("sampler", [recency(0.0, inverse_temperature=1e6), prioritised(1e6)])
def test_an_extreme_inverse_temperature_takes_the_best_and_stays_finite(sampler: Sampler):
    shard = shard_of(pool(RolloutFactory(), "p", [0.0, 1.0, 2.0, 3.0, 4.0]))
    for k, with_replacement in ((2, 0), (8, 1)):
        draw = draw_one(sampler, shard, 1, k)
        assert draw.with_replacement == with_replacement
        assert set(tokens_of(draw)) == ({3, 4} if k == 2 else {4})


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 1e300])
def test_the_largest_and_smallest_rewards_overflow_nowhere(inverse_temperature: float):
    big = 1.7e308
    make = RolloutFactory()
    shard = shard_of(pool(make, "a", [big, -big, 0.0, 0.5 * big]), pool(make, "b", [-big, -big, -big]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sampler in (recency(0.0, inverse_temperature=inverse_temperature), prioritised(inverse_temperature)):
            for k in (2, 5):
                draws = [draw_one(sampler, shard, 2, k, seed) for seed in range(20)]
                assert all(np.isfinite(draw.batch.reward_S).all() for draw in draws)
                if inverse_temperature:
                    best = {frozenset(tokens_of(draw, prompts_of(draw).index("a"))) for draw in draws}
                    assert best == {frozenset({0, 3}) if k == 2 else frozenset({0})}
                equals = {frozenset(tokens_of(draw, prompts_of(draw).index("b"))) for draw in draws}
                assert len(equals) > 1  # noise decides between equal rewards, however large


def test_one_prompt_of_150_000_rollouts_is_drawn_from_by_reward():
    rewards = np.random.default_rng(0).normal(size=150_000)
    shard = ReplayShard(1_000_000, 1_000_000)
    shard.add(one_prompt("red team", rewards))
    uniform, by_reward = (draw_one(prioritised(t), shard, 1, 512) for t in (0.0, 2.0))
    for draw in (uniform, by_reward):
        assert (draw.batch.n_rollouts, draw.batch.copies_S.max(), draw.with_replacement) == (512, 1, 0)
    assert abs(uniform.batch.reward_S.mean()) < 0.25
    assert by_reward.batch.reward_S.mean() == pytest.approx(2.0, abs=0.25)  # exp(2 r) tilts N(0, 1) to N(2, 1)


@every_sampler
def test_a_million_copies_of_a_rollout_cost_no_more_than_k(sampler: Sampler):
    make = RolloutFactory()
    shard = shard_of(make.group("a", [1, 2, 3]))
    shard.rows.copies[shard.rows_of(np.array([0]))[0]] = [10**9, 10**9, 1]
    counts = Counter()
    for seed in range(200):
        draw = draw_one(sampler, shard, 1, 8, seed)
        counts.update(tokens_of(draw, 0))
    assert counts[3] == 0
    if not isinstance(sampler, Fifo):
        assert abs(counts[1] - counts[2]) < 200  # of 1600: five standard deviations of a fair coin
