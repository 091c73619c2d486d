"""A shard and its log: what is acknowledged is on disk, what is taken in is in memory, and a restart has both.

``replay/0000/shard-0-of-2/`` of the run folder is the log of one shard of the first generation. A run that goes on with
another number of shards begins a new generation, into whose logs each shard writes what it holds; a generation is
deleted when no checkpoint refers to it.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import xxhash

from tba_megatron.buffer.segment_files import Damage, Record, segment_path
from tba_megatron.buffer.segments import SegmentLog, read_log, warn_of_damage
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.shard_state import Columns, SavedShard, check_format, restore, to_columns
from tba_megatron.errors import CheckpointError
from tba_megatron.rollout_batch import RolloutBatch, decode, encode
from tba_megatron.types import LogPosition

_log = logging.getLogger(__name__)

REPLAY = "replay"  # the folder of all logs, in the run folder
_REWRITTEN = ""  # the sender of records that hold what came from another generation
_GROUPS_A_RECORD = 64  # of those
_NAME = re.compile(r"shard-(\d+)-of-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Logs of one number of shards."""

    number: int
    n_shards: int

    def folder(self, replay: Path, index: int) -> Path:
        return replay / f"{self.number:04d}" / f"shard-{index}-of-{self.n_shards}"


def generations(replay: Path) -> list[Generation]:
    """What lies in the folder ``replay``, oldest first."""
    found = []
    for path in sorted(replay.glob("[0-9]" * 4)):
        names = [match for match in map(_NAME.fullmatch, (p.name for p in path.iterdir())) if match]
        if names:
            found.append(Generation(number=int(path.name), n_shards=int(names[0][2])))
    return found


def remove_generations(replay: Path, checkpoints: Sequence[Path]) -> None:
    """Deletes the generations that no checkpoint needs; by one rank, while nobody saves."""
    needed = []
    for file in (file for path in checkpoints for file in path.glob("shard-*.npz")):
        columns = _saved(file, "log")
        if columns is None:
            return
        needed.append(_first_generation(columns))
    for generation in generations(replay):
        if needed and generation.number < min(needed):
            shutil.rmtree(replay / f"{generation.number:04d}", ignore_errors=True)


