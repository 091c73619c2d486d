"""A resumed run is the run that was never stopped, and a failed save leaves the last good checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import signal
import threading

import msgspec
import numpy as np
import psutil
import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.config import CosineSchedule
from tba_megatron.errors import CheckpointError
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.checkpoint import RunState
from tba_megatron.types import RolloutGroup

BATCHES = [tiny.train_groups(4, seed=seed) for seed in range(6)]
SCHEDULE = CosineSchedule(warmup_steps=2, decay_steps=8, final_fraction=0.1)
OPTIMIZER = tiny.OPTIMIZER.model_copy(update={"schedule": SCHEDULE})

SLOW = pytest.mark.slow


def config(**sizes):
    return tiny.trainer_config(optimizer=OPTIMIZER, **sizes)


def run_state(step: int, **fields) -> RunState:
    return RunState(
        step=step,
        base_steps=(0,),
        **({"data_parallel": 1, "next_position": 7, "unfinished_prompts": [(2, 3)], "generated": {"s": 5}} | fields),
    )


def shard_with(n: int, seed: int = 0) -> ReplayShard:
    """``n`` prompts of which the first has been trained on."""
    shard = ReplayShard(100, 10)
    for group in tiny.train_groups(n, seed=seed):
        shard.add(
            RolloutGroup(
                prompt_id=group.prompt_id, prompt_token_ids=group.prompt_token_ids, rollouts=group.rollouts, lease=0
            )
        )
    shard.mark_trained(r.rollout_id for r in tiny.train_groups(1, seed=seed)[0].rollouts)
    return shard


def train_and_save(groups, trainer, folder, path, first: int, last: int, resume: bool):
    """Steps ``first`` to ``last``, from the newest checkpoint if ``resume``, and a checkpoint after the last one."""
    rank = tiny.Rank(groups, trainer, folder)
    if resume:
        assert checkpoint.load(checkpoint.checkpoints(path)[-1][1], rank.policy, None, groups).step == first
    trained = rank.train(BATCHES[first:last])
    checkpoint.save(path, rank.policy, None, run_state(last, data_parallel=groups.dp_size), groups, keep=2)
    return trained


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True, layers=2, seed=1)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"pp": 2},
        {"dp": 2},
        *(pytest.param(s, marks=SLOW) for s in ({"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "dp": 2})),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(sizes, model, tmp_path):
    trainer = config(**sizes)
    whole = run_ranks(train_and_save, trainer, model, tmp_path / "whole", 0, 6, False, **sizes)
    parts = [
        run_ranks(train_and_save, trainer, model, tmp_path / "parts", first, last, first > 0, **sizes)
        for first, last in ((0, 2), (2, 3), (3, 4), (4, 6))
    ]
    for rank in range(len(whole)):
        for values in ("norms", "rates"):
            expected = getattr(whole[rank], values)
            assert [v for part in parts for v in getattr(part[rank], values)] == expected
        tiny.assert_same_weights(parts[-1][rank].weights[-1], whole[rank].weights[-1], 0.0)
    assert [loss for part in parts for loss in part[0].losses] == whole[0].losses
    # Two steps of warm-up and a cosine to a tenth at step 8: a schedule that a resume advances twice would be ahead.
    decayed = [0.001 + 0.009 * (1 + math.cos(math.pi * t / 6)) / 2 for t in range(5)]
    assert whole[0].rates == pytest.approx([0.005, *decayed])


def restored(groups, trainer, folder, path):
    rank = tiny.Rank(groups, trainer, folder)
    checkpoint.load_policy(path, rank.policy)
    return rank.train(BATCHES[3:6])


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, pytest.param({"dp": 2}, marks=SLOW)], ids=str)
def test_the_policy_loads_at_other_parallel_sizes(sizes, model, tmp_path):
    (before,) = run_ranks(train_and_save, config(), model, tmp_path, 0, 3, False)
    ((_, path),) = checkpoint.checkpoints(tmp_path)
    (expected,) = run_ranks(restored, config(), model, path)
    ranks = run_ranks(restored, config(**sizes), model, path, **sizes)
    assert before.rates[-1] != expected.rates[0]
    assert ranks[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert ranks[0].norms == pytest.approx(expected.norms, rel=1e-5)
    assert ranks[0].rates == expected.rates
    tiny.assert_same_weights(tiny.whole([r.weights[-1] for r in ranks]), expected.weights[-1], 1e-5)


def test_a_model_split_in_training_loads_on_one_rank(model, tmp_path):
    sizes = {"tp": 2, "pp": 2}
    run_ranks(train_and_save, config(**sizes), model, tmp_path, 0, 3, False, **sizes)
    ((_, path),) = checkpoint.checkpoints(tmp_path)
    split = run_ranks(restored, config(**sizes), model, path, **sizes)
    (one,) = run_ranks(restored, config(), model, path)
    assert one.losses == pytest.approx(split[0].losses, rel=1e-5)
    tiny.assert_same_weights(one.weights[-1], tiny.whole([r.weights[-1] for r in split]), 1e-5)


def test_shards_come_back_with_their_ledgers(model, tmp_path):
    def save(groups):
        rank = tiny.Rank(groups, config(dp=2), model)
        shard = shard_with(3 + groups.dp_rank, seed=groups.dp_rank)
        checkpoint.save(tmp_path, rank.policy, shard, run_state(4, data_parallel=2), groups, keep=1)
        return shard.counts(), shard.state_arrays()

    def load(groups):
        rank = tiny.Rank(groups, config(dp=2), model)
        shard = ReplayShard(100, 10)
        state = checkpoint.load(tmp_path / "step-00000004", rank.policy, shard, groups)
        assert state == run_state(4, data_parallel=2)
        return shard.counts(), shard.state_arrays()

    saved, loaded = run_ranks(save, dp=2), run_ranks(load, dp=2)
    assert saved[0][0].trained == 3 and saved[0][0] != saved[1][0]
    for (counts, arrays), (counts_again, arrays_again) in zip(saved, loaded, strict=True):
        assert counts == counts_again
        assert arrays.keys() == arrays_again.keys()
        for name in arrays:
            np.testing.assert_array_equal(arrays[name], arrays_again[name])


def test_another_number_of_replicas_is_refused_in_one_line_on_every_rank(model, tmp_path):
    run_ranks(train_and_save, config(), model, tmp_path, 0, 1, False)

    def load(groups):
        rank = tiny.Rank(groups, config(dp=2), model)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(tmp_path / "step-00000001", rank.policy, None, groups)
        return str(caught.value)

    for message in run_ranks(load, dp=2):
        assert "\n" not in message
        assert "1 data-parallel replicas; trainer.data_parallel is 2: resume with 1" in message


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


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, pytest.param({"dp": 2}, marks=SLOW)], ids=str)
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
            ReplayShard.state_arrays = fail

    messages = run_ranks(save_twice, model, tmp_path, break_it, {"dp": 2}, dp=2)
    assert "rank 1: [Errno 28] No space left on device" in messages[0]
    check_spoiled(messages, tmp_path, model, {"dp": 2})


def test_a_folder_that_cannot_be_made_fails_on_every_rank(model, tmp_path):
    path = tmp_path / "checkpoints"

    def body(groups):
        rank = tiny.Rank(groups, config(pp=2), model)
        if groups.rank == 0:
            path.write_text("a file is in the way")
        torch.distributed.barrier(group=groups.world)
        with pytest.raises(CheckpointError, match=r"cannot save step 3 in .*: rank 0: "):
            checkpoint.save(path, rank.policy, None, run_state(3), groups, keep=1)

    run_ranks(body, pp=2)


def test_a_save_leaves_no_process_behind(model, tmp_path):
    """A signal to all processes of a job must not take away what the last save needs."""

    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        checkpoint.save(tmp_path, rank.policy, None, run_state(1), groups, keep=2)
        children = psutil.Process().children(recursive=True)
        return [child.cmdline() for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    assert run_ranks(body) == [[]]


def test_a_second_signal_during_a_save_changes_nothing(model, tmp_path):
    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        seen = []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        pid, stop = os.getpid(), threading.Event()

        def shower():
            while not stop.wait(0.002):
                for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()

        thread = threading.Thread(target=shower)
        thread.start()
        checkpoint.save(tmp_path, rank.policy, None, run_state(1), groups, keep=2)
        stop.set()
        thread.join()
        checkpoint.load(tmp_path / "step-00000001", rank.policy, None, groups)
        return len(seen)

    assert run_ranks(body)[0] > 0


def test_only_complete_checkpoints_count_and_the_oldest_leave(model, tmp_path):
    def body(groups):
        rank = tiny.Rank(groups, config(), model)
        for step in (1, 2, 3, 10):
            checkpoint.save(tmp_path, rank.policy, None, run_state(step), groups, keep=2)

    run_ranks(body)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".step-00000011.partial")
    (tmp_path / "step-0000012.old").mkdir()
    assert checkpoint.checkpoints(tmp_path) == [
        (3, tmp_path / "step-00000003"),
        (10, tmp_path / "step-00000010"),
    ]
    assert checkpoint.checkpoints(tmp_path / "no such folder") == []


def test_a_leftover_of_a_killed_save_is_no_obstacle(model, tmp_path):
    (tmp_path / ".step-00000003.partial" / "model").mkdir(parents=True)
    (tmp_path / ".step-00000003.partial" / "model" / "junk").write_text("junk")
    run_ranks(train_and_save, config(), model, tmp_path, 0, 3, False)
    ((step, path),) = checkpoint.checkpoints(tmp_path)
    assert step == 3 and not (path / "model" / "junk").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", [None, b"{", b'{"step": 1}'])
def test_an_unreadable_state_is_one_line_that_says_what_to_do(content, tmp_path):
    path = tmp_path / "step-00000001"
    path.mkdir()
    if content is not None:
        (path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_state(path)
    assert "\n" not in str(caught.value) and f"remove {path} to resume earlier" in str(caught.value)
