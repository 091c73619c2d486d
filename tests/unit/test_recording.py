"""A recording gives back what was recorded, and says what is missing."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace

import pytest
import tiny
from ranks import run_ranks

from tba_megatron.errors import CheckpointError
from tba_megatron.rollout_batch import RolloutBatch, encode
from tba_megatron.trainer import recording
from tba_megatron.trainer.recording import Recorder, Recording

STEPS = {step: tiny.train_groups(3, seed=step) for step in range(1, 6)}


def as_bytes(groups):
    return encode(RolloutBatch.of_train_groups(groups))


def record(folder, steps, *, first_step=1, replica=0, replicas=1):
    recorder = Recorder(folder, replica, replicas, first_step)
    for step in steps:
        recorder.write(step, RolloutBatch.of_train_groups(STEPS[step]))
    recorder.close()


def recorded(folder, step):
    return as_bytes(Recording(folder).groups(step))


def test_what_was_recorded_is_read_again_in_any_order(tmp_path):
    record(tmp_path, STEPS)
    assert Recording(tmp_path).n_steps == 5
    for step in (4, 1, 5, 2, 3):
        assert recorded(tmp_path, step) == as_bytes(STEPS[step])


def test_the_parts_of_all_replicas_are_one_step(tmp_path):
    for replica in range(2):
        record(tmp_path, [1], replica=replica, replicas=2)
    assert recorded(tmp_path, 1) == as_bytes(STEPS[1] + STEPS[1])


def test_reference_logprobs_are_not_recorded(tmp_path):
    group = STEPS[1][0]
    known = replace(
        group, rollouts=tuple(replace(r, reference_logprob=-1.0, reference_version=0) for r in group.rollouts)
    )
    recorder = Recorder(tmp_path, 0, 1, 1)
    recorder.write(1, RolloutBatch.of_train_groups([known]))
    recorder.close()
    assert recorded(tmp_path, 1) == as_bytes([group])


def test_a_resumed_run_records_over_the_steps_of_the_branch_that_was_abandoned(tmp_path):
    record(tmp_path, [1, 2, 3, 4])
    recorder = Recorder(tmp_path, 0, 1, 3)
    recorder.write(3, RolloutBatch.of_train_groups(STEPS[5]))
    recorder.close()
    assert Recording(tmp_path).n_steps == 3
    assert recorded(tmp_path, 2) == as_bytes(STEPS[2])
    assert recorded(tmp_path, 3) == as_bytes(STEPS[5])


def test_a_run_that_goes_on_with_fewer_replicas_leaves_nothing_of_the_abandoned_steps(tmp_path):
    for replica in range(3):
        record(tmp_path, [1, 2, 3], replica=replica, replicas=3)
    record(tmp_path, [2, 3], first_step=2)
    assert recorded(tmp_path, 1) == as_bytes(STEPS[1] * 3)
    assert [recorded(tmp_path, step) for step in (2, 3)] == [as_bytes(STEPS[step]) for step in (2, 3)]


def test_parts_that_disagree_about_how_many_there_are_are_one_line(tmp_path):
    record(tmp_path, [1], replica=0, replicas=1)
    record(tmp_path, [1], replica=1, replicas=2)
    with pytest.raises(CheckpointError, match="has 2 of 1 or 2 parts of step 1"):
        Recording(tmp_path).groups(1)


def test_a_header_that_promises_more_than_there_is_ends_the_recording(tmp_path):
    record(tmp_path, [1])
    with (tmp_path / "dp-0.groups").open("ab") as stream:
        stream.write((2**62).to_bytes(8, "little") * 2)
    (tmp_path / "dp-x.groups").write_text("nobody wrote this")
    assert Recording(tmp_path).n_steps == 1


def test_a_full_disk_is_one_line_and_leaves_a_recording_that_can_be_read(tmp_path):
    def body(groups):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3500, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(CheckpointError, match=r"dp-0\.groups cannot be written \(") as caught:
            record(tmp_path, STEPS)
        return str(caught.value)

    (message,) = run_ranks(body)
    assert "\n" not in message
    n_steps = Recording(tmp_path).n_steps
    assert 0 < n_steps < 5
    assert recorded(tmp_path, n_steps) == as_bytes(STEPS[n_steps])


@pytest.mark.parametrize("cut", [1, 20])
def test_a_tail_that_a_crash_cut_short_is_left_out_and_written_over(cut, tmp_path):
    record(tmp_path, [1, 2])
    path = tmp_path / "dp-0.groups"
    path.write_bytes(path.read_bytes()[:-cut])
    assert Recording(tmp_path).n_steps == 1
    record(tmp_path, [2, 3], first_step=2)
    assert [recorded(tmp_path, step) for step in (1, 2, 3)] == [as_bytes(STEPS[step]) for step in (1, 2, 3)]


def test_a_flipped_bit_ends_the_recording_there(tmp_path):
    record(tmp_path, [1])
    size = (tmp_path / "dp-0.groups").stat().st_size
    record(tmp_path, [2, 3], first_step=2)
    data = bytearray((tmp_path / "dp-0.groups").read_bytes())
    data[size + 40] ^= 1
    (tmp_path / "dp-0.groups").write_bytes(data)
    assert Recording(tmp_path).n_steps == 1


def test_a_missing_part_or_step_is_one_line(tmp_path):
    record(tmp_path, [1, 2], replica=0, replicas=2)
    record(tmp_path, [1], replica=1, replicas=2)
    for step, words in ((2, "has 1 of 2 parts of step 2"), (7, "of step 7 (it holds 2 whole steps)")):
        with pytest.raises(CheckpointError) as caught:
            Recording(tmp_path).groups(step)
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_recording_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="holds no recording; give the folder"):
        Recording(tmp_path)


def test_a_recording_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "recording").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"dp-0\.groups cannot be written .*set trainer\.data\.record to false"):
        Recorder(tmp_path / "recording", 0, 1, 1)


def test_a_recording_of_another_version_of_the_program_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "encode", lambda batch: b"something else")
    record(tmp_path, [1])
    with pytest.raises(CheckpointError, match="was written by another version of this program"):
        Recording(tmp_path).groups(1)