class StoredShard:
    """The shard with the number ``index`` of ``n_shards``. Without ``replay`` (a folder) it has no log.

    ``owns`` tells which prompts are its own. ``restore`` comes first, then ``log`` is open.
    """

    def __init__(
        self,
        shard: ReplayShard,
        *,
        replay: Path | None = None,
        segment_bytes: int = 64 << 20,
        index: int = 0,
        n_shards: int = 1,
        owns: Callable[[str], bool] = lambda prompt_id: True,
    ) -> None:
        self.shard = shard
        self.log: SegmentLog | None = None
        self.delivered: dict[str, int] = {}  # by sender: messages taken in
        self._replay, self._segment_bytes = replay, segment_bytes
        self._index, self._n_shards, self._owns = index, n_shards, owns
        # Of the log; without one, the newest of those that were there, which have nothing that is not held.
        self._generation = Generation(number=-1, n_shards=n_shards)
        self._position = LogPosition(0, 0)  # the end of the last record that was taken in
        self._told: set[Path] = set()  # damaged files of which the user knows
        self._saving: set[int] = set()  # segments that the last columns refer to

    # ---- what comes in

    def take(self, batch: RolloutBatch, sender: str, sequence: int, end: LogPosition | None) -> None:
        """An arrival: ``end`` is where its record ends in the log."""
        self.shard.add(batch, segment=end.segment if end else -1)
        self.delivered[sender] = sequence + 1
        self._position = end or self._position

    @property
    def segment(self) -> int:
        """Of the log, in which the last record that was taken in lies."""
        return self._position.segment

    # ---- at rest

    def state_columns(self) -> Columns:
        """For ``np.savez``; with tokens and log-probs only where no log has them."""
        columns = to_columns(self.shard, with_payload=self.log is None)
        columns["delivered"] = np.frombuffer(json.dumps(self.delivered).encode(), np.uint8)
        place = [self._generation.number, self._generation.n_shards, self._position.segment, self._position.offset]
        columns["log"] = np.array([*place, self.log is not None], np.int64)
        self._saving = self.shard.segments() | {self._position.segment}
        return columns

    def sync(self) -> None:
        """What was acknowledged is safe on the disk; from any thread."""
        if self.log is not None:
            self.log.sync()

    def restore(
        self,
        parts: Mapping[int, Mapping[str, npt.NDArray[Any]]],
        found: Sequence[Generation],
        *,
        read_only: bool = False,
    ) -> None:
        """Becomes the shard of a checkpoint and of what was acknowledged after it, and opens the log.

        ``parts``: the columns of the checkpoint's shards by index: this shard's own, or those of all where their number
        differs from ``n_shards``; none without a checkpoint. ``found``: the generations on disk, the same for each.
        ``read_only`` leaves the logs as they are, which another process may be writing, and opens none. Each damaged
        file is told in one line.
        """
        self._told = set()
        for columns in parts.values():
            check_format(columns)
        first = {index: _first_generation(columns["log"]) for index, columns in parts.items()}
        later = [g for g in found if self._has_some(g) and g.number >= min(first.values(), default=0)]
        goes_on = not read_only and self._go_on(later, parts)
        self.shard.clear()
        self.delivered = {}
        if parts:
            self._restore_checkpoint(parts)
        for generation in later:
            rewritten = not parts and generation is later[0]
            for index in self._indices(generation):
                # A shard whose log was damaged has begun a generation that others may not have.
                if generation.number >= first.get(index, max(first.values(), default=0)):
                    self._take_tail(generation, index, parts.get(index), rewritten=rewritten, goes_on=goes_on)
        numbers = [generation.number for generation in found] + [_generation(c["log"]).number for c in parts.values()]
        if goes_on and self.log is not None:
            self._position = self.log.end
        elif self._replay is not None and not read_only:
            new = Generation(number=max(numbers, default=-1) + 1, n_shards=self._n_shards)
            self._begin_generation(self._replay, new)
        else:
            self._generation = Generation(number=max(numbers, default=-1), n_shards=self._n_shards)

    def _has_some(self, generation: Generation) -> bool:
        """Whether there is a log of ``generation`` with prompts of this shard."""
        replay = self._replay
        return replay is not None and any(generation.folder(replay, i).is_dir() for i in self._indices(generation))

    def _restore_checkpoint(self, parts: Mapping[int, Mapping[str, npt.NDArray[Any]]]) -> None:
        sources = [
            SavedShard(columns=columns, records=self._saved_records(index, columns))
            for index, columns in sorted(parts.items())
        ]
        as_many = all(_generation(columns["log"]).n_shards == self._n_shards for columns in parts.values())
        lost = restore(self.shard, sources, self._owns, keeps_rest=as_many or self._index == 0)
        if lost:
            _log.warning(
                "%d rollouts of the checkpoint are in no log; those that were not trained on count as never received",
                lost,
            )
        if as_many:
            self.delivered = _delivered(parts[self._index])

    def _go_on(self, later: Sequence[Generation], parts: Mapping[int, Mapping[str, npt.NDArray[Any]]]) -> bool:
        """Opens the newest log if it can be gone on with: of this number of shards, and whole up to the checkpoint."""
        if self._replay is None or len(later) != 1 or later[0].n_shards != self._n_shards:
            return False
        if parts and not _in_log(parts[self._index], later[0]):
            return False
        self._generation = later[0]
        folder = later[0].folder(self._replay, self._index)
        log = SegmentLog(folder, self._segment_bytes)
        if parts and log.end < _position(parts[self._index]):
            log.close()  # what came after its end would be taken for what was there before
            if log.cut_bytes:
                self._told.add(segment_path(folder, log.end.segment))
            return False
        self.log = log
        return True

    def _indices(self, generation: Generation) -> Sequence[int]:
        """The shards of ``generation`` that may hold prompts of this one."""
        return [self._index] if generation.n_shards == self._n_shards else range(generation.n_shards)

    def _saved_records(self, index: int, columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[int, RolloutBatch]]:
        generation = _generation(columns["log"])
        for record in self._records(generation, index, LogPosition(0, 0), _position(columns)):
            yield record.end.segment, self._decoded(generation, record)

    def _take_tail(
        self,
        generation: Generation,
        index: int,
        columns: Mapping[str, npt.NDArray[Any]] | None,
        *,
        rewritten: bool,
        goes_on: bool,
    ) -> None:
        """What one log has beyond the ``columns`` of its shard comes in as it did before.

        Records of an older generation's rollouts count only where nothing else has them (``rewritten``).
        """
        as_many = generation.n_shards == self._n_shards
        start, delivered = LogPosition(0, 0), self.delivered if as_many else {}
        if columns is not None and _in_log(columns, generation):
            start, delivered = _position(columns), delivered if as_many else _delivered(columns)
        for record in self._records(generation, index, start, self.log.end if goes_on and self.log else None):
            if record.sender == _REWRITTEN:
                if not rewritten:
                    continue
            # It may be there twice, if its write was interrupted between its end and its acknowledgement.
            elif record.sequence < delivered.get(record.sender, 0):
                continue
            else:
                delivered[record.sender] = record.sequence + 1
            batch = self._decoded(generation, record)
            if not as_many:
                batch = batch.select([g for g, prompt_id in enumerate(batch.prompt_ids) if self._owns(prompt_id)])
            self.shard.add(batch, segment=record.end.segment if goes_on else -1)

    def _records(
        self, generation: Generation, index: int, start: LogPosition, end: LogPosition | None
    ) -> Iterator[Record]:
        """Of one log of a shard that has one; a log that is not there has none."""
        if self._replay is None:
            return
        folder = generation.folder(self._replay, index)
        if folder.is_dir():
            yield from read_log(folder, start, end, on_damage=self._tell)
        elif max(start, end or start) > LogPosition(0, 0) and folder not in self._told:
            self._told.add(folder)
            _log.warning("%s is missing; what the checkpoint has in it is lost", folder)

    def _tell(self, damage: Damage) -> None:
        if damage.path not in self._told:
            self._told.add(damage.path)
            warn_of_damage(damage)

    def _decoded(self, generation: Generation, record: Record) -> RolloutBatch:
        try:
            return decode(record.payload)
        except ValueError as error:
            raise CheckpointError(
                f"generation {generation.number} of the logs in {self._replay} was written by another version of this "
                f"program ({error}); remove it"
            ) from None

    def _begin_generation(self, replay: Path, generation: Generation) -> None:
        """A log of its own that holds what the shard holds."""
        self._generation = generation
        self.log = SegmentLog(generation.folder(replay, self._index), self._segment_bytes)
        prompts = self.shard.prompts.all_numbers()
        for sequence, first in enumerate(range(0, len(prompts), _GROUPS_A_RECORD)):
            some = prompts[first : first + _GROUPS_A_RECORD]
            rows, sizes = self.shard.rows_of(some)
            batch = self.shard.batch(some, sizes, rows, self.shard.rows.copies[rows])
            payload = encode(batch.with_start_reference())  # a run that begins anew reads it without any checkpoint
            end = self.log.append(_REWRITTEN, sequence, payload, xxhash.xxh3_64_intdigest(payload))
            self.shard.set_segment(rows, end.segment)
        self._position = self.log.end

    # ---- old segments

    def reclaim(self, checkpoints: Sequence[Path]) -> int:
        """Deletes the segments that neither the shard nor one of the ``checkpoints`` needs; how many."""
        if self.log is None:
            return 0
        needed = self.shard.segments() | self._saving
        needed |= {segment for segment in self.log.segments() if segment >= self._position.segment}
        for path in checkpoints:
            file = path / f"shard-{self._index}.npz"
            if not file.exists():
                continue
            log, segments = _saved(file, "log"), _saved(file, "segments")
            if log is None or segments is None:
                return 0
            if _generation(log) == self._generation:
                needed |= {_position({"log": log}).segment, *segments.tolist()}
        return self.log.reclaim(needed)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def _generation(log: npt.NDArray[Any]) -> Generation:
    number, n_shards, *_ = log.tolist()
    return Generation(number=number, n_shards=n_shards)


def _first_generation(log: npt.NDArray[Any]) -> int:
    """The first whose records may be missing from the checkpoint of a shard."""
    number, _, _, _, has_log = log.tolist()
    return number if has_log else number + 1


def _in_log(columns: Mapping[str, npt.NDArray[Any]], generation: Generation) -> bool:
    """Whether the position of the checkpoint is one in the logs of ``generation``."""
    return _generation(columns["log"]) == generation and _first_generation(columns["log"]) == generation.number


def _position(columns: Mapping[str, npt.NDArray[Any]]) -> LogPosition:
    _, _, segment, offset, _ = columns["log"].tolist()
    return LogPosition(segment, offset)


def _delivered(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    return json.loads(columns["delivered"].tobytes())


def _saved(file: Path, name: str) -> npt.NDArray[Any] | None:
    """One column of a checkpoint; None, with a line in the log, where it cannot be read."""
    try:
        with np.load(file, allow_pickle=False) as columns:
            return columns[name]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        _log.warning("%s cannot be read (%s); no old rollouts are deleted from the disk while it is there", file, error)
        return None
