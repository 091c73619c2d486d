import io
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factory import NEW_RUN, RolloutFactory, as_group

from tba_megatron.buffer.ledger import combine
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.shard_state import deal, from_arrays
from tba_megatron.transport.rollouts import owner_of
from tba_megatron.types import PolicyHistory, PolicySpan, PolicyVersion, ShardReport, StopReason


def held_tokens(shard: ReplayShard, prompt_id: str) -> list[int]:
    return [int(h.rollout.token_ids[0]) for h in shard.pool(prompt_id).rollouts]


def ledger_of(shard: ReplayShard) -> tuple[int, int, int, int, int]:
    c = shard.counts()
    assert sum(c.received.values()) == (c.held_untrained + c.trained + c.duplicate + c.evicted_untrained + c.invalid)
    return c.held_untrained, c.trained, c.duplicate, c.evicted_untrained, c.invalid


# Validity


def span(start: int, end: int, step: int = 0) -> PolicySpan:
    return PolicySpan(version=PolicyVersion(0, step), start=start, end=end)


@pytest.mark.parametrize(
    ("reason", "overrides"),
    [
        ("reward_not_finite", {"reward": math.nan}),
        ("reward_not_finite", {"reward": math.inf}),
        ("behaviour_logprobs_length", {"behaviour_logprobs": np.zeros(2, np.float32)}),
        ("behaviour_logprobs_not_finite", {"behaviour_logprobs": np.float32([0, -np.inf, 0])}),
        ("reference_logprob_not_finite", {"reference_logprob": math.nan, "reference_version": 0}),
        ("reference_version_missing", {"reference_logprob": -1.0}),
        ("spans", {"spans": ()}),
        ("spans", {"spans": (span(0, 2),)}),
        ("spans", {"spans": (span(0, 4),)}),
        ("spans", {"spans": (span(0, 1), span(2, 3))}),
        ("spans", {"spans": (span(0, 2), span(1, 3))}),
        ("spans", {"spans": (span(2, 3), span(0, 2))}),
        ("spans", {"spans": (span(0, 3), span(3, 3, step=9))}),
        ("aborted", {"stop_reason": StopReason.ABORT}),
    ],
)
def test_an_invalid_rollout_is_counted_and_the_others_of_its_group_stay(reason, overrides):
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(as_group("p", [make.rollout([1, 2, 3], **overrides), make.rollout([4], reward=1.0)]))
    assert held_tokens(shard, "p") == [4]
    assert ledger_of(shard) == (1, 0, 0, 0, 1)
    assert shard.counts().invalid_reasons == {reason: 1}


def test_a_completion_written_by_two_policies_and_an_empty_one_are_valid():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(as_group("p", [make.rollout([1, 2], spans=(span(0, 1), span(1, 2, step=3))), make.rollout([])]))
    assert [h.version.step for h in shard.pool("p").rollouts] == [3, 0]
    assert ledger_of(shard) == (2, 0, 0, 0, 0)


def test_truncated_completions_are_invalid_only_where_the_objective_drops_them():
    for drop, invalid in ((False, 0), (True, 1)):
        make, shard = RolloutFactory(), ReplayShard(10, 10, drop_truncated=drop)
        shard.add(as_group("p", [make.rollout(1, stop_reason=StopReason.LENGTH)]))
        assert shard.counts().invalid == invalid


def test_a_group_without_a_valid_rollout_makes_no_pool():
    shard = ReplayShard(10, 10)
    shard.add(RolloutFactory().group("p", [1, 2], reward=math.nan))
    assert shard.prompt_ids() == []
    assert shard.bytes == 0


def test_another_prompt_under_a_known_prompt_id_is_refused():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(make.group("p", [1]))
    shard.add(replace(make.group("p", [2]), prompt_token_ids=np.int32([5, 6])))
    shard.add(replace(make.group("q", [2]), prompt_token_ids=np.int32([])))
    assert shard.counts().invalid_reasons == {"prompt_differs": 1, "prompt_empty": 1}


# De-duplication


def test_equal_completions_of_one_version_are_copies_of_one_rollout():
    shard = ReplayShard(10, 10)
    shard.add(RolloutFactory().group("p", [1, 1, 2, 1]))
    assert [(int(h.rollout.token_ids[0]), h.copies) for h in shard.pool("p").rollouts] == [(1, 3), (2, 1)]
    assert ledger_of(shard) == (2, 0, 2, 0, 0)


