"""A shard of columns lives like its specification, a list (tests/list_shard.py), whatever happens to both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from list_shard import ListShard, invalid_reason, plain_rollout
from rollout_factory import RolloutFactory, as_batch, as_group
from shard_lives import Add, Event, Train, lives, odd_rollouts, random_life, some_rollouts

from tba_megatron.buffer import arena, content_index
from tba_megatron.buffer.ledger import combine
from tba_megatron.buffer.prompts import BINS
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.shard_state import SavedShard, restore, to_columns
from tba_megatron.buffer.validity import REASONS, VALID, invalid_reasons
from tba_megatron.rollout_batch import RolloutBatch, decode, encode
from tba_megatron.types import LedgerCounts, PolicyHistory, RolloutGroup

WHEN = (  # history, step, age that counts as recent
    (PolicyHistory(base_steps=(0,)), 4, 1),
    (PolicyHistory(base_steps=(0, 1)), 3, 1),
    (PolicyHistory(base_steps=(0, 3, 2)), 2, 0),
    (PolicyHistory(base_steps=(0, 3, 2)), 0, 100),
)
UNBOUNDED = 1 << 62


def referred(arrival: int, version: int) -> float:
    return -1.5 * arrival - version


class Twins:
    """One life, lived by both."""

    def __init__(
        self,
        capacity_rollouts: int,
        per_prompt_rollouts: int,
        capacity_bytes: int = UNBOUNDED,
        drop: bool = False,
        max_reuse: int = 0,
        vocab_size: int = 1 << 30,
    ) -> None:
        self.limits = (capacity_rollouts, per_prompt_rollouts)
        self.more_limits = {"capacity_bytes": capacity_bytes, "drop_truncated": drop, "max_reuse": max_reuse}
        self.more_limits["vocab_size"] = vocab_size
        self.fast = self.newborn()
        self.slow = ListShard(*self.limits, **self.more_limits)
        self.log: list[tuple[int, RolloutBatch]] = []  # (segment, what was added)

    def __repr__(self) -> str:
        return f"Twins(*{self.limits}, **{self.more_limits})"

    def newborn(self) -> ReplayShard:
        return ReplayShard(*self.limits, **self.more_limits)

    def live(self, event: Event) -> None:
        if isinstance(event, Add):
            batch = RolloutBatch.of_groups(event.groups)
            self.log.append((len(self.log) // 2, batch))
            self.slow.add(batch)
            self.fast.add(decode(encode(batch)), segment=self.log[-1][0])
            return
        held = sorted(entry.arrival for entry in self.slow.entries)
        arrivals = [held[pick % len(held)] for pick in event.picks] if held else []
        rows = rows_by_arrival(self.fast, arrivals)
        if isinstance(event, Train):
            self.slow.mark_trained(arrivals)
            self.fast.mark_trained(rows)
        else:
            self.slow.set_reference(arrivals, lambda arrival: referred(arrival, event.version), event.version)
            values = np.array([referred(arrival, event.version) for arrival in arrivals], np.float64)
            self.fast.set_reference(rows, values, event.version)

    def assert_alike(self) -> None:
        fast, slow = self.fast, self.slow
        assert contents_of(fast) == slow.contents()
        assert drawable_of(fast) == slow.drawable()
        assert len(fast) == len(slow.entries)
        assert fast.bytes == slow.bytes
        assert fast.counts() == slow.counts()
        assert fast.report_fresh() == slow.report_fresh()
        assert ids_of(fast, fast.fresh_prompts()) == slow.fresh_prompt_ids()
        for when in WHEN:
            assert fast.report(*when) == slow.report(*when)
            recent = fast.rows.arrival[fast.recent_rows(*when)].tolist()
            assert recent == [entry.arrival for entry in sorted(slow.recent(*when), key=lambda entry: entry.age)]


# Reading a shard


def live_prompts(shard: ReplayShard) -> np.ndarray:
    """Prompt numbers, ascending."""
    numbers = shard.prompts.all_numbers()
    drawable = [number for number in numbers.tolist() if shard.may_draw(shard.rows_of(np.array([number]))[0]).any()]
    in_bins, keys = shard.prompts.in_bins(np.arange(BINS))
    assert sorted(in_bins.tolist()) == shard.prompts.drawable_numbers().tolist() == drawable
    assert keys.tolist() == sorted(shard.prompts.key[drawable].tolist())
    assert len(numbers) == len(shard.prompts)
    assert len(drawable) == shard.prompts.n_drawable == shard.prompts.histogram().sum()
    return numbers


def drawable_of(shard: ReplayShard) -> dict[str, list[int]]:
    """What ``ListShard.drawable`` gives."""
    numbers = shard.prompts.drawable_numbers()
    rows, sizes = shard.drawable_rows_of(numbers)
    assert shard.prompts.n_drawable_rows[numbers].tolist() == sizes.tolist()
    pools = np.split(shard.rows.arrival[rows], np.cumsum(sizes)[:-1])
    return {p: pool.tolist() for p, pool in zip(shard.prompts.ids(numbers), pools, strict=len(sizes) > 0)}


def rows_by_arrival(shard: ReplayShard, arrivals: Sequence[int]) -> np.ndarray:
    rows, _ = shard.rows_of(live_prompts(shard))
    row_of = dict(zip(shard.rows.arrival[rows].tolist(), rows.tolist(), strict=True))
    return np.array([row_of[arrival] for arrival in arrivals], np.int64)


def ids_of(shard: ReplayShard, numbers: np.ndarray) -> list[str]:
    assert numbers.tolist() == sorted(numbers.tolist())
    return sorted(shard.prompts.ids(numbers))


def contents_of(shard: ReplayShard) -> list[Any]:
    """What ``ListShard.contents`` gives, by what a sampler can see."""
    numbers, columns = live_prompts(shard), shard.rows
    rows, sizes = shard.rows_of(numbers)
    batch = shard.batch(numbers, sizes, rows, columns.copies[rows])
    assert sizes.min(initial=1) > 0
    assert sizes.tolist() == shard.sizes_of(numbers).tolist()
    assert columns.prompt[rows].tolist() == np.repeat(numbers, sizes).tolist()
    assert columns.length[rows].tolist() == batch.length_S.tolist()
    assert columns.reward[rows].tolist() == batch.reward_S.tolist()
    groups = batch.train_groups()
    versions = [rollout.version for group in groups for rollout in group.rollouts]
    assert columns.version[rows].tolist() == [version.attempt << 40 | version.step for version in versions]

    counters = zip(batch.copies_S, columns.uses[rows], columns.arrival[rows], columns.visit[rows], strict=True)
    contents = []
    for number, group in zip(numbers.tolist(), groups, strict=True):
        rollouts = [(*plain_rollout(rollout), *map(int, next(counters))) for rollout in group.rollouts]
        prompt = tuple(group.prompt_token_ids.tolist())
        contents.append((group.prompt_id, prompt, int(shard.prompts.trained_visit[number]), rollouts))
    return sorted(contents, key=lambda prompt: prompt[0])


# Lives


@settings(max_examples=300)
@given(st.lists(odd_rollouts() | some_rollouts(RolloutFactory()), max_size=6), st.booleans(), st.integers(0, 2))
def test_the_laws_of_validity_are_those_of_one_rollout(rollouts, drop_truncated, vocab_size):
    batch = as_batch(as_group("p", rollouts))
    laws = {"drop_truncated": drop_truncated, "vocab_size": vocab_size}
    slow = [invalid_reason(rollout, **laws) for rollout in batch.groups()[0].rollouts]
    fast = invalid_reasons(batch, **laws).tolist()
    assert [None if reason == VALID else REASONS[reason] for reason in fast] == slow


small_twins = st.builds(
    Twins,
    capacity_rollouts=st.sampled_from([12, 6, 30, 3, 1]),
    per_prompt_rollouts=st.sampled_from([4, 2, 6, 1]),
    capacity_bytes=st.sampled_from([UNBOUNDED] * 4 + [200, 100, 40, 1]),
    drop=st.booleans(),
    max_reuse=st.sampled_from([0, 1, 2]),
    vocab_size=st.sampled_from([2, 2, 2, 1, 0]),
)


def live_alike(
    twins: Twins,
    life: Iterable[Event],
    rebuild: Callable[[Twins], ReplayShard] = lambda twins: twins.fast,
    every: int = 1,
) -> None:
    """Lives through ``life``; before each event the shard becomes what ``rebuild`` makes of it, which must not show."""
    for i, event in enumerate(life):
        twins.fast = rebuild(twins)
        twins.live(event)
        if i % every == 0:
            twins.assert_alike()
    twins.assert_alike()
    counts = twins.fast.counts()
    total = combine({searcher: n + 5 for searcher, n in counts.received.items()}, set(), [counts])
    assert total.gap == 0 and total.in_flight == 5 * len(counts.received)
    assert sum(counts.received.values()) == sum(batch.n_rollouts for _, batch in twins.log)
    assert sum(counts.invalid_reasons.values()) == counts.invalid


@settings(max_examples=120)
@given(small_twins, lives())
def test_a_shard_lives_like_its_list(twins, life):
    live_alike(twins, life)


LONG = [(60, 8, 20), (150, 100, 3), (100, 3, 1000)]  # capacity, cap of a prompt, prompts


@pytest.mark.parametrize("limits", LONG)
def test_a_shard_lives_long_like_its_list(limits):
    capacity, per_prompt, n_prompts = limits
    twins = Twins(capacity, per_prompt, max_reuse=1)
    live_alike(twins, random_life(capacity, 80, n_prompts), every=10)
    assert twins.slow.counts().evicted_untrained > 3 * capacity
    assert not all(map(twins.slow.may_draw, twins.slow.entries))


def test_a_shard_grows_like_its_list():
    twins = Twins(5000, 5000)
    for event in random_life(7, 50, 1500):
        twins.live(event)
    assert len(twins.fast) > 1024 and len(twins.fast.prompts) > 64
    twins.assert_alike()


@pytest.mark.parametrize("limits", LONG)
@pytest.mark.parametrize("block_bytes", [16, 256])
def test_payload_in_many_small_blocks_is_not_mixed_up(limits, block_bytes, monkeypatch):
    monkeypatch.setattr(arena, "BLOCK_BYTES", block_bytes)
    capacity, per_prompt, n_prompts = limits
    live_alike(Twins(capacity, per_prompt), random_life(block_bytes, 50, n_prompts), every=10)


@pytest.fixture(params=[0, 3], ids=["one hash", "four hashes"])
def weak_hash(request, monkeypatch):
    whole = content_index.content_hash
    monkeypatch.setattr(content_index, "content_hash", lambda *content: whole(*content) & request.param)


def test_completions_are_told_apart_where_hashes_are_not(weak_hash):
    @settings(max_examples=40)
    @given(small_twins, lives())
    def live(twins, life):
        live_alike(twins, life)

    live()
    twins = Twins(60, 8)
    live_alike(twins, random_life(1, 30, 20), every=5)
    rows, _ = twins.fast.rows_of(live_prompts(twins.fast))
    assert len(rows) > 40 and len(np.unique(twins.fast.rows.content[rows])) <= 4


# At rest


def saved(shard: ReplayShard) -> SavedShard:
    return SavedShard(columns=to_columns(shard, with_payload=True))


def from_columns(twins: Twins) -> ReplayShard:
    """Saved without a log, and loaded."""
    shard = twins.newborn()
    assert restore(shard, [saved(twins.fast)]) == 0
    return shard


def from_log(twins: Twins) -> ReplayShard:
    """Saved beside a log, and loaded; segments of which nothing is held are gone."""
    columns, shard = to_columns(twins.fast, with_payload=False), twins.newborn()
    needed = twins.fast.segments()
    assert set(columns["segments"].tolist()) == needed
    records = [(segment, decode(encode(batch))) for segment, batch in twins.log if segment in needed]
    assert restore(shard, [SavedShard(columns=columns, records=records)]) == 0
    assert shard.segments() == needed
    return shard


@pytest.mark.parametrize("rebuild", [from_columns, from_log])
def test_a_shard_that_is_saved_and_loaded_again_and_again_lives_like_its_list(rebuild):
    @settings(max_examples=40)
    @given(small_twins, lives())
    def live(twins, life):
        live_alike(twins, life, rebuild)

    live()
    live_alike(Twins(60, 8, max_reuse=1), random_life(2, 30, 20), rebuild, every=5)


# Several shards


def owner_of(prompt_id: str, n: int) -> int:
    return sum(prompt_id.encode()) % n


def in_any_order(shards: Sequence[ReplayShard]) -> list[Any]:
    """All contents by prompt, with arrivals and visits replaced by their order within the prompt."""

    def relative(prompt_id: str, prompt: object, trained_visit: int, rollouts: list[Any]) -> tuple[Any, ...]:
        order = sorted({number for *_, arrival, visit in rollouts for number in (arrival, visit)})
        places = [(*rest, order.index(arrival), order.index(visit)) for *rest, arrival, visit in rollouts]
        trained = [visit <= trained_visit for *_, visit in rollouts]
        return prompt_id, prompt, trained, places

    found = [relative(*prompt) for shard in shards for prompt in contents_of(shard)]
    return sorted(found, key=lambda prompt: prompt[0])


def live_apart(shards: Sequence[ReplayShard], event: Event) -> None:
    """``event`` for all shards of a run, which share out the prompts."""

    def mine(groups: Iterable[RolloutGroup], i: int) -> list[RolloutGroup]:
        return [group for group in groups if owner_of(group.prompt_id, len(shards)) == i]

    if isinstance(event, Add):
        for i, shard in enumerate(shards):
            shard.add(RolloutBatch.of_groups(mine(event.groups, i)))
        return
    places = sorted(
        (prompt_id, place)
        for shard in shards
        for prompt_id in shard.prompts
        for place in range(int(shard.sizes_of(np.array([shard.prompts.number(prompt_id)]))[0]))
    )
    for pick in event.picks if places else ():
        prompt_id, place = places[pick % len(places)]
        shard = shards[owner_of(prompt_id, len(shards))]
        rows = shard.rows_of(np.array([shard.prompts.number(prompt_id)]))[0][[place]]
        if isinstance(event, Train):
            shard.mark_trained(rows)
        else:
            shard.set_reference(rows, np.array([referred(pick, event.version)]), event.version)


def born_apart(n: int) -> list[ReplayShard]:
    return [ReplayShard(10_000, 4) for _ in range(n)]


def dealt(shards: Sequence[ReplayShard], n: int) -> list[ReplayShard]:
    """The shards of a run that goes on with ``n`` of them."""
    parts, after = [saved(shard) for shard in shards], born_apart(n)
    for i, shard in enumerate(after):
        assert restore(shard, parts, lambda p, i=i: owner_of(p, n) == i, keeps_rest=i == 0) == 0
        assert all(owner_of(prompt_id, n) == i for prompt_id in shard.prompts)
    return after


def ledger_of(shards: Sequence[ReplayShard]) -> tuple[LedgerCounts, Counter[str]]:
    counts = [shard.counts() for shard in shards]
    reasons = sum((Counter(c.invalid_reasons) for c in counts), Counter())
    return combine({"s0": 500, "søker\0": 500}, set(), counts), reasons


@pytest.mark.parametrize(("n_before", "n_after"), [(1, 2), (2, 1), (2, 4), (3, 2), (1, 1)])
def test_a_run_lives_the_same_life_with_other_numbers_of_shards(n_before, n_after):
    @settings(max_examples=12)
    @given(lives(), lives())
    def live(before, after):
        one, many, changed = born_apart(1), born_apart(n_after), born_apart(n_before)
        for life in (before, after):
            for event in life:
                for shards in (one, many, changed):
                    live_apart(shards, event)
            assert in_any_order(many) == in_any_order(changed) == in_any_order(one)
            assert ledger_of(many) == ledger_of(changed) == ledger_of(one)
            changed = dealt(changed, n_after)
            assert in_any_order(changed) == in_any_order(one)
            assert ledger_of(changed) == ledger_of(one) and ledger_of(one)[0].gap == 0

    live()
