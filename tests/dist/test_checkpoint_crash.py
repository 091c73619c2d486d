"""Whatever dies or fills up in the midst of a save, the last good checkpoint is the newest, and loads."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny
import torch
from ranks import run_ranks
from test_checkpoint import SLOW, config, empty_shard, run_state, shard_with, train_and_save

from tba_megatron.buffer.stored_shard import StoredShard
from tba_megatron.errors import CheckpointError
from tba_megatron.trainer import checkpoint, checkpoint_folder, checkpoint_writer
from tba_megatron.trainer.checkpoint import CheckpointWriter

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True, layers=2, seed=1)


# Killed


def die(*args, **kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(function):
    def call(*args, **kwargs):
        function(*args, **kwargs)
        die()

    return call


def die_half_way(rmtree):
    def call(path, *args, **kwargs):
        (path / "run.json").unlink()
        die()

    return call


def die_before_the_new_name(rename):
    def call(path, target):
        die() if path.suffix == ".partial" else None
        return rename(path, target)

    return call


# Where a rank dies: what is replaced, and by what.
POINTS = {
    "the thread has not begun to write": (checkpoint_writer, "_write", lambda write: die),
    "the thread has written one of its files": (checkpoint_writer.os, "fsync", die_after),
    "all has been written": (checkpoint_writer, "_write", die_after),
    "the metadata is there, the name is not": (checkpoint_writer, "complete", lambda complete: die),
    "an old checkpoint is half removed": (checkpoint_folder.shutil, "rmtree", die_half_way),
}


def die_while_saving(groups, model, path, point, victims):
    rank = tiny.Rank(groups, config(pp=groups.pp_size), model)
    shard = shard_with(3) if groups.is_leader else None
    writer = CheckpointWriter(path, groups, 2)
    for step in (1, 2):
        writer.save(rank.policy, shard, run_state(step))
    if groups.rank in victims:
        module, name, replacement = POINTS[point]
        setattr(module, name, replacement(getattr(module, name)))
    writer.begin(rank.policy, shard, run_state(3))
    writer.finish()
    torch.distributed.barrier(group=groups.world)


def load_newest_and_save(groups, model, path):
    """The step that was found, and what is in the folder after the next save."""
    rank = tiny.Rank(groups, config(pp=groups.pp_size), model)
    step, newest = checkpoint.checkpoints(path)[-1]
    shard = empty_shard(groups) if groups.is_leader else None
    assert checkpoint.load(newest, rank.policy, shard, groups).step == step
    CheckpointWriter(path, groups, 2).save(rank.policy, shard, run_state(9))
    return step, sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize(
    ("point", "pp", "victims"),
    [
        ("the thread has written one of its files", 1, (0,)),
        ("the metadata is there, the name is not", 1, (0,)),
        ("an old checkpoint is half removed", 1, (0,)),
        ("the thread has not begun to write", 2, (1,)),
        *(
            pytest.param(point, 2, victims, marks=SLOW)
            for point, victims in (
                ("the thread has not begun to write", (0, 1)),
                ("the thread has written one of its files", (1,)),
                ("the thread has written one of its files", (0, 1)),
                ("all has been written", (0,)),
                ("all has been written", (1,)),
                ("the metadata is there, the name is not", (0,)),
            )
        ),
    ],
)
def test_a_kill_leaves_the_last_complete_checkpoint_and_the_next_save_cleans_up(point, pp, victims, model, tmp_path):
    with pytest.raises(AssertionError, match=r"died without a traceback|Connection (closed|reset)"):
        run_ranks(die_while_saving, model, tmp_path, point, victims, pp=pp)
    (last,) = {step for step, _ in checkpoint.checkpoints(tmp_path)} - {1, 2} or {2}
    assert last == (3 if point == "an old checkpoint is half removed" else 2)
    assert any(path.name.endswith(".partial") for path in tmp_path.iterdir())
    found = run_ranks(load_newest_and_save, model, tmp_path, pp=pp)
    assert found == [(last, [f"step-{last:08d}", "step-00000009"])] * pp


def test_a_kill_while_a_step_is_saved_again_leaves_its_first_checkpoint(model, tmp_path):
    """The only moment without a ``step-N``: between the two renames."""

    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        writer = CheckpointWriter(tmp_path, groups, 1)
        writer.save(rank.policy, shard_with(3), run_state(3))
        Path.rename = die_before_the_new_name(Path.rename)  # type: ignore[method-assign]
        writer.begin(rank.policy, shard_with(4), run_state(3))
        writer.finish()

    with pytest.raises(AssertionError, match="died without a traceback"):
        run_ranks(body)
    ((step, path),) = checkpoint.checkpoints(tmp_path)
    assert (step, path.name) == (3, ".step-00000003.replaced")
    assert run_ranks(load_newest_and_save, model, tmp_path) == [(3, ["step-00000009"])]


def test_a_step_that_is_saved_again_is_the_second(model, tmp_path):
    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        for position in (1, 2):
            checkpoint.save(tmp_path, rank.policy, None, run_state(3, next_position=position), groups, keep=1)

    run_ranks(body)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert checkpoint.read_state(tmp_path / "step-00000003").next_position == 2


# Full


def save_twice(groups, model, path, break_it, sizes):
    """A good checkpoint of step 1, then one of step 2 that ``break_it`` spoils: what the second one raised."""
    rank = tiny.Rank(groups, config(**sizes), model)
    shard = shard_with(3) if groups.is_leader else None
    state = run_state(1, data_parallel=groups.dp_size)
    checkpoint.save(path, rank.policy, shard, state, groups, keep=2)
    break_it(groups)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(path, rank.policy, shard, msgspec.structs.replace(state, step=2), groups, keep=2)
    return str(caught.value)


def allow_small_files_only(n_bytes: int) -> None:
    """What a full disk does, for this process and its children alone: writing fails with an OSError."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def check_spoiled(messages, path, model, sizes):
    """Every rank knows, and the checkpoint of step 1 is the newest and loads."""
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"cannot save step 2 in {path}: ") and "\n" not in messages[0]
    assert [step for step, _ in checkpoint.checkpoints(path)] == [1]
    ranks = run_ranks(train_and_save, config(**sizes), model, path, 1, 2, True, **sizes)
    assert all(np.isfinite(ranks[0].norms))


