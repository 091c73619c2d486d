"""``buffer.max_reuse``: what was part of so many optimizer steps is drawn no more, and everything else as before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factory import NEW_RUN, RolloutFactory, as_batch
from sampler_steps import (
    Group,
    draw_all,
    draw_one,
    every_sampler,
    every_sampler_but_fifo,
    groups_of,
    pool,
    prompts_of,
    recency,
    shard_of,
    step_of,
)
from test_sampler_statistics import LEVEL, p_value, successive

from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.sampler import Sampler, Uniform
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.shard_state import SavedShard, restore, to_columns

NOW = 9


def rows_with(shard: ReplayShard, tokens: set[int]) -> np.ndarray:
    rows = shard.rows.living()
    return rows[[int(shard.payload.tokens(rows[i : i + 1])[0]) in tokens for i in range(len(rows))]]


def use_up(shard: ReplayShard, tokens: set[int], times: int) -> None:
    for _ in range(times):
        shard.mark_trained(rows_with(shard, tokens))


def in_any_order(draw: Draw) -> list[Group]:
    return [(prompt, tuple(sorted(rollouts))) for prompt, rollouts in groups_of(draw)]


OLD, NEW = (0, 1, 2), (3, 4, 5)
POOLS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, NOW), st.lists(st.sampled_from(NEW), min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("max_reuse", [1, 2])
@every_sampler
@settings(max_examples=40, derandomize=True)
@given(used=POOLS, others=POOLS, n_prompts=st.integers(1, 6), k=st.integers(1, 5), seed=st.integers(0, 2**70))
def test_a_draw_is_that_of_a_shard_that_never_had_what_is_used_up(
    sampler: Sampler, max_reuse: int, used, others, n_prompts: int, k: int, seed: int
):
    make = RolloutFactory()
    both, without = shard_of(max_reuse=max_reuse), shard_of()
    for prompt, step, tokens in used:
        both.add(as_batch(make.group(f"q{prompt}", [token - NEW[0] for token in tokens], step=step)))
    for prompt, step, tokens in others:
        for shard in (both, without):
            shard.add(as_batch(make.group(f"q{prompt}", list(tokens), step=step, reward=0.5 * (prompt % 3))))
    use_up(both, set(OLD), max_reuse)
    reports = [sampler.report(shard, NEW_RUN, NOW) for shard in (both, without)]
    assert len({(report.n_prompts, report.n_recent, report.n_fresh) for report in reports}) == 1
    assert reports[0].n_prompts + reports[0].n_exhausted == len(both.prompts)
    if sampler.repeats or sampler.available(reports[:1]) >= n_prompts:
        draws = [draw_one(sampler, shard, n_prompts, k, seed, NOW) for shard in (both, without)]
        assert in_any_order(draws[0]) == in_any_order(draws[1])
        assert draws[0].with_replacement == draws[1].with_replacement
        assert draws[0].repeated_prompts == draws[1].repeated_prompts


@pytest.mark.parametrize("max_reuse", [1, 2, 3])
@every_sampler_but_fifo
def test_every_rollout_is_part_of_as_many_steps_as_it_may_be_and_then_nothing_is_left(sampler: Sampler, max_reuse: int):
    make = RolloutFactory()
    shards = [
        shard_of(*(pool(make, p, [0.0, 1.0, 2.0], step=NOW * (p in "ac")) for p in prompts), max_reuse=max_reuse)
        for prompts in ("abc", "de")
    ]
    steps = 0
    while sampler.available([sampler.report(shard, NEW_RUN, NOW) for shard in shards]):
        draws = draw_all(sampler, shards, 2, 2, steps, NOW)
        assert len(step_of(draws)) == 2
        for shard, draw in zip(shards, draws, strict=True):
            assert shard.may_draw(draw.rows).all()
            before = shard.rows.uses[draw.rows].copy()
            shard.mark_trained(draw.rows)
            assert (shard.rows.uses[draw.rows] == before + 1).all()
        steps += 1
    uses = [n for shard in shards for n in shard.rows.uses[shard.rows.living()].tolist()]
    assert uses == [max_reuse] * 15
    assert sum(len(shard) for shard in shards) == sum(shard.counts().trained for shard in shards) == 15
    assert [sampler.report(shard, NEW_RUN, NOW).n_exhausted for shard in shards] == [3, 2]
    with pytest.raises(ValueError, match="no shard holds a rollout that may be drawn; wait for searchers"):
        draw_all(sampler, shards, 2, 2, 0, NOW)
    shards[1].add(as_batch(pool(make, "d", [0.0], step=NOW, first=7)))
    assert {prompt for prompt, _ in step_of(draw_all(sampler, shards, 2, 2, 0, NOW))} == {"d"}


@every_sampler_but_fifo
def test_a_prompt_that_is_drawn_twice_in_a_step_is_used_once(sampler: Sampler):
    shard = shard_of(pool(RolloutFactory(), "a", [0.0]), max_reuse=2)
    draw = draw_one(sampler, shard, 3, 2)
    assert prompts_of(draw) == "aaa"
    shard.mark_trained(draw.rows)
    assert shard.rows.uses[shard.rows.living()].tolist() == [1]
    assert shard.may_draw(shard.rows.living()).all()


def test_what_is_used_up_is_drawn_again_only_as_the_rollout_of_a_newer_policy():
    make = RolloutFactory()
    shard = shard_of(make.group("a", [0], step=1), max_reuse=1)
    use_up(shard, {0}, 1)
    shard.add(as_batch(make.group("a", [0, 0], step=1)))
    assert shard.prompts.n_drawable == 0 and len(shard) == 1
    shard.add(as_batch(make.group("a", [0], step=2)))
    assert shard.prompts.n_drawable == 1 and len(shard) == 1
    assert draw_one(Uniform(), shard, 1, 1).batch.sequence_S.tolist() == [3]


def test_what_is_used_up_leaves_in_its_turn():
    make = RolloutFactory()
    shard = ReplayShard(3, 2, max_reuse=1)
    shard.add(as_batch(make.group("a", [0, 1], step=0)))
    use_up(shard, {0, 1}, 1)
    shard.add(as_batch(make.group("a", [2], step=1), make.group("b", [3, 4], step=2)))
    assert sorted(shard.payload.tokens(shard.rows.living()).tolist()) == [2, 3, 4]
    counts = shard.counts()
    assert (counts.trained, counts.held_untrained, counts.evicted_untrained) == (2, 3, 0)
    assert prompts_of(draw_one(Uniform(), shard, 4, 1)).count("a") == 2


@pytest.mark.parametrize(("before", "after", "left"), [(2, 1, "c"), (2, 2, "ac"), (1, 3, "abc"), (2, 0, "abc")])
def test_a_limit_that_changes_between_two_runs_holds_for_what_was_used_before(before: int, after: int, left: str):
    make = RolloutFactory()
    shard = shard_of(*(pool(make, prompt, [0.0], first=i) for i, prompt in enumerate("abc")), max_reuse=before)
    use_up(shard, {0, 1}, 1)
    use_up(shard, {1}, 1)
    restored = shard_of(max_reuse=after)
    restore(restored, [SavedShard(columns=to_columns(shard, with_payload=True))])
    assert Uniform().available([Uniform().report(restored, NEW_RUN, NOW)]) == len(left)
    assert sorted(prompts_of(draw_one(Uniform(), restored, len(left), 1))) == list(left)


def test_recent_and_whole_pool_draws_are_uniform_over_what_is_left():
    rewards = [0.0, 0.4, 0.8, 1.2]
    make = RolloutFactory()
    shard = shard_of(max_reuse=2)
    for prompt in "abcd":
        shard.add(as_batch(pool(make, prompt, rewards, step=0), pool(make, prompt, rewards, step=NOW, first=4)))
    use_up(shard, {0, 4}, 2)
    use_up(shard, {1, 5}, 1)
    of_d, _ = shard.rows_of(np.array([shard.prompts.number("d")]))
    shard.mark_trained(of_d)
    shard.mark_trained(of_d)
    recent, whole, prompts = Counter(), Counter(), Counter()
    for seed in range(1500):
        for m, found in ((1.0, recent), (0.0, whole)):
            draw = draw_one(recency(m, inverse_temperature=1.0), shard, 1, 2, seed, NOW)
            ((prompt, rollouts),) = groups_of(draw)
            prompts[prompt] += m == 0.0
            found[tuple(sorted(token for token, _ in rollouts))] += 1
    assert p_value(recent, dict.fromkeys([(5, 6), (5, 7), (6, 7)], 1 / 3)) > LEVEL
    left = [1, 2, 3, 5, 6, 7]
    chances = successive([float(np.exp(rewards[token % 4])) for token in left], 2)
    assert p_value(whole, {(left[i], left[j]): p for (i, j), p in chances.items()}) > LEVEL
    assert p_value(+prompts, dict.fromkeys("abc", 1 / 3)) > LEVEL
