import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factory import RolloutFactory, as_batch, as_group
from sampler_steps import (
    Group,
    draw_all,
    draw_one,
    groups_of,
    one_prompt,
    pool,
    prompts_of,
    shard_of,
    step_of,
)

from tba_megatron.buffer import prompts
from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.sampler import Fifo, Prioritised, RewardRecency, Sampler, Uniform, make_sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.config_sections import FifoSampler, PrioritisedSampler, RewardRecencySampler, UniformSampler
from tba_megatron.types import PolicyHistory, ShardReport


def recency(m: float = 0.5, age: int = 2, inverse_temperature: float = 0.0) -> RewardRecency:
    return RewardRecency(
        RewardRecencySampler(recent_probability=m, recent_age_steps=age, inverse_temperature=inverse_temperature)
    )


def prioritised(inverse_temperature: float = 1.0) -> Prioritised:
    return Prioritised(PrioritisedSampler(inverse_temperature=inverse_temperature))


SAMPLERS: dict[str, Sampler] = {
    "reward_recency": recency(inverse_temperature=1.0),
    "uniform": Uniform(),
    "prioritised": prioritised(),
    "fifo": Fifo(),
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
every_sampler_but_fifo = pytest.mark.parametrize("sampler", list(SAMPLERS.values())[:3], ids=list(SAMPLERS)[:3])


def report(n_prompts: int, n_recent: int = 0, n_fresh: int = 0) -> ShardReport:
    return ShardReport(n_prompts=n_prompts, n_recent=n_recent, n_fresh=n_fresh, n_rollouts=0, bytes=0)


def tokens_of(draw: Draw, group: int = 0) -> Counter[int]:
    return Counter(dict(groups_of(draw)[group][1]))


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


def test_only_recency_looks_at_ages_to_report_what_is_fresh():
    shard = shard_of(pool(RolloutFactory(), "a", [0.0], step=0), pool(RolloutFactory(), "b", [0.0], step=9))
    history = PolicyHistory(base_steps=(0,))
    found = {name: sampler.report(shard, history, 9).n_fresh for name, sampler in SAMPLERS.items()}
    assert found == {"reward_recency": 1, "uniform": 2, "prioritised": 2, "fifo": 2}


# The same step on any number of shards

REWARDS = st.sampled_from([0.0, 1.0, -0.5, 3.0])
MESSAGES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 4), st.lists(st.tuples(st.integers(0, 5), REWARDS), min_size=1)),
    min_size=1,
    max_size=25,
)
Message = tuple[int, int, list[tuple[int, float]]]  # prompt, step, (token, reward) of each rollout
NOW = 4


def dealt(messages: list[Message], owners: list[int]) -> list[ReplayShard]:
    make = RolloutFactory()
    shards = [shard_of() for _ in range(max(owners) + 1)]
    for prompt, step, rollouts in messages:
        group = as_group(f"q{prompt}", [make.rollout(token, reward=r, step=step) for token, r in rollouts])
        shards[owners[prompt]].add(as_batch(group))
    return shards


def steps_of(sampler: Sampler, shards: list[ReplayShard], n_prompts: int, k: int, seed: int) -> list[object]:
    """Three steps, the rollouts of each trained on: groups and counts."""
    seen: list[object] = []
    history = PolicyHistory(base_steps=(0,))
    for step in range(3):
        n = n_prompts
        if isinstance(sampler, Fifo):
            n = min(n, sampler.available([sampler.report(shard, history, NOW) for shard in shards]))
        draws = draw_all(sampler, shards, n, k, seed + step, NOW)
        for shard, draw in zip(shards, draws, strict=True):
            shard.mark_trained(draw.rows)
        groups = step_of(draws)
        assert len(groups) == n
        assert all(sum(copies for _, copies in rollouts) == k for _, rollouts in groups)
        counts = [sum(getattr(d, name) for d in draws) for name in ("with_replacement", "equal_reward_groups")]
        everywhere = {(draw.short_recent, draw.repeated_prompts) for draw in draws}
        assert len(everywhere) == 1
        seen.append((groups, counts, everywhere))
    return seen


@every_sampler
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    messages=MESSAGES,
    two=st.lists(st.integers(0, 1), min_size=10, max_size=10),
    four=st.lists(st.integers(0, 3), min_size=10, max_size=10),
    n_prompts=st.integers(1, 12),
    k=st.integers(1, 6),
    seed=st.integers(0, 2**70),
)
def test_the_number_of_shards_changes_placement_only(
    sampler: Sampler, messages: list[Message], two: list[int], four: list[int], n_prompts: int, k: int, seed: int
):
    one = steps_of(sampler, dealt(messages, [0] * 10), n_prompts, k, seed)
    for owners in ([*two[:9], 1], [*four[:9], 3]):
        assert steps_of(sampler, dealt(messages, owners), n_prompts, k, seed) == one


def in_any_order(draw: Draw) -> list[Group]:
    return [(prompt, tuple(sorted(rollouts))) for prompt, rollouts in groups_of(draw)]


