"""A save beside training writes the state of the step at which it began, and its failures reach every rank."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import tiny
import torch
from ranks import run_ranks
from test_checkpoint import BATCHES, SLOW, config, run_state, shard_with

from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard
from tba_megatron.errors import CheckpointError
from tba_megatron.trainer import checkpoint, checkpoint_writer
from tba_megatron.trainer.checkpoint import CheckpointWriter


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True, layers=2, seed=1)


class Gate:
    """Holds the threads of this rank's saves until it is opened; may let them fail then."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._open, self._write, self._error = threading.Event(), checkpoint_writer._write, error
        checkpoint_writer._write = self._wait_and_write  # in this rank's process only

    def _wait_and_write(self, *args):
        assert self._open.wait(60)
        if self._error is not None:
            raise self._error
        return self._write(*args)

    def open(self) -> None:
        self._open.set()


def contents(groups, path):
    """Every tensor of the checkpoint ``path``, whole, and what is in its other files."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    model = path / "model"
    tensors = {name: v for name, v in load_plain_tensors(str(model)).items() if isinstance(v, torch.Tensor)}
    shards = {file.name: dict(np.load(file)) for file in path.glob("shard-*.npz")}
    return tensors, torch.load(model / "common.pt"), checkpoint.read_state(path), shards


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({}, "bfloat16"),
        *(
            pytest.param(sizes, dtype, marks=SLOW)
            for sizes, dtype in (
                ({}, "float32"),
                ({"pp": 2}, "bfloat16"),
                ({"tp": 2}, "float32"),
                ({"dp": 2}, "float32"),
                ({"dp": 2}, "bfloat16"),
            )
        ),
    ],
    ids=str,
)
def test_what_is_written_is_the_state_at_begin_whatever_happens_meanwhile(sizes, dtype, model, tmp_path):
    at_once, beside = tmp_path / "at once", tmp_path / "beside"

    def save(groups):
        rank = tiny.Rank(groups, config(dtype=dtype, **sizes), model)
        rank.train(BATCHES[:3])
        shard = shard_with(3) if groups.is_leader else None
        state = run_state(3, data_parallel=groups.dp_size)
        CheckpointWriter(at_once, groups, 2).save(rank.policy, shard, state)
        gate, writer = Gate(), CheckpointWriter(beside, groups, 2)
        writer.begin(rank.policy, shard, state)
        before = rank.weights()
        rank.train(BATCHES[3:])
        after = rank.weights()
        assert all((after[name] != value).any() for name, value in before.items())
        if shard:
            shard.shard.mark_trained(shard.shard.rows.living())
        assert checkpoint.checkpoints(beside) == []  # nothing counts before every rank has written
        gate.open()
        assert writer.finish() == beside / "step-00000003"

    run_ranks(save, **sizes)
    ((expected, found),) = run_ranks(
        lambda groups: [contents(groups, path / "step-00000003") for path in (at_once, beside)]
    )
    assert len(expected[0]) > 20 and any(name.startswith("optimizer.state.exp_avg_sq.") for name in expected[0])
    assert found[0].keys() == expected[0].keys()
    assert [name for name, value in expected[0].items() if not torch.equal(found[0][name], value)] == []
    assert found[1:3] == expected[1:3]
    assert found[3].keys() == expected[3].keys() == {f"shard-{i}.npz" for i in range(sizes.get("dp", 1))}
    for name, shard in expected[3].items():
        for column, values in shard.items():
            np.testing.assert_array_equal(found[3][name][column], values)


def test_one_save_at_a_time_and_everybody_can_ask_whether_it_is_done(model, tmp_path):
    def body(groups):
        rank, gate = tiny.Rank(groups, config(pp=2), model), Gate()
        writer = CheckpointWriter(tmp_path, groups, 2)
        assert writer.done and not writer.in_flight and writer.finish() is None
        writer.begin(rank.policy, None, run_state(1))
        assert writer.in_flight and not writer.done
        gate.open()
        writer.begin(rank.policy, None, run_state(2))  # finishes the first
        assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [1]
        assert writer.finish() == tmp_path / "step-00000002"
        assert writer.done and not writer.in_flight and writer.finish() is None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("save-checkpoint")]

    run_ranks(body, pp=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@SLOW
def test_a_disk_that_is_slower_than_the_timeout_of_collectives_is_waited_for(model, tmp_path):
    def body(groups):
        impatient = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=5))
        rank, gate = tiny.Rank(groups, config(pp=2), model), Gate()
        writer = CheckpointWriter(tmp_path, replace(groups, world=impatient), 2)
        writer.begin(rank.policy, None, run_state(1))
        threading.Timer(8.0 * groups.rank, gate.open).start()
        writer.finish()

    run_ranks(body, pp=2)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (TypeError("what no disk\ncan cause"), "TypeError: what no disk"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_fault_in_the_thread_of_one_rank_is_an_error_on_all_and_the_next_save_works(error, reason, model, tmp_path):
    def body(groups):
        rank = tiny.Rank(groups, config(pp=2), model)
        writer = CheckpointWriter(tmp_path, groups, 2)
        writer.save(rank.policy, None, run_state(1))
        write = checkpoint_writer._write
        gate = Gate(error if groups.rank == 1 else None)
        writer.begin(rank.policy, None, run_state(2))
        gate.open()
        rank.train(BATCHES[:1])  # who trains on learns of it at the end of the save
        with pytest.raises(CheckpointError) as caught:
            writer.finish()
        assert writer.done and not writer.in_flight
        left = sorted(path.name for path in tmp_path.iterdir())
        checkpoint_writer._write = write
        writer.save(rank.policy, None, run_state(3))
        return str(caught.value), left

    (message, left), (message_1, _) = run_ranks(body, pp=2)
    assert message == message_1 == f"cannot save step 2 in {tmp_path}: {reason} (rank 1)"
    assert left == ["step-00000001"]
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [1, 3]


def test_a_fault_of_one_rank_before_the_thread_starts_is_an_error_on_all(model, tmp_path):
    def body(groups):
        rank = tiny.Rank(groups, config(pp=2), model)
        writer = CheckpointWriter(tmp_path, groups, 2)
        shard = StoredShard(ReplayShard(1, 1)) if groups.is_leader else None
        if shard is not None:
            shard.state_columns = lambda: {}["no such column"]
        with pytest.raises(CheckpointError) as caught:
            writer.begin(rank.policy, shard, run_state(2))
        assert writer.done and not writer.in_flight
        return str(caught.value)

    messages = run_ranks(body, pp=2)
    assert messages == [f"cannot save step 2 in {tmp_path}: KeyError: 'no such column' (rank 1)"] * 2
    assert list(tmp_path.iterdir()) == []