def test_a_newer_copy_replaces_the_older_and_counts_from_one():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(make.group("p", [1, 1], step=1))
    newer = make.rollout(1, step=2)
    shard.add(as_group("p", [newer]))
    (held,) = shard.pool("p").rollouts
    assert (held.rollout.rollout_id, held.copies, held.version.step) == (newer.rollout_id, 1, 2)
    assert ledger_of(shard) == (1, 0, 2, 0, 0)


def test_an_older_copy_that_arrives_late_changes_nothing():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(make.group("p", [1], step=5))
    before = shard.pool("p")
    shard.add(make.group("p", [1], step=4))
    assert shard.pool("p") == before
    assert ledger_of(shard) == (1, 0, 1, 0, 0)


def test_the_same_tokens_under_another_prompt_are_another_completion():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(make.group("p", [1]))
    shard.add(make.group("q", [1]))
    assert ledger_of(shard) == (2, 0, 0, 0, 0)


def test_a_trained_rollout_stays_trained_when_a_newer_copy_replaces_it():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    old = make.rollout(1, step=1)
    shard.add(as_group("p", [old]))
    shard.mark_trained([old.rollout_id])
    shard.add(make.group("p", [1], step=2))
    assert ledger_of(shard) == (1, 1, 0, 0, 0)


def test_a_newer_copy_inherits_the_reference_logprob():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(make.group("p", [1], step=1, reference=-2.5))
    shard.add(make.group("p", [1], step=2))
    (held,) = shard.pool("p").rollouts
    assert (held.rollout.reference_logprob, held.rollout.reference_version) == (-2.5, 0)


def test_a_message_that_arrives_twice_is_received_once():
    shard = ReplayShard(10, 10)
    group = RolloutFactory().group("p", [1, 2])
    shard.add(group)
    shard.add(group)
    assert [h.copies for h in shard.pool("p").rollouts] == [1, 1]
    assert ledger_of(shard) == (2, 0, 0, 0, 0)
    assert shard.counts().redelivered == 2


# Eviction and the ledger


def test_the_oldest_version_then_the_oldest_arrival_leaves_a_full_pool():
    make, shard = RolloutFactory(), ReplayShard(100, 3)
    shard.add(make.group("p", [1], step=2))
    shard.add(make.group("p", [2, 3], step=1))
    shard.add(make.group("p", [4], step=2))
    assert held_tokens(shard, "p") == [1, 3, 4]
    shard.add(make.group("p", [5], step=0))
    assert held_tokens(shard, "p") == [1, 3, 4]
    assert ledger_of(shard) == (3, 0, 0, 2, 0)


def test_the_oldest_of_all_prompts_leave_a_full_shard_and_an_empty_pool_goes():
    make, shard = RolloutFactory(), ReplayShard(3, 10)
    shard.add(make.group("old", [1, 2], step=1))
    shard.add(make.group("mid", [3], step=2))
    shard.add(make.group("new", [4, 5], step=3))
    assert shard.prompt_ids() == ["mid", "new"]
    assert len(shard) == 3
    assert ledger_of(shard) == (3, 0, 0, 2, 0)


def test_an_old_version_that_arrives_last_leaves_a_full_shard_first():
    make, shard = RolloutFactory(), ReplayShard(2, 10)
    shard.add(make.group("p", [1], step=5))
    shard.add(make.group("q", [2], step=4))
    shard.add(make.group("r", [3], step=3))
    assert shard.prompt_ids() == ["p", "q"]
    shard.add(make.group("r", [4], step=6, attempt=1))
    assert shard.prompt_ids() == ["p", "r"]


def test_what_left_before_the_last_step_is_remembered_no_longer():
    make, shard = RolloutFactory(), ReplayShard(1, 10)
    first = make.rollout(1)
    shard.add(as_group("p", [first]))
    shard.add(make.group("q", [2]))
    shard.mark_trained([])
    shard.mark_trained([first.rollout_id])
    assert ledger_of(shard) == (1, 0, 0, 1, 0)


def test_a_rollout_that_left_while_its_step_ran_is_trained():
    make, shard = RolloutFactory(), ReplayShard(2, 10)
    drawn = [make.rollout(1, step=0), make.rollout(2, step=0)]
    shard.add(as_group("p", drawn))
    shard.add(make.group("p", [1], step=1))  # replaces the first
    shard.add(make.group("q", [7], step=1))  # evicts the second
    assert ledger_of(shard) == (2, 0, 1, 1, 0)
    shard.mark_trained([r.rollout_id for r in drawn])
    shard.mark_trained([r.rollout_id for r in drawn])
    assert ledger_of(shard) == (2, 2, 0, 0, 0)


