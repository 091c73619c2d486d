"""What was acknowledged is there after a restart, whatever the checkpoint, the number of shards and the damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_lives import Add, Event, Train, lives
from stored_runs import ROOMY, SENDER, Run, books, distinct, new_run
from test_shard_twin import contents_of, in_any_order

from tba_megatron.buffer import stored_shard
from tba_megatron.buffer.segments import SegmentLog
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard, generations, remove_generations
from tba_megatron.rollout_batch import RolloutBatch, encode
from tba_megatron.types import RolloutGroup, RolloutId

# Restarts

SAVE, NEWEST, OLDER, NONE = "save", "newest", "older", "none"
NUMBERS = {NEWEST: 0, OLDER: 1, NONE: None}
parts_of_a_life = st.lists(st.tuples(lives(), st.sampled_from([SAVE, SAVE, NEWEST, OLDER, NONE])), max_size=4)


def renamed(events: list[Event], turn: int) -> list[Event]:
    """By searchers of their own, since no two rollouts of a run share an id."""

    def group(old: RolloutGroup) -> RolloutGroup:
        ids = [RolloutId(f"{r.rollout_id.searcher}.{turn}", r.rollout_id.sequence) for r in old.rollouts]
        rollouts = [replace(r, rollout_id=i) for r, i in zip(old.rollouts, ids, strict=True)]
        return replace(old, rollouts=tuple(rollouts))

    return [Add(groups=tuple(map(group, e.groups))) if isinstance(e, Add) else e for e in events]


small = {
    "capacity_rollouts": st.integers(1, 12),
    "per_prompt_rollouts": st.integers(1, 5),
    "capacity_bytes": st.sampled_from([1 << 62, 100]),
    "max_reuse": st.sampled_from([0, 1, 2]),
}


@pytest.mark.parametrize("logged", [True, False], ids=["log", "no log"])
def test_a_shard_that_is_killed_again_and_again_lives_like_one_that_is_not(logged):
    @settings(max_examples=20)
    @given(parts_of_a_life, st.fixed_dictionaries(small), st.sampled_from([1, 500, 1 << 20]))
    def live(life, limits, segment_bytes):
        with new_run(logged=logged, segment_bytes=segment_bytes, **limits) as run:
            for turn, (events, then) in enumerate(life):
                for event in renamed(events, turn):
                    run.live(event)
                if then == SAVE:
                    run.checkpoint()
                else:
                    run.restart(1, NUMBERS[then])
                run.assert_the_twin()

    live()


@pytest.mark.parametrize("logged", [True, False], ids=["log", "no log"])
def test_any_number_of_shards_goes_on_with_what_another_number_held(logged):
    @settings(max_examples=20)
    @given(st.lists(st.tuples(lives(), st.sampled_from([SAVE, NEWEST, OLDER, NONE]), st.integers(1, 4)), max_size=4))
    def live(life):
        with new_run(logged=logged, segment_bytes=700, **ROOMY, max_reuse=1) as run:
            for turn, (events, then, n) in enumerate(life):
                for event in renamed(events, turn):
                    run.live(event)
                if then == SAVE:
                    run.checkpoint()
                else:
                    run.restart(n, NUMBERS[then])
                    run.assert_like_the_twin()
                    run.restart(n, NUMBERS[then])  # killed before anything came
                run.assert_like_the_twin()

    live()


@pytest.mark.parametrize("saves", [True, False], ids=["checkpoints", "no checkpoint"])
def test_one_two_four_three_one(saves, tmp_path):
    run = Run(tmp_path, segment_bytes=700)
    for turn, n in enumerate((2, 4, 3, 1)):
        for event in distinct(30, f"s{turn}", 100 * turn):
            run.live(event)
        run.live(Train(picks=(0, 3, 5, 100)))
        if saves:
            run.checkpoint()
        for event in distinct(5, f"tail{turn}", 100 * turn + 50):
            run.live(event)
        for _ in range(2):
            run.restart(n, 0 if saves else None)
            run.assert_like_the_twin()
    if saves:
        run.checkpoint()
        remove_generations(run.replay, [run.checkpoints[-1][0]])
        assert len(generations(run.replay)) == 1
        run.restart(1, 0)
        run.assert_like_the_twin()
    run.crash()


class Killed(Exception):
    pass


@contextmanager
def killed_at(point: int) -> Iterator[list[int]]:
    """The ``point``-th step of writing a log raises; a step is the beginning of a log, or a record."""
    steps = [0]

    def counted(whole: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if steps[0] == point:
                raise Killed
            steps[0] += 1
            return whole(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_shard, "_GROUPS_A_RECORD", 1)
        patch.setattr(SegmentLog, "__init__", counted(SegmentLog.__init__))
        patch.setattr(SegmentLog, "append", counted(SegmentLog.append))
        yield steps


@pytest.mark.parametrize("saves", [True, False], ids=["a checkpoint", "no checkpoint"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_a_new_generation_may_be_cut_off_at_any_record(before, after, saves, tmp_path):
    first = Run(tmp_path / "first", before, segment_bytes=700)
    for event in distinct(12):
        first.live(event)
    first.live(Train(picks=(0, 7)))
    number = 0 if saves else None
    if saves:
        first.checkpoint()
    for event in distinct(3, "tail", 100):
        first.live(event)
    first.crash()
    for point in range(100):
        run = Run.__new__(Run)
        run.__dict__ |= first.__dict__ | {"history": list(first.history), "checkpoints": list(first.checkpoints)}
        run.folder = tmp_path / str(point)
        shutil.copytree(first.folder, run.folder)
        run.replay = run.folder / "replay"
        with killed_at(point) as steps:
            try:
                run.restart(after, number)
            except Killed:
                run.crash()
        if point % 2:  # the last record was only begun
            cut_last(run.replay, generations(run.replay)[-1].number)
        for n in (after, before):
            run.restart(n, number)
            run.assert_like_the_twin()
            run.live(distinct(1, f"new{n}", 1000 + n)[0])
            run.restart(n, number)
            run.assert_like_the_twin()
        run.crash()
        if steps[0] < point:
            assert point > 10
            return
    pytest.fail("it was never written whole")


def cut_last(replay: Path, number: int) -> None:
    files = sorted(replay.glob(f"{number:04d}/*/*.seg"), key=lambda file: file.stat().st_mtime_ns)
    if files and number:
        os.truncate(files[-1], max(0, files[-1].stat().st_size - 5))


def test_what_waits_while_a_checkpoint_is_made_comes_in_once_after_a_restart(tmp_path):
    run = Run(tmp_path, segment_bytes=300)
    for event in distinct(5):
        run.live(event)
    (stored,), waiting = run.shards, distinct(5, "waiting", 100)
    assert stored.log is not None
    for sequence, event in enumerate(waiting):
        payload = encode(RolloutBatch.of_groups(event.groups))
        for _ in range(1 + sequence % 2):  # a second time, as if its append had been interrupted at its end
            stored.log.append("waiting", sequence, payload, xxhash.xxh3_64_intdigest(payload))
    run.checkpoint()
    run.history += waiting
    for _ in range(2):
        run.restart(1, 0)
        run.assert_the_twin()
        assert run.shards[0].delivered == {SENDER: 5, "waiting": 5}
        run.checkpoint()
    run.crash()


def test_a_run_that_begins_anew_knows_no_reference_of_a_branch_without_a_checkpoint(tmp_path):
    run = Run(tmp_path)
    for event in distinct(4):
        run.live(event)
    (stored,) = run.shards
    rows = np.sort(stored.shard.rows.living())
    stored.shard.set_reference(rows[:2], np.array([-1.0, -2.0]), 0)  # of the start model
    stored.shard.set_reference(rows[2:], np.full(len(rows) - 2, -3.0), 4)  # of the policy of step 4
    run.checkpoint()
    run.restart(2, 0)
    held = [pair for stored in run.shards for pair in references_of(stored.shard)]
    assert sorted(held) == [(-3.0, 4)] * (len(rows) - 2) + [(-2.0, 0), (-1.0, 0)]
    remove_generations(run.replay, [run.checkpoint()])  # the log that the rollouts came in
    run.restart(2, None)
    assert sorted(pair for stored in run.shards for pair in references_of(stored.shard)) == [(-2.0, 0), (-1.0, 0)]
    run.crash()


def references_of(shard) -> list[tuple[float, int]]:
    """(log-prob, version) of the rollouts of which it is known."""
    rows = shard.rows.living()
    pairs = zip(shard.rows.reference[rows].tolist(), shard.rows.reference_version[rows].tolist(), strict=True)
    return [(value, version) for value, version in pairs if version >= 0]


def test_a_sender_that_lives_on_goes_on_where_it_was_in_another_generation_of_as_many_shards(tmp_path):
    run = Run(tmp_path)
    for event in distinct(3):
        run.live(event)
    run.checkpoint()
    shutil.rmtree(run.replay)
    for turn in range(2):
        run.restart(1, 0)
        assert run.shards[0].delivered == {SENDER: 3 + turn}
        run.live(distinct(1, f"s{turn}", 100)[0])
    run.restart(2, 0)
    assert [stored.delivered for stored in run.shards] == [{}, {}]
    run.crash()


def test_somebody_who_only_reads_sees_the_shard_and_disturbs_nothing(tmp_path):
    run = Run(tmp_path, 2, segment_bytes=700)
    for event in distinct(20):
        run.live(event)
    run.live(Train(picks=(0, 7)))
    path = run.checkpoint()
    for event in distinct(5, "tail", 100):
        run.live(event)
    files = sorted(file for file in run.replay.rglob("*") if file.is_file())
    before = [file.read_bytes() for file in files]
    reader = StoredShard(ReplayShard(**ROOMY), replay=run.replay)
    parts = {i: dict(np.load(path / f"shard-{i}.npz")) for i in range(2)}
    reader.restore(parts, generations(run.replay), read_only=True)
    assert in_any_order([reader.shard]) == in_any_order([run.twin()])
    assert reader.log is None
    assert sorted(file for file in run.replay.rglob("*") if file.is_file()) == files
    assert [file.read_bytes() for file in files] == before
    run.crash()


def test_a_smaller_capacity_evicts_the_oldest(tmp_path):
    run = Run(tmp_path)
    for event in distinct(20):
        run.live(event)
    run.checkpoint()
    run.limits = {"capacity_rollouts": 9, "per_prompt_rollouts": 4}
    twin = run.twin()
    run.restart(1, 0)
    (stored,) = run.shards
    assert len(stored.shard) == 9 and contents_of(stored.shard) == contents_of(twin)
    assert books([stored.shard]) == books([twin])
    run.crash()


@pytest.mark.parametrize("first", [True, False], ids=["a log from then on", "no log from then on"])
def test_a_run_that_changes_its_mind_about_a_log_reads_no_old_one(first, tmp_path, caplog):
    run = Run(tmp_path, logged=not first)
    for event in distinct(6):
        run.live(event)
    run.checkpoint()
    run.logged = first
    run.restart(1, 0)
    if not first:  # tokens were in the log alone
        assert "12 rollouts of the checkpoint are in no log" in caplog.text
        run.history = []
        assert books([run.shards[0].shard]) == books([ReplayShard(**ROOMY)])
    for turn in range(2):
        run.assert_like_the_twin()
        for event in distinct(3, f"s{turn}", 100 + turn):
            run.live(event)
        run.checkpoint()
        run.logged = True
        run.restart(1, 0)
    run.assert_like_the_twin()
    run.crash()
