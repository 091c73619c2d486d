"""What a shard acknowledged, on disk: an append-only log of records in numbered files, the segments.

``SegmentLog`` writes, ``read_log`` reads; ``segment_files.py`` knows the bytes. A record never spans files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

from tba_megatron.buffer.segment_files import (
    ALIGNED,
    FILE_HEAD_BYTES,
    Damage,
    Record,
    SegmentFile,
    cannot,
    file_fault,
    file_head,
    record_head,
    records,
    segment_numbers,
    segment_path,
    sync_file,
    sync_folder,
    write_all,
)
from tba_megatron.errors import CheckpointError
from tba_megatron.types import LogPosition

_log = logging.getLogger(__name__)


def warn_of_damage(damage: Damage) -> None:
    """One line in the log."""
    _log.warning("%s", damage)


class SegmentLog:
    """Appends records to the segments of a folder, which it holds alone: a second log there is a CheckpointError.

    Any thread may call any method. A forked child may only ``close`` it; until it does or ends, the folder stays held.
    ``cut_bytes``: bytes after the last whole record that opening removed; what a killed process was about to append.
    No method loses records that were appended before: after a CheckpointError they can be read, and the folder opened
    again.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        """Append after the last whole record in ``folder``, which is made where it is missing.

        A segment that has reached ``segment_bytes`` is sealed; one of a single record may be larger.
        """
        self.cut_bytes = 0
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of everything below; never held while the disk is waited for
        self._syncing = threading.Lock()  # one sync at a time, taken first; it keeps files from being reclaimed
        self._failure = ""  # why nothing can be appended any more
        self._unsynced: set[int] = set()  # sealed segments that may not be safe on the disk
        try:
            with ExitStack() as undo:
                folder.mkdir(parents=True, exist_ok=True)
                self._held = _hold(folder)
                undo.callback(os.close, self._held)
                self._numbers = segment_numbers(folder)
                if self._numbers:
                    self._reopen(self._numbers[-1])
                else:
                    self._create(0)
                undo.callback(os.close, self._fd)
                # A process that was killed may have synced neither its files nor their names.
                self._unsynced.update(self._numbers[:-1])
                sync_folder(folder)
                undo.pop_all()
        except OSError as error:
            raise cannot("opened", folder, error) from error

    @property
    def end(self) -> LogPosition:
        """After the last record."""
        return self._end

    def segments(self) -> list[int]:
        """The numbers of all segments, ascending; the last is the one that is written."""
        with self._lock:
            return list(self._numbers)

    def append(self, sender: str, sequence: int, payload: bytes | bytearray | memoryview, checksum: int) -> LogPosition:
        """Write a record to the operating system; where it ends.

        ``checksum``, the xxh3_64 of ``payload``, is taken on trust: a wrong one makes this record, and those after it
        in its segment, damage. CheckpointError when the record cannot be written whole: then none of it is.
        """
        body = memoryview(payload).cast("B")
        with self._lock:
            self._check_usable()
            try:
                if self._end.offset >= self._segment_bytes:
                    self._seal()
                head = record_head(self._end, sender.encode(), sequence, len(body), checksum)
                self._write([head, body, bytes(-len(body) % ALIGNED)])
            except OSError as error:
                raise cannot("written", self._path(self._end.segment), error) from error
            return self._end

    def sync(self) -> None:
        """Return when every record that was appended before is safe on the disk; appends go on meanwhile."""
        self._check_process()
        with self._syncing:
            with self._lock:
                self._check_usable()
                sealed, current = sorted(self._unsynced), self._end.segment
            for number in [*sealed, current]:
                try:
                    sync_file(self._path(number))
                except OSError as error:
                    # The kernel tells of a failed write-back once: a second try would succeed and prove nothing.
                    failure = cannot("written to the disk", self._path(number), error)
                    with self._lock:
                        self._failure = str(failure)
                    raise failure from error
            with self._lock:
                self._unsynced.difference_update(sealed)

    def reclaim(self, live: Container[int]) -> int:
        """Delete the sealed segments that are not in ``live``; how many. It waits for a ``sync`` that runs.

        ``live`` has to hold the segments of all positions that reading shall begin or end at.
        """
        self._check_process()
        reclaimed = 0
        with self._syncing, self._lock:
            self._check_usable()
            for number in [n for n in self._numbers[:-1] if n not in live]:
                try:
                    self._path(number).unlink(missing_ok=True)
                except OSError as error:
                    raise cannot("deleted", self._path(number), error) from error
                self._numbers.remove(number)
                self._unsynced.discard(number)
                reclaimed += 1
        return reclaimed

    def close(self) -> None:
        """Release the folder; what was not synced is left to the operating system. Harmless when repeated."""
        if os.getpid() == self._pid:
            with self._syncing, self._lock:
                self._close()
        else:  # a thread that the fork left behind may have held the locks
            self._close()

    def _close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as error:
            raise cannot("written", self._path(self._end.segment), error) from error
        finally:
            os.close(self._held)

    def _path(self, segment: int) -> Path:
        return segment_path(self._folder, segment)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"the log in {self._folder} belongs to process {self._pid}, which forked this one")

    def _check_usable(self) -> None:
        self._check_process()
        if self._fd < 0:
            raise RuntimeError(f"the log in {self._folder} is closed")
        if self._failure:
            raise CheckpointError(self._failure)

    def _write(self, parts: list[bytes | memoryview]) -> None:
        """Append ``parts`` and move the end, or, whatever interrupts, neither."""
        size = sum(map(len, parts))
        after = LogPosition(self._end.segment, self._end.offset + size)
        try:
            write_all(self._fd, parts)
            self._end = after
        finally:
            if self._end is not after:
                self._cut_back()

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._fd, self._end.offset)
        except OSError as error:
            self._failure = str(cannot("cut back to its last whole record", self._path(self._end.segment), error))

    def _seal(self) -> None:
        full, sealed = self._fd, self._end.segment
        self._unsynced.add(sealed)
        self._create(sealed + 1)
        os.close(full)

    def _create(self, number: int) -> None:
        """Begin a new segment; a failure leaves nothing of it."""
        path = self._path(number)
        try:
            with ExitStack() as undo:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                undo.callback(os.unlink, path)
                undo.callback(os.close, fd)
                write_all(fd, [file_head()])
                sync_folder(self._folder)
                undo.pop_all()
        except OSError as error:
            raise cannot("begun", path, error) from error
        self._fd, self._end = fd, LogPosition(number, FILE_HEAD_BYTES)
        self._numbers.append(number)

    def _reopen(self, number: int) -> None:
        """Go on in a segment after its longest valid prefix; the rest is cut."""
        path = self._path(number)
        with ExitStack() as undo:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
            undo.callback(os.close, fd)
            file = SegmentFile(path=path, segment=number, fd=fd, size=os.fstat(fd).st_size)
            whole, reason = 0, file_fault(file)
            if not reason:
                whole = FILE_HEAD_BYTES
                for read in records(file, whole, file.size):
                    if isinstance(read, Record):
                        whole = read.end.offset
                    else:
                        reason = read
            self.cut_bytes = file.size - whole
            if self.cut_bytes:
                _log.warning("%s is cut at byte %d (%s): %d bytes removed", path, whole, reason, self.cut_bytes)
                os.ftruncate(fd, whole)
            if not whole:
                write_all(fd, [file_head()])
            undo.pop_all()
        self._fd, self._end = fd, LogPosition(number, whole or FILE_HEAD_BYTES)