def test_training_again_and_eviction_leave_a_rollout_trained():
    make, shard = RolloutFactory(), ReplayShard(1, 10)
    first = make.rollout(1)
    shard.add(as_group("p", [first]))
    shard.mark_trained([first.rollout_id])
    shard.mark_trained([first.rollout_id])
    shard.add(make.group("q", [2], step=1))
    assert ledger_of(shard) == (1, 1, 0, 0, 0)


def test_bytes_and_the_eviction_queue_stay_bounded_when_only_pools_overflow():
    make, shard = RolloutFactory(), ReplayShard(10_000, 2)
    for token in range(5000):
        shard.add(make.group("p", [token], step=token))
    assert len(shard._oldest) <= 2 * 2 + 1024 + 1
    assert shard.bytes == 2 * 4 + 4


def test_references_are_stored_with_held_rollouts_only():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    rollout, other = make.rollout(1), make.rollout(2)
    shard.add(as_group("p", [rollout]))
    shard.set_reference({rollout.rollout_id: (-3.0, 7), other.rollout_id: (-4.0, 7)})
    (held,) = shard.pool("p").rollouts
    assert (held.rollout.reference_logprob, held.rollout.reference_version) == (-3.0, 7)


# Recency


def test_recent_is_decided_by_the_version_that_wrote_not_by_arrival():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(make.group("late", [1], step=3))
    shard.add(make.group("new", [2], step=8))
    assert shard.report(NEW_RUN, 8, 2).n_recent == 1
    assert shard.report(NEW_RUN, 10, 2).n_recent == 1
    assert shard.report(NEW_RUN, 11, 2).n_recent == 0


def test_duplicates_and_a_full_pool_never_make_an_old_rollout_recent():
    make, shard = RolloutFactory(), ReplayShard(100, 4)
    shard.add(make.group("p", [1, 2, 3], step=0))
    for _ in range(3):
        shard.add(make.group("p", [7, 7, 8], step=5))
    (recent,) = shard.recent_pools(NEW_RUN, 5, 2)
    assert {int(h.rollout.token_ids[0]) for h in recent.rollouts} == {7, 8}
    assert len(shard.pool("p").rollouts) == 4


def test_versions_of_an_abandoned_branch_are_held_and_never_recent():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    shard.add(make.group("p", [1], attempt=0, step=12))
    shard.add(make.group("q", [2], attempt=0, step=10))
    shard.add(make.group("q", [3], attempt=0, step=12))
    shard.add(make.group("r", [4], attempt=1, step=11))
    resumed = PolicyHistory(base_steps=(0, 10))
    assert [p.prompt_id for p in shard.recent_pools(resumed, 11, 2)] == ["q", "r"]
    assert shard.report(resumed, 11, 2).n_prompts == 3


def test_a_prompt_is_fresh_until_its_newest_visit_was_trained_on():
    make, shard = RolloutFactory(), ReplayShard(100, 100)
    first, second = make.group("p", [1, 2]), make.group("p", [3, 4])
    fresh = lambda: shard.report(NEW_RUN, 0, 2).n_fresh  # noqa: E731
    shard.add(first)
    assert fresh() == 1
    shard.mark_trained([first.rollouts[0].rollout_id])  # a part of a visit counts: not every rollout is drawn
    assert fresh() == 0
    shard.add(second)
    assert fresh() == 1
    shard.mark_trained([first.rollouts[1].rollout_id])
    assert fresh() == 1
    shard.mark_trained([second.rollouts[0].rollout_id])
    assert fresh() == 0


def slow_report(shard: ReplayShard, history: PolicyHistory, step: int, age: int) -> ShardReport:
    """The specification of ``ReplayShard.report``: looks at every rollout."""

    def is_recent(held) -> bool:
        steps = history.age_steps(held.version, step)
        return steps is not None and steps <= age

    pools = [shard.pool(prompt_id).rollouts for prompt_id in shard.prompt_ids()]
    trained_visit = [max((h.visit for h in pool if h.trained), default=-1) for pool in pools]
    prompts = sum(shard.pool(p).prompt_token_ids.nbytes for p in shard.prompt_ids())
    return ShardReport(
        n_prompts=len(pools),
        n_recent=sum(any(map(is_recent, pool)) for pool in pools),
        n_fresh=sum(
            any(is_recent(h) and h.visit > visit for h in pool)
            for pool, visit in zip(pools, trained_visit, strict=True)
        ),
        n_rollouts=sum(map(len, pools)),
        bytes=prompts + sum(h.rollout.token_ids.nbytes for pool in pools for h in pool),
    )


