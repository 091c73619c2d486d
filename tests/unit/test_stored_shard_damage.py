"""Damaged logs, old segments and full disks: what is lost is said in one line, and nothing else is lost."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from rollout_factory import RolloutFactory, as_batch, as_group
from shard_lives import Add, Train
from stored_runs import LARGE, SENDER, Run, books, distinct
from test_shard_twin import contents_of, live_prompts

from tba_megatron.buffer.segments import read_log
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard, generations, remove_generations
from tba_megatron.errors import CheckpointError
from tba_megatron.rollout_batch import decode, encode

# Damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def truncate(path: Path, at: int) -> None:
    os.truncate(path, at)


def remove(path: Path, at: int) -> None:
    path.unlink()


def ids_in(shard: ReplayShard) -> set[Any]:
    prompts = live_prompts(shard)
    rows, sizes = shard.rows_of(prompts)
    ids = shard.batch(prompts, sizes, rows, shard.rows.copies[rows]).rollout_ids()
    assert len(ids) == len(set(ids)) == len(shard)
    return set(ids)


def surviving(folder: Path) -> set[Any]:
    records = read_log(folder, on_damage=lambda damage: None)
    return {rollout_id for record in records for rollout_id in decode(record.payload).rollout_ids()}


@pytest.mark.parametrize("damage", [flip, truncate, remove])
@pytest.mark.parametrize("saved_after", [0, 13, 30], ids="{} messages before the checkpoint".format)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
@pytest.mark.parametrize("within", [0.02, 0.5, 0.97], ids=["head", "half way", "end"])
def test_damage_costs_what_no_record_holds_and_nothing_that_comes_after(
    damage, saved_after, where, within, tmp_path, caplog
):
    run = Run(tmp_path, segment_bytes=1500, **LARGE)
    messages = distinct(30)
    for event in messages[:saved_after]:
        run.live(event)
    run.live(Train(picks=tuple(range(0, 40, 3))))
    trained = {i for i in ids_in(run.shards[0].shard) if used(run.shards[0].shard, i)}
    run.checkpoint()
    for event in messages[saved_after:]:
        run.live(event)
    everything = ids_in(run.shards[0].shard)
    run.crash()
    folder = generations(run.replay)[0].folder(run.replay, 0)
    files = sorted(folder.glob("*.seg"))
    assert len(files) > 4
    file = files[round(where * (len(files) - 1))]
    damage(file, int(within * file.stat().st_size))
    expected = surviving(folder)
    assert expected < everything

    for turn in range(3):
        caplog.clear()
        run.restart(1, 0)
        (stored,) = run.shards
        assert ids_in(stored.shard) == expected
        counts = stored.shard.counts()
        assert counts.trained == len(trained)
        assert counts.held_untrained == len(expected - trained)
        assert sum(counts.received.values()) == len(expected | trained)
        lines = [record.getMessage() for record in caplog.records]
        assert all("\n" not in line for line in lines)
        assert sum(str(file) in line for line in lines) <= 1
        if turn == 0 and damage is not remove:
            assert sum(str(file) in line for line in lines) == 1, lines
        for event in distinct(4, f"after{turn}", 1000 + 100 * turn):
            run.live(event)
            expected = expected | {r.rollout_id for group in event.groups for r in group.rollouts}
        if turn == 1:
            run.checkpoint()
    run.crash()


def used(shard: ReplayShard, rollout_id: Any) -> bool:
    rows = shard.rows.living()
    name, sequence = rollout_id.searcher, rollout_id.sequence
    mine = (shard.rows.sequence[rows] == sequence) & (shard.rows.searcher[rows] == shard.names.number(name))
    return bool(shard.rows.uses[rows[mine]].any())


@pytest.mark.parametrize(("loser", "n_after"), [(0, 2), (1, 2), (0, 3), (1, 1)])
def test_a_shard_whose_log_is_gone_begins_anew_and_the_others_do_not_mind(loser, n_after, tmp_path, caplog):
    """The shards are then in different generations, and stay so."""
    run = Run(tmp_path, 2, segment_bytes=700, **LARGE)
    for event in distinct(30):
        run.live(event)
    run.checkpoint()
    run.crash()
    lost_folder = generations(run.replay)[0].folder(run.replay, loser)
    shutil.rmtree(lost_folder)
    run.restart(2, 0)
    assert sum(str(lost_folder) in record.getMessage() for record in caplog.records) == 1
    expected = ids_in(run.shards[1 - loser].shard)
    assert len(expected) and not len(run.shards[loser].shard)
    for turn in range(6):
        for event in distinct(5, f"s{turn}", 100 + 10 * turn):
            run.live(event)
            expected |= {r.rollout_id for group in event.groups for r in group.rollouts}
        if turn == 2:
            run.checkpoint()
            remove_generations(run.replay, [path for path, _ in run.checkpoints[-1:]])
        if turn < 4:
            has_logs = [g.folder(run.replay, 1 - loser).is_dir() for g in generations(run.replay)]
            assert has_logs[0] and not any(has_logs[1:]), "the other had to begin anew"
        run.restart(2 if turn < 4 else n_after, 0)
        held = [ids_in(stored.shard) for stored in run.shards]
        assert set().union(*held) == expected and sum(map(len, held)) == len(expected)
        books([stored.shard for stored in run.shards])
        assert sum(sum(s.shard.counts().received.values()) for s in run.shards) == len(expected)
    run.crash()


def test_a_checkpoint_whose_logs_are_all_gone_does_not_hide_what_comes_after(tmp_path):
    run = Run(tmp_path, segment_bytes=700, **LARGE)
    for _ in range(2):  # the second checkpoint is in a later generation
        for event in distinct(5):
            run.live(event)
        run.restart(2, None)
    run.checkpoint()
    run.crash()
    shutil.rmtree(run.replay)
    run.restart(2, 0)
    assert sum(len(stored.shard) for stored in run.shards) == 0
    for event in distinct(5, "after"):
        run.live(event)
    run.restart(2, 0)
    assert sum(len(stored.shard) for stored in run.shards) == 10
    run.crash()


# Old segments


def seen(shard: ReplayShard) -> list[Any]:
    """Contents without copies, uses and arrivals."""
    return [(prompt_id, [rollout[:10] for rollout in rollouts]) for prompt_id, _, _, rollouts in contents_of(shard)]


def kept_segments(stored: StoredShard) -> list[int]:
    assert stored.log is not None
    return stored.log.segments()


def test_segments_leave_with_their_rollouts_and_everything_kept_can_be_restored(tmp_path):
    run = Run(tmp_path, segment_bytes=600, capacity_rollouts=20, per_prompt_rollouts=20)
    total = 0
    for turn in range(6):
        for event in aged(12, turn):
            run.live(event)
            (stored,) = run.shards
            total += stored.reclaim([path for path, _ in run.checkpoints[-2:]])
            kept = set(kept_segments(stored))
            assert stored.shard.segments() | {stored.segment} <= kept
            for path, _ in run.checkpoints[-2:]:
                with np.load(path / "shard-0.npz") as columns:
                    assert {*columns["segments"].tolist(), int(columns["log"][2])} <= kept
        run.live(Train(picks=(0, 3, 5)))
        run.checkpoint()
        total += run.shards[0].reclaim([path for path, _ in run.checkpoints[-2:]])
        run.restart(1, 0)
        run.assert_the_twin()
    kept = kept_segments(run.shards[0])
    assert total > len(kept) and total + len(kept) == kept[-1] + 1, (total, kept)

    for event in aged(3, 9):
        run.live(event)
        run.shards[0].reclaim([path for path, _ in run.checkpoints[-2:]])
    newest = seen(run.shards[0].shard)
    run.restart(1, 0)
    assert seen(run.shards[0].shard) == newest
    run.restart(1, 1)
    assert seen(run.shards[0].shard) == newest == seen(run.twin())
    # What came after a checkpoint and has left with its segment counts as never received.
    found, lived = books([run.shards[0].shard]), books([run.twin()])
    assert all(counts <= before for counts, before in zip(found, lived, strict=True))
    run.crash()


def aged(n_groups: int, turn: int) -> list[Add]:
    make = RolloutFactory(f"s{turn}")
    return [
        Add(groups=(as_group(f"p{g % 3}", [make.rollout([turn, g, i], step=turn, attempt=0) for i in range(2)]),))
        for g in range(n_groups)
    ]


def test_what_has_not_been_taken_in_yet_is_not_reclaimed(tmp_path):
    run = Run(tmp_path, segment_bytes=200, capacity_rollouts=2, per_prompt_rollouts=20)
    (stored,) = run.shards
    assert stored.log is not None
    waiting = [as_batch(*event.groups) for event in aged(10, 1)]
    ends = []
    for sequence, batch in enumerate(waiting):
        payload = encode(batch)
        ends.append(stored.log.append(SENDER, sequence, payload, xxhash.xxh3_64_intdigest(payload)))
    assert ends[-1].segment > 5
    for sequence, (batch, end) in enumerate(zip(waiting, ends, strict=True)):
        stored.reclaim([])
        assert {one.segment for one in ends[sequence:]} <= set(kept_segments(stored))
        stored.take(batch, SENDER, sequence, end)
    assert stored.reclaim([]) > 0 and len(kept_segments(stored)) <= 2
    run.crash()


def test_a_save_in_flight_keeps_what_it_refers_to(tmp_path):
    run = Run(tmp_path, segment_bytes=200, capacity_rollouts=4, per_prompt_rollouts=20)
    for event in aged(6, 1):
        run.live(event)
    columns = run.shards[0].state_columns()
    wanted = {*columns["segments"].tolist()}
    for event in aged(6, 2):
        run.live(event)
        run.shards[0].reclaim([])
    assert wanted <= set(kept_segments(run.shards[0])) and not wanted & run.shards[0].shard.segments()
    run.crash()


def test_generations_stay_while_a_checkpoint_needs_them(tmp_path):
    run = Run(tmp_path, 1, segment_bytes=700)
    paths = []
    for n in (2, 3):
        for event in distinct(6, f"s{n}", 100 * n):
            run.live(event)
        paths.append(run.checkpoint())
        run.restart(n, 0)
    paths.append(run.checkpoint())
    numbers = [generation.number for generation in generations(run.replay)]
    assert numbers == [0, 1, 2]
    remove_generations(run.replay, [])
    remove_generations(run.replay, paths)
    assert [generation.number for generation in generations(run.replay)] == numbers
    remove_generations(run.replay, paths[1:])
    assert [generation.number for generation in generations(run.replay)] == [1, 2]
    for number in (1, 0):
        run.restart(3, number)
        run.assert_like_the_twin()
    run.crash()


def test_a_checkpoint_that_cannot_be_read_keeps_everything(tmp_path, caplog):
    run = Run(tmp_path, segment_bytes=200, capacity_rollouts=2, per_prompt_rollouts=20)
    for event in aged(6, 1):
        run.live(event)
    path = run.checkpoint()
    for event in aged(6, 2):
        run.live(event)
    run.restart(2, 0)
    (path / "shard-0.npz").write_bytes(b"rubbish")
    before = kept_segments(run.shards[0]), generations(run.replay)
    assert run.shards[0].reclaim([path]) == 0
    remove_generations(run.replay, [path])
    assert (kept_segments(run.shards[0]), generations(run.replay)) == before
    assert all(f"{path / 'shard-0.npz'} cannot be read" in record.getMessage() for record in caplog.records)
    assert caplog.records
    run.crash()


# A full disk


def in_child(function: Callable[[], None]) -> None:
    """Run ``function`` in a forked child, which limits of its own may bind; its assertions count."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_full_disk_is_loud_and_what_was_acknowledged_is_there(tmp_path):
    messages = distinct(200)
    acknowledged = tmp_path / "acknowledged"

    def fill() -> None:
        run = Run(tmp_path, segment_bytes=1 << 20, **LARGE)
        for event in messages[:20]:
            run.live(event)
        run.live(Train(picks=(0, 1, 2)))
        run.checkpoint()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        for n, event in enumerate(messages[20:]):
            try:
                run.live(event)
            except CheckpointError as error:
                assert "00000000.seg cannot be written (File too large); free space" in str(error)
                acknowledged.write_text(str(20 + n))
                return
        raise AssertionError("the disk was never full")

    in_child(fill)
    n = int(acknowledged.read_text())
    assert 20 < n < 200
    with closing_run(tmp_path) as run:
        run.history = [*messages[:20], Train(picks=(0, 1, 2)), *messages[20:n]]
        run.checkpoints = [(tmp_path / "step-0", 21)]
        run.restart(1, 0)
        run.assert_the_twin()
        for event in messages[n:]:
            run.live(event)
        run.restart(1, 0)
        run.assert_the_twin()


@contextmanager
def closing_run(folder: Path) -> Iterator[Run]:
    run = Run(folder, **LARGE)
    try:
        yield run
    finally:
        run.crash()


def test_a_new_generation_that_finds_no_room_leaves_the_old_one(tmp_path):
    run = Run(tmp_path, segment_bytes=1 << 20, **LARGE)
    for event in distinct(100):
        run.live(event)
    run.checkpoint()
    run.crash()

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match="cannot be written"):
            run.restart(2, 0)

    in_child(fill)
    run.restart(2, 0)
    run.assert_like_the_twin()
    run.crash()