def read_log(
    folder: Path,
    start: LogPosition = LogPosition(0, 0),  # noqa: B008 (frozen)
    end: LogPosition | None = None,
    *,
    on_damage: Callable[[Damage], None] = warn_of_damage,
) -> Iterator[Record]:
    """The records that begin at or after ``start`` and before ``end``, in order; nothing that a checksum denies.

    Damage ends its segment and is reported once; reading goes on with the next one. It is damage as well if ``start``
    is not a boundary between records, or if the log ends before ``start`` or ``end``. In a log that is written
    meanwhile, a record that is half written is reported, unless ``end`` comes before it. Segments that are missing
    in between have been reclaimed. Only the record that is yielded is in memory.

    CheckpointError for what the operating system refuses and for segments of another format.
    """
    try:
        numbers = segment_numbers(folder)
    except OSError as error:
        raise cannot("read", folder, error) from error
    if end is not None and end <= start:
        return
    last = max(numbers, default=0)
    wanted = {n for n in numbers if start.segment <= n and (end is None or n <= end.segment)}
    if start.offset or start.segment > last:
        wanted.add(start.segment)
    if end is not None and end.offset and end.segment > last:
        wanted.add(end.segment)
    for segment in sorted(wanted):
        first = start.offset if segment == start.segment else 0
        until = end.offset if end is not None and segment == end.segment else None
        try:
            damage = yield from _read_segment(segment_path(folder, segment), segment, first, until)
        except FileNotFoundError:
            if segment in numbers and not first and not until:
                continue  # reclaimed since the folder was listed
            lost = max(0, (until or 0) - first)
            damage = Damage(path=segment_path(folder, segment), offset=first, reason="no such file", bytes_lost=lost)
        if damage is not None:
            on_damage(damage)


def _read_segment(path: Path, segment: int, first: int, until: int | None) -> Generator[Record, None, Damage | None]:
    """Records that begin from byte ``first`` on (0: all) and before ``until`` (None: the end of the file).

    FileNotFoundError where there is no such segment: the caller knows whether that is damage.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        file = SegmentFile(path=path, segment=segment, fd=fd, size=os.fstat(fd).st_size)
        until = file.size if until is None else until
        offset, reason = 0, file_fault(file)
        if not reason:
            offset = first or FILE_HEAD_BYTES
            for read in records(file, offset, until):
                if isinstance(read, Record):
                    offset = read.end.offset
                    yield read
                else:
                    reason = read
        lost = max(0, until - max(offset, first))
        return Damage(path=path, offset=offset, reason=reason, bytes_lost=lost) if reason else None
    finally:
        os.close(fd)


def _hold(folder: Path) -> int:
    """A descriptor that keeps other logs out of ``folder`` while it, or a copy in a forked child, is open."""
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise
        raise CheckpointError(
            f"{folder} is in use: another trainer appends to it; stop that one, or choose another run.folder"
        ) from None
    return fd