def random_life(seed: int, n_messages: int = 60) -> ReplayShard:
    rng, make = random.Random(seed), RolloutFactory()
    shard = ReplayShard(rng.randint(5, 40), rng.randint(3, 12))
    for i in range(n_messages):
        completions = [[rng.randint(0, 9)] * rng.randint(0, 2) for _ in range(rng.randint(1, 5))]
        reward = rng.choice([0.0, 1.0, 1.0, math.nan])
        step = max(0, i // 6 - rng.randint(0, 3))
        shard.add(make.group(f"prompt {rng.randint(0, 8)}", completions, step=step, reward=reward))
        held = [h.rollout.rollout_id for p in shard.prompt_ids() for h in shard.pool(p).rollouts]
        if rng.random() < 0.3:
            shard.mark_trained(rng.sample(held, min(len(held), 4)))
    return shard


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_cheap_report_equals_a_look_at_every_rollout(seed):
    shard = random_life(seed)
    for step, age in ((9, 0), (9, 2), (12, 2), (9, 100)):
        fast, slow = shard.report(NEW_RUN, step, age), slow_report(shard, NEW_RUN, step, age)
        # A trained rollout may have left the shard, which the shard remembers and the slow report cannot see.
        assert fast.n_fresh <= slow.n_fresh
        assert fast.n_fresh == sum(pool.fresh for pool in shard.recent_pools(NEW_RUN, step, age))
        assert replace(fast, n_fresh=0) == replace(slow, n_fresh=0)
    ledger_of(shard)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_the_ledger_adds_up_whatever_happens(seed):
    counts = random_life(seed).counts()
    generated = {s: n + 5 for s, n in counts.received.items()}
    assert combine(generated, set(), [counts]).gap == 0


# Save and restore


def saved_and_loaded(shard: ReplayShard) -> dict[str, np.ndarray]:
    file = io.BytesIO()
    np.savez(file, **shard.state_arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def contents(shard: ReplayShard) -> list:
    def plain(h):
        r = h.rollout
        behaviour = None if r.behaviour_logprobs is None else r.behaviour_logprobs.tolist()
        return replace(h, rollout=replace(r, token_ids=r.token_ids.tolist(), behaviour_logprobs=behaviour))

    return [(p, [plain(h) for h in shard.pool(p).rollouts], shard.pool(p).fresh) for p in shard.prompt_ids()]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_restored_shard_is_the_saved_one_and_lives_on_like_it(seed):
    shard = random_life(seed)
    restored = ReplayShard(shard._capacity_rollouts, shard._per_prompt_rollouts)
    restored.restore(saved_and_loaded(shard))
    later = RolloutFactory("later")
    for _ in range(2):
        assert contents(restored) == contents(shard)
        assert restored.counts() == shard.counts()
        assert restored.report(NEW_RUN, 9, 2) == shard.report(NEW_RUN, 9, 2)
        for i in range(6):
            group = later.group(f"prompt {i}", [i, i + 1], step=8 + i)
            shard.add(group)
            restored.add(group)


def test_every_field_of_a_rollout_survives_a_restore():
    make, shard = RolloutFactory("søker\0"), ReplayShard(10, 10)
    rollout = make.rollout(
        [5, 6],
        reward=1 / 3,
        reference=-1.25,
        stop_reason=StopReason.LENGTH,
        spans=(span(0, 1), span(1, 2, step=4)),
        behaviour_logprobs=np.float32([-0.1, -0.2]),
    )
    shard.add(as_group("prøve\0", [rollout, make.rollout([])]))
    shard.mark_trained([rollout.rollout_id])
    restored = ReplayShard(10, 10)
    restored.restore(saved_and_loaded(shard))
    assert contents(restored) == contents(shard)
    assert restored.bytes == shard.bytes


def test_a_smaller_capacity_evicts_on_restore_and_the_ledger_adds_up():
    shard, small = ReplayShard(10, 10), ReplayShard(2, 10)
    shard.add(RolloutFactory().group("p", [1, 2, 3]))
    small.restore(shard.state_arrays())
    assert held_tokens(small, "p") == [2, 3]
    assert ledger_of(small) == (2, 0, 0, 1, 0)


def test_an_empty_shard_can_be_saved_and_another_format_is_refused():
    arrays, shard = ReplayShard(10, 10).state_arrays(), ReplayShard(10, 10)
    shard.restore(arrays)
    assert len(shard) == 0
    with pytest.raises(ValueError, match="format is 99"):
        shard.restore(arrays | {"counters": np.array([99, 0])})


# Dealt anew when the number of shards changes


def random_lives(seed: int, n: int) -> list[ReplayShard]:
    """The shards of one run, each with the prompts that it owns."""
    rng, make = random.Random(seed), RolloutFactory()
    shards = [ReplayShard(rng.randint(20, 60), rng.randint(3, 12)) for _ in range(n)]
    for i in range(90):
        prompt_id = f"prompt {rng.randint(0, 15)}"
        completions = [[rng.randint(0, 9)] * rng.randint(0, 2) for _ in range(rng.randint(1, 5))]
        reward = rng.choice([0.0, 1.0, 1.0, math.nan])
        group = make.group(prompt_id, completions, step=max(0, i // 9 - rng.randint(0, 3)), reward=reward)
        shards[owner_of(prompt_id, n)].add(group)
        if rng.random() < 0.3:
            for shard in shards:
                held = [h.rollout.rollout_id for p in shard.prompt_ids() for h in shard.pool(p).rollouts]
                shard.mark_trained(rng.sample(held, min(len(held), 4)))
    return shards


def dealt(shards: list[ReplayShard], n: int, capacity: int = 1000) -> list[ReplayShard]:
    parts = [from_arrays(saved_and_loaded(shard)) for shard in shards]
    after = [ReplayShard(capacity, 12) for _ in range(n)]
    for i, shard in enumerate(after):
        shard.restore_state(deal(parts, lambda p, i=i: owner_of(p, n) == i, keeps_rest=i == 0))
    return after


def in_any_order(shards: list[ReplayShard]) -> list:
    """All pools by prompt, with arrivals and visits replaced by their order within the pool."""

    def pool(prompt):
        prompt_id, held, fresh = prompt
        order = sorted({n for h in held for n in (h.arrival, h.visit)})
        places = [replace(h, arrival=order.index(h.arrival), visit=order.index(h.visit)) for h in held]
        return prompt_id, places, fresh

    return sorted((pool(prompt) for shard in shards for prompt in contents(shard)), key=lambda found: found[0])


def reasons(shards: list[ReplayShard]) -> Counter[str]:
    return sum((Counter(shard.counts().invalid_reasons) for shard in shards), Counter())


@pytest.mark.parametrize(("n_before", "n_after"), [(1, 2), (2, 1), (2, 4), (3, 2)])
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_dealt_shards_hold_the_same_rollouts_and_sum_to_the_same_ledger(n_before, n_after, seed):
    before = random_lives(seed, n_before)
    after = dealt(before, n_after)
    assert in_any_order(after) == in_any_order(before)
    assert all(owner_of(p, n_after) == i for i, shard in enumerate(after) for p in shard.prompt_ids())
    ledgers = [combine({"s": 500}, set(), [shard.counts() for shard in shards]) for shards in (before, after)]
    assert ledgers[0] == ledgers[1] and ledgers[0].gap == 0
    assert reasons(after) == reasons(before)
    for shard in after:
        held = [h for p in shard.prompt_ids() for h in shard.pool(p).rollouts]
        assert ledger_of(shard)[0] == sum(not h.trained for h in held)
        assert len({h.arrival for h in held}) == len(held)
        assert all(h.visit <= h.arrival < shard._next_arrival for h in held)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_dealt_shards_live_on(seed):
    shards, make = dealt(random_lives(seed, 2), 3), RolloutFactory("later")
    for shard in shards:
        held = [h.rollout.rollout_id for p in shard.prompt_ids() for h in shard.pool(p).rollouts]
        shard.mark_trained(held)
        assert ledger_of(shard)[0] == shard.report(NEW_RUN, 9, 100).n_fresh == 0
    for i in range(16):
        shards[owner_of(f"prompt {i}", 3)].add(make.group(f"prompt {i}", [i], step=20))
    fresh = sorted(pool.prompt_id for shard in shards for pool in shard.fresh_pools())
    assert fresh == sorted(f"prompt {i}" for i in range(16))


def test_the_oldest_of_all_parts_leave_a_shard_that_is_too_small_for_them():
    make, parts = RolloutFactory(), [ReplayShard(10, 10) for _ in range(2)]
    parts[0].add(make.group("a", [1, 2], step=1))
    parts[1].add(make.group("b", [3], step=0))
    parts[1].add(make.group("b", [4], step=2))
    (small,) = dealt(parts, 1, capacity=2)
    assert (held_tokens(small, "a"), held_tokens(small, "b")) == ([2], [4])
    assert ledger_of(small) == (2, 0, 0, 2, 0)


def test_dealing_the_only_shard_to_itself_changes_nothing():
    shard = random_life(7)
    (again,) = dealt([shard], 1)
    assert contents(again) == contents(shard) and again.counts() == shard.counts()
