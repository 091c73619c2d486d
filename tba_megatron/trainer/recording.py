"""The recorded stream of train groups: what each step was trained on, so that another run can train on it again.

``recording/dp-0.groups`` of a run folder is what replica 0's shard gave to each step, one frame a step: length and
xxh3-64 of the payload, then the payload. Reference log-probs are left out: whoever trains on a recording asks its own
reference.
"""

from __future__ import annotations

import errno
import os
import struct
from itertools import count, takewhile
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from tba_megatron.errors import CheckpointError
from tba_megatron.rollout_batch import RolloutBatch, decode, encode
from tba_megatron.types import TrainGroup

FOLDER = "recording"
_HEADER = struct.Struct("<QQ")  # bytes of the payload, its checksum


class _Frame(msgspec.Struct, array_like=True):
    step: int
    replicas: int  # files that hold a part of this step
    groups: bytes  # an encoded RolloutBatch


_decoder = msgspec.msgpack.Decoder(_Frame)


class Recorder:
    """Appends one replica's groups of each step. Steps from ``first_step`` on that are already there are cut off:
    they belong to an attempt that was abandoned, which may have had more replicas. CheckpointError when a file cannot
    be written."""

    def __init__(self, folder: Path, replica: int, replicas: int, first_step: int) -> None:
        self._path, self._replicas = _file(folder, replica), replicas
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in [self._path, *(_files(folder)[replicas:] if replica == 0 else [])]:
                _cut(path, first_step)
            self._stream = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._cannot_write(error) from None

    def write(self, step: int, groups: RolloutBatch) -> None:
        payload = msgspec.msgpack.encode(
            _Frame(step=step, replicas=self._replicas, groups=encode(groups.without_reference()))
        )
        frame = _HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        try:
            if self._stream.write(frame) < len(frame):  # the rest of a disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._cannot_write(error) from None

    def close(self) -> None:
        self._stream.close()

    def _cannot_write(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path} cannot be written ({error.strerror or error}); make room, or set trainer.data.record to "
            f"false"
        )


class Recording:
    """Reads the steps of a recording. CheckpointError names the file and the step of what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths = _files(folder)
        if not self._paths:
            raise CheckpointError(
                f"{folder} holds no recording; give the folder that a run with trainer.data.record wrote"
            )
        self._frames = [{step: start for step, start, _ in _index(path)} for path in self._paths]

    @property
    def n_steps(self) -> int:
        """Steps from 1 on without a gap."""
        steps = set().union(*self._frames)
        return next(step for step in range(len(steps) + 1) if step + 1 not in steps)

    def groups(self, step: int) -> list[TrainGroup]:
        """The groups of ``step`` from all replicas, in the order of their files."""
        parts = [
            _frame_at(path, frames[step])
            for path, frames in zip(self._paths, self._frames, strict=True)
            if step in frames
        ]
        wanted = sorted({frame.replicas for frame in parts})
        if wanted != [len(parts)]:
            of = " or ".join(map(str, wanted)) or "an unknown number of"
            raise CheckpointError(
                f"{self._folder} has {len(parts)} of {of} parts of step {step} (it holds {self.n_steps} whole steps); "
                f"lower trainer.steps, or copy the folder again"
            )
        try:
            return [group for frame in parts for group in decode(frame.groups).train_groups()]
        except ValueError as error:
            raise CheckpointError(
                f"{self._folder} was written by another version of this program ({error}); record the run again"
            ) from None


def _file(folder: Path, replica: int) -> Path:
    return folder / f"dp-{replica}.groups"


def _files(folder: Path) -> list[Path]:
    """Those of replica 0, 1, ... without a gap."""
    return list(takewhile(Path.exists, (_file(folder, replica) for replica in count())))


def _cut(path: Path, first_step: int) -> None:
    """Leave the whole frames of steps before ``first_step``."""
    if path.exists():
        os.truncate(path, max((end for step, _, end in _index(path) if step < first_step), default=0))


def _index(path: Path) -> list[tuple[int, int, int]]:
    """(step, start, end) of the frames of a file up to the first that is not whole: a crash may have cut the last."""
    found: list[tuple[int, int, int]] = []
    if not path.exists():
        return found
    with path.open("rb") as stream:
        start = 0
        while (frame := _read(stream)) is not None:
            found.append((frame.step, start, stream.tell()))
            start = stream.tell()
    return found


def _frame_at(path: Path, start: int) -> _Frame:
    with path.open("rb") as stream:
        stream.seek(start)
        frame = _read(stream)
    if frame is None:
        raise CheckpointError(f"{path} has changed while it was read; copy the recording elsewhere first")
    return frame


def _read(stream: BinaryIO) -> _Frame | None:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    size, checksum = _HEADER.unpack(header)
    here = stream.tell()
    if size > stream.seek(0, os.SEEK_END) - here:
        return None
    stream.seek(here)
    payload = stream.read(size)
    if xxhash.xxh3_64_intdigest(payload) != checksum:
        return None
    return _decoder.decode(payload)