@every_sampler
@settings(max_examples=30, deadline=None, derandomize=True)
@given(messages=MESSAGES, order=st.randoms(use_true_random=False), seed=st.integers(0, 1000))
def test_the_order_of_rows_and_prompts_does_not_matter(sampler: Sampler, messages: list[Message], order, seed: int):
    messages = [(prompt, step, list(dict(rollouts).items())) for prompt, step, rollouts in messages]
    messages = list({(prompt, step): (prompt, step, rollouts) for prompt, step, rollouts in messages}.values())
    messages.sort(key=lambda message: message[1])
    # Prompts change places, and, but for fifo that goes by it, the rollouts that arrive together.
    mixed = sorted(order.sample(messages, len(messages)), key=lambda message: message[1])
    if not isinstance(sampler, Fifo):
        mixed = [(prompt, step, order.sample(rollouts, len(rollouts))) for prompt, step, rollouts in mixed]
    n_prompts = len({prompt for prompt, _, _ in messages})
    draws = [draw_one(sampler, dealt(m, [0] * 10)[0], n_prompts, 3, seed, NOW) for m in (messages, mixed)]
    assert in_any_order(draws[0]) == in_any_order(draws[1])


@every_sampler
def test_the_same_seed_gives_the_same_draw_and_another_seed_another(sampler: Sampler):
    make = RolloutFactory()
    shard = shard_of(*(pool(make, f"q{i}", [0.0, 0.5, 1.0, 1.5], step=9) for i in range(30)))
    draws = [groups_of(draw_one(sampler, shard, 10, 2, seed, 9)) for seed in (1, 1, 2, 3, 4)]
    assert draws[0] == draws[1]
    assert len({str(draw) for draw in draws}) == 4


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


def test_prompts_with_equal_keys_are_drawn_once_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "prompt_key", lambda prompt_id: 7 << 52)
    for sampler in SAMPLERS.values():
        make = RolloutFactory()
        groups = [pool(make, prompt, [0.0, 1.0], step=9 * (prompt in "ace")) for prompt in "abcdef"]
        shards = [shard_of(*groups[:2]), shard_of(*groups[2:])]
        for seed in range(10):
            step = step_of(draw_all(sampler, shards, 6, 2, seed, 9))
            assert sorted(prompt for prompt, _ in step) == list("abcdef")
            step = step_of(draw_all(sampler, shards, 4, 2, seed, 9))
            assert len({prompt for prompt, _ in step}) == 4


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


# First in, first out


def fifo_step(shard: ReplayShard, n: int, k: int, seed: int = 0) -> Draw:
    draw = draw_one(Fifo(), shard, n, k, seed)
    shard.mark_trained(draw.rows)
    return draw


def test_fifo_draws_each_rollout_once_the_oldest_versions_first():
    make = RolloutFactory()
    versions = {"b": 0, "a": 1, "c": 2}
    shard = shard_of(
        *(make.group(p, [4 * i, 4 * i + 1, 4 * i + 1], step=versions[p]) for i, p in enumerate("cab")),
        make.group("b", [12, 13, 13], step=3),
    )
    drawn = []
    while n := min(2, len(shard.fresh_prompts())):
        draw = fifo_step(shard, n, 3)
        assert draw.with_replacement == 0
        drawn += groups_of(draw)
    assert drawn == [
        ("b", ((8, 1), (9, 2))),
        ("a", ((4, 1), (5, 2))),
        ("c", ((0, 1), (1, 2))),
        ("b", ((12, 1), (13, 2))),
    ]
    assert shard.counts().held_untrained == 0


def test_of_one_version_the_first_to_arrive_is_the_first_to_leave():
    make = RolloutFactory()
    shard = shard_of(make.group("p", [5, 3], step=1), make.group("p", [4, 1], step=1), make.group("p", [9], step=0))
    assert groups_of(draw_one(Fifo(), shard, 1, 4)) == [("p", ((9, 1), (5, 1), (3, 1), (4, 1)))]


def test_what_a_visit_leaves_over_joins_the_next_visit():
    make = RolloutFactory()
    shard = shard_of(make.group("p", [1, 2, 3]))
    assert tokens_of(fifo_step(shard, 1, 2)) == {1: 1, 2: 1}
    assert shard.report_fresh().n_fresh == 0
    shard.add(as_batch(make.group("p", [4, 5, 6])))
    assert tokens_of(fifo_step(shard, 1, 2)) == {3: 1, 4: 1}


def test_a_short_visit_is_filled_up_and_counted_so_that_nothing_waits_for_ever():
    shard = shard_of(RolloutFactory().group("p", [1, 2]))
    draw = fifo_step(shard, 1, 4)
    assert (sum(draw.batch.copies_S), draw.with_replacement) == (4, 1)
    assert set(tokens_of(draw)) <= {1, 2}


def test_fifo_draws_no_more_prompts_than_wait():
    make = RolloutFactory()
    shards = [shard_of(*(make.group(f"{i}{j}", [1]) for j in range(3))) for i in range(2)]
    shards[0].mark_trained(shards[0].rows.living()[:1])
    assert len(step_of(draw_all(Fifo(), shards, 5, 1))) == 5
    with pytest.raises(ValueError, match="6 prompts are to be drawn but only 5 wait; wait for searchers"):
        draw_all(Fifo(), shards, 6, 1)
