"""One segment file of a shard's log: its bytes, and how to read, write and sync it.

    file:    "tba-seg\\n", format, checksum of both (24 bytes); records
    record:  "REC\\n", bytes of the sender, bytes of the payload, sequence, checksum of the payload,
             checksum of these and the sender (40 bytes); sender, payload, each with zeros up to a multiple of 8

Little-endian; checksums are xxh3_64. The checksum of a record's head is seeded with its position, so that no byte but
the first of a record is ever taken for one, whatever payloads hold. A record never spans files.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from tba_megatron.errors import CheckpointError
from tba_megatron.types import LogPosition

ALIGNED = 8  # bytes: where a payload begins, so that arrays in it can be views
_FILE_HEAD = struct.Struct("<8sQ")
_FILE_MAGIC = b"tba-seg\n"
_FORMAT = 1
_RECORD_HEAD = struct.Struct("<4sIQqQ")
_RECORD_MAGIC = b"REC\n"
_CHECKSUM = struct.Struct("<Q")
FILE_HEAD_BYTES = _FILE_HEAD.size + _CHECKSUM.size
_RECORD_HEAD_BYTES = _RECORD_HEAD.size + _CHECKSUM.size
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record that was read. ``payload`` has memory of its own, which lives as long as it is held."""

    end: LogPosition
    sender: str
    sequence: int
    payload: memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """What is wrong at ``offset`` of a segment; for that, ``bytes_lost`` bytes that were asked for cannot be read."""

    path: Path
    offset: int
    reason: str
    bytes_lost: int

    def __str__(self) -> str:
        return f"{self.path} is damaged at byte {self.offset} ({self.reason}); {self.bytes_lost} bytes are lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentFile:
    """A segment that is open for reading; ``size`` in bytes, as it was then."""

    path: Path
    segment: int
    fd: int
    size: int

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Fewer bytes at the end of the file."""
        try:
            data = os.pread(self.fd, n_bytes, offset)
            while len(data) < n_bytes and (more := os.pread(self.fd, n_bytes - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise cannot("read", self.path, error) from error
        return data


def records(file: SegmentFile, offset: int, until: int) -> Iterator[Record | str]:
    """The records that begin at ``offset`` and after it, before ``until``; if they end earlier, why, as the last."""
    while offset < until:
        record = _record_at(file, offset)
        yield record
        if isinstance(record, str):
            return
        offset = record.end.offset
    if offset > file.size:
        yield f"the file ends at byte {file.size}"


def _record_at(file: SegmentFile, offset: int) -> Record | str:
    """The record that begins at ``offset``; why there is none. Nothing is read that the file cannot hold."""
    ends = f"the file ends at byte {file.size}"
    head = file.read(offset, _RECORD_HEAD_BYTES)
    if len(head) < _RECORD_HEAD_BYTES:
        return ends
    magic, sender_bytes, payload_bytes, sequence, checksum = _RECORD_HEAD.unpack_from(head)
    start = offset + _RECORD_HEAD_BYTES + _filled(sender_bytes)
    if magic != _RECORD_MAGIC:
        return "no record begins there"
    if start > file.size:
        return ends
    sender = file.read(offset + _RECORD_HEAD_BYTES, _filled(sender_bytes))
    name = sender[:sender_bytes]
    if head + sender != record_head(LogPosition(file.segment, offset), name, sequence, payload_bytes, checksum):
        return "the checksum of the record's head is wrong"
    end = start + _filled(payload_bytes)
    if end > file.size:
        return ends
    body = file.read(start, end - start)
    payload = memoryview(body)[:payload_bytes]
    if xxh3_64_intdigest(payload) != checksum or any(body[payload_bytes:]):
        return "the checksum of the record's payload is wrong"
    return Record(end=LogPosition(file.segment, end), sender=name.decode(), sequence=sequence, payload=payload)


def record_head(at: LogPosition, sender: bytes, sequence: int, payload_bytes: int, checksum: int) -> bytes:
    """Everything of a record before its payload."""
    fields = _RECORD_HEAD.pack(_RECORD_MAGIC, len(sender), payload_bytes, sequence, checksum)
    name = sender + bytes(-len(sender) % ALIGNED)
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields + name, seed=at.segment << 40 ^ at.offset)) + name


def _filled(n_bytes: int) -> int:
    return n_bytes + -n_bytes % ALIGNED


def file_head(number: int = _FORMAT) -> bytes:
    """How a file of format ``number`` begins."""
    fields = _FILE_HEAD.pack(_FILE_MAGIC, number)
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields))


def file_fault(file: SegmentFile) -> str:
    """Why no record of ``file`` can be read, or ""; CheckpointError when another version of the format wrote it."""
    head = file.read(0, FILE_HEAD_BYTES)
    if head == file_head():
        return ""
    if len(head) == FILE_HEAD_BYTES and head == file_head(number := _FILE_HEAD.unpack_from(head)[1]):
        raise CheckpointError(
            f"{file.path} has format {number}, and this program reads format {_FORMAT}; resume with the version that "
            f"wrote it, or choose another run.folder"
        )
    return "the head of the file is damaged"


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:08d}.seg"


def segment_numbers(folder: Path) -> list[int]:
    """The segments in ``folder``, ascending."""
    names = [re.fullmatch(r"([0-9]{8}|[1-9][0-9]{8,})\.seg", name) for name in os.listdir(folder)]
    return sorted(int(name[1]) for name in names if name)


def write_all(fd: int, parts: list[bytes | memoryview]) -> None:
    """``parts`` end to end; OSError when not all could be written."""
    rest = [memoryview(part) for part in parts]
    while rest:
        written = os.writev(fd, rest)
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def sync_file(path: Path) -> None:
    """Return when the content of ``path`` is safe on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Return when the names in ``folder`` are safe on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cannot(done: str, path: Path, error: OSError) -> CheckpointError:
    """What to tell the user when ``path`` cannot be ``done``."""
    advice = "free space on that disk" if error.errno in _FULL else "repair that"
    return CheckpointError(
        f"{path} cannot be {done} ({error.strerror or error}); {advice}, or choose another run.folder, and start again"
    )