@pytest.mark.parametrize("sizes", [{"pp": 2}, *(pytest.param(s, marks=SLOW) for s in ({}, {"dp": 2}))], ids=str)
def test_a_full_disk_under_the_model_fails_on_every_rank(sizes, model, tmp_path):
    def break_it(groups):
        if groups.rank == groups.info.world_size - 1:
            allow_small_files_only(4096)

    messages = run_ranks(save_twice, model, tmp_path, break_it, sizes, **sizes)
    check_spoiled(messages, tmp_path, model, sizes)


def test_a_full_disk_under_a_shard_fails_on_every_rank(model, tmp_path, monkeypatch):
    def fail(self):
        raise OSError(28, "No space left on device")

    def break_it(groups):
        if groups.dp_rank == 1:
            StoredShard.state_columns = fail

    messages = run_ranks(save_twice, model, tmp_path, break_it, {"dp": 2}, dp=2)
    assert "[Errno 28] No space left on device (rank 1)" in messages[0]
    check_spoiled(messages, tmp_path, model, {"dp": 2})


def test_a_folder_that_cannot_be_made_fails_on_every_rank(model, tmp_path):
    path = tmp_path / "checkpoints"

    def body(groups):
        rank = tiny.Rank(groups, config(pp=2), model)
        if groups.rank == 0:
            path.write_text("a file is in the way")
        torch.distributed.barrier(group=groups.world)
        with pytest.raises(CheckpointError, match=r"cannot save step 3 in .* \(rank 0\)$"):
            checkpoint.save(path, rank.policy, None, run_state(3), groups, keep=1)

    run_ranks(body, pp=2)


# A disk that is really full: a tmpfs in a mount namespace of its own, in which this file is run as a program.


def can_mount() -> bool:
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return (
        shutil.which("unshare") is not None and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    )


def fill_the_disk(groups, model, path):
    """A good checkpoint, then saves onto a disk that is nearly full."""
    rank = tiny.Rank(groups, config(dp=2), model)
    shard = shard_with(3, seed=groups.dp_rank)
    writer = CheckpointWriter(path, groups, 2)
    state = run_state(1, data_parallel=2)
    writer.save(rank.policy, shard, state)
    if groups.rank == 0:
        space = os.statvfs(path)
        (path.parent / "other data").write_bytes(bytes(space.f_bavail * space.f_bsize - 65536))
    torch.distributed.barrier(group=groups.world)
    messages = []
    for step in (2, 3):
        writer.begin(rank.policy, shard, msgspec.structs.replace(state, step=step))
        with pytest.raises(CheckpointError) as caught:
            writer.finish()
        messages.append(str(caught.value))
    loaded = checkpoint.load(path / "step-00000001", rank.policy, empty_shard(groups), groups).step
    return messages, loaded, sorted(p.name for p in path.iterdir())


@SLOW
@pytest.mark.skipif(not can_mount(), reason="a tmpfs cannot be mounted in a user namespace here")
def test_a_full_disk_fails_on_every_rank_and_leaves_the_last_checkpoint(model, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=2m tmpfs {disk} && exec {sys.executable} {__file__} {model} {disk}/checkpoints"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first == second
    messages, loaded, left = first
    for step, message in zip((2, 3), messages, strict=True):
        what, _, who = message.partition(f"cannot save step {step} in {disk}/checkpoints: ")
        reason = "[Errno 28] No space left on device"  # rank 0 has more to write than there is room for, rank 1 less
        assert (what, who) in {("", f"{reason} (rank 0)"), ("", reason)}
    assert (loaded, left) == (1, ["step-00000001"])


if __name__ == "__main__":
    print(json.dumps(run_ranks(fill_the_disk, Path(sys.argv[1]), Path(sys.argv[2]), dp=2)))
