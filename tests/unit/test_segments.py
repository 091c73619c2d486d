"""The log of a shard: what was appended is read, what is damaged is told, and nothing else is ever read."""

import errno
import os
import re
import resource
import signal
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tba_megatron.buffer import segment_files, segments
from tba_megatron.buffer.segments import Damage, SegmentLog, read_log
from tba_megatron.errors import CheckpointError
from tba_megatron.types import LogPosition

LARGE = 1 << 30
Content = tuple[str, int, bytes]


def append(log: SegmentLog, sender: str, sequence: int, payload: bytes) -> LogPosition:
    return log.append(sender, sequence, payload, xxh3_64_intdigest(payload))


def some(n: int) -> list[Content]:
    """Senders and payloads of many lengths, so that every number of filling bytes occurs."""
    return [(f"s{'é' * (i % 5)}", i, bytes(range(1, 2 + i * 7 % 41)) * (i % 4)) for i in range(n)]


def written(folder: Path, contents: list[Content], segment_bytes: int = LARGE) -> list[LogPosition]:
    with closing(SegmentLog(folder, segment_bytes)) as log:
        return [append(log, *content) for content in contents]


def content(records) -> list[Content]:
    return [(record.sender, record.sequence, bytes(record.payload)) for record in records]


def read(folder: Path, *positions: LogPosition | None) -> tuple[list[Content], list[Damage]]:
    damages: list[Damage] = []
    return content(read_log(folder, *positions, on_damage=damages.append)), damages


def segment(folder: Path, number: int = 0) -> Path:
    return folder / f"{number:08d}.seg"


def is_one_line(text: str) -> bool:
    return "\n" not in text and len(text) < 400


# ---- appending and reading


def test_records_are_read_as_they_were_appended_over_many_segments(tmp_path):
    contents = some(60)
    ends = written(tmp_path, contents, segment_bytes=300)
    records = list(read_log(tmp_path))
    assert content(records) == contents
    assert [record.end for record in records] == ends == sorted(set(ends))
    assert len({end.segment for end in ends}) > 5
    assert all(segment(tmp_path, end.segment).stat().st_size >= end.offset for end in ends)


def test_a_record_lies_whole_in_the_segment_of_its_end_and_a_sealed_one_has_reached_its_size(tmp_path):
    ends = written(tmp_path, [("s", i, bytes(1000)) for i in range(5)], segment_bytes=300)
    assert [end.segment for end in ends] == [0, 1, 2, 3, 4]
    exact = ends[0].offset  # a segment that is exactly full takes no more
    for segment_bytes in (exact, exact + 1, 2500):
        ends = written(tmp_path / str(segment_bytes), [("s", i, bytes(1000)) for i in range(9)], segment_bytes)
        for before, after in pairwise(ends):
            assert after.segment - before.segment == (before.offset >= segment_bytes)


def test_a_payload_begins_where_arrays_can_be_views_and_outlives_the_log(tmp_path):
    written(tmp_path, some(9))
    records = list(read_log(tmp_path))
    segment(tmp_path).write_bytes(b"")
    segment(tmp_path).unlink()
    assert content(records) == some(9)
    stored = tmp_path / "b"
    ends = written(stored, [("sender", 0, b"x" * 10), ("", 1, b"y" * 3)])
    data = segment(stored).read_bytes()
    assert data.index(b"x" * 10) % 8 == data.index(b"yyy") % 8 == 0
    assert [end.offset % 8 for end in ends] == [0, 0]


def test_a_payload_may_be_any_buffer_of_bytes(tmp_path):
    with closing(SegmentLog(tmp_path, LARGE)) as log:
        for payload in (b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]):
            log.append("s", 0, payload, xxh3_64_intdigest(b"abc"))
    assert read(tmp_path) == ([("s", 0, b"abc")] * 3, [])


def test_a_log_goes_on_where_it_was_closed(tmp_path):
    contents = some(40)
    ends: list[LogPosition] = []
    for i, one in enumerate(contents):
        with closing(SegmentLog(tmp_path, 200)) as log:
            assert log.end == (ends[-1] if ends else log.end)
            assert log.cut_bytes == 0
            ends.append(append(log, *one))
            assert log.segments() == list(range(ends[-1].segment + 1))
        assert len(ends) == i + 1
    assert read(tmp_path) == (contents, [])
    assert ends == written(tmp_path / "b", contents, 200)


def test_reading_begins_at_start_and_stops_before_end(tmp_path):
    contents = some(12)
    ends = written(tmp_path, contents, segment_bytes=200)
    for i, start in enumerate(ends):
        for j, end in enumerate(ends):
            assert read(tmp_path, start, end) == (contents[i + 1 : j + 1], [])
        assert read(tmp_path, start) == (contents[i + 1 :], [])
    assert read(tmp_path, LogPosition(0, 0), LogPosition(0, 0)) == ([], [])


def test_a_record_that_begins_before_end_is_read_whole(tmp_path):
    ends = written(tmp_path, some(4))
    assert read(tmp_path, ends[0], LogPosition(0, ends[1].offset + 1)) == (some(4)[1:3], [])


def test_two_threads_append_without_harm(tmp_path):
    with closing(SegmentLog(tmp_path, 500)) as log:

        def run(sender: str) -> None:
            for i in range(200):
                append(log, sender, i, sender.encode() * i)

        threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    contents, damages = read(tmp_path)
    assert damages == [] and len(contents) == 600
    for name in "abc":
        assert [c for c in contents if c[0] == name] == [(name, i, name.encode() * i) for i in range(200)]


# ---- damage


def test_start_that_is_no_boundary_is_damage_even_where_a_payload_holds_a_record(tmp_path):
    inner = tmp_path / "inner"
    first, last = written(inner, [("s", 0, b"first"), ("s", 1, b"inner")])
    record = segment(inner).read_bytes()[first.offset : last.offset]
    (end,) = written(tmp_path, [("s", 0, record)])
    assert segment(tmp_path).read_bytes().count(record) == 1
    for offset in range(1, end.offset):
        if offset != 24:  # where the records begin
            contents, (damage,) = read(tmp_path, LogPosition(0, offset))
            assert (contents, damage.offset, damage.bytes_lost) == ([], offset, end.offset - offset)
            assert damage.path == segment(tmp_path)


def test_positions_beyond_the_log_are_damage(tmp_path):
    contents = some(3)
    *_, end = written(tmp_path, contents)
    assert read(tmp_path, end) == ([], [])
    beyond = LogPosition(0, end.offset + 8)
    _, (damage,) = read(tmp_path, beyond)
    assert (damage.path, damage.offset, damage.bytes_lost) == (segment(tmp_path), beyond.offset, 0)
    for start in (LogPosition(1, 24), LogPosition(2, 0)):
        got, (damage,) = read(tmp_path, start)
        assert (got, damage.path, damage.offset) == ([], segment(tmp_path, start.segment), start.offset)
    got, (damage,) = read(tmp_path, LogPosition(0, 0), beyond)
    assert (got, damage.offset, damage.bytes_lost) == (contents, end.offset, 8)
    got, (damage,) = read(tmp_path, LogPosition(0, 0), LogPosition(1, 100))
    assert (got, damage.path, damage.bytes_lost) == (contents, segment(tmp_path, 1), 100)
    (tmp_path / "empty").mkdir()
    assert read(tmp_path / "empty") == ([], [])


def test_every_truncation_leaves_the_longest_valid_prefix_and_a_log_that_goes_on(tmp_path, caplog):
    contents = some(4)
    bounds = [24] + [end.offset for end in written(tmp_path / "whole", contents)]
    data = segment(tmp_path / "whole").read_bytes()
    for size in range(len(data)):
        folder = tmp_path / str(size)
        folder.mkdir()
        segment(folder).write_bytes(data[:size])
        n = sum(bound <= size for bound in bounds) - 1
        prefix = contents[: max(n, 0)]
        whole = bounds[n] if n >= 0 else 0
        got, damages = read(folder)
        assert got == prefix
        assert [d.bytes_lost for d in damages] == ([size - whole] if size not in bounds else [])
        caplog.clear()
        with closing(SegmentLog(folder, LARGE)) as log:
            assert log.cut_bytes == size - whole
            assert log.end == LogPosition(0, whole or 24)
            append(log, "new", 9, b"after")
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (log.cut_bytes > 0)
        assert all(f"{segment(folder)} is cut at byte {whole} " in x and f"{log.cut_bytes} bytes" in x for x in lines)
        assert read(folder) == ([*prefix, ("new", 9, b"after")], [])


def test_every_flipped_bit_is_found_and_nothing_that_is_damaged_is_read(tmp_path):
    contents = some(4)
    bounds = [24] + [end.offset for end in written(tmp_path, contents)]
    data = segment(tmp_path).read_bytes()
    assert set(map(len, (c[2] for c in contents))) & {0} and len(data) > 300
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        segment(tmp_path).write_bytes(flipped)
        n = max(sum(bound <= bit // 8 for bound in bounds) - 1, 0)
        whole = bounds[n] if bit // 8 >= 24 else 0
        got, (damage,) = read(tmp_path)
        assert got == contents[:n]
        assert (damage.offset, damage.bytes_lost) == (whole, len(data) - whole)
        if bit % 5 == 0:
            with closing(SegmentLog(tmp_path, LARGE)) as log:
                assert (log.cut_bytes, log.end.offset) == (len(data) - whole, whole or 24)
            assert read(tmp_path) == (contents[:n], [])


def test_a_length_that_a_file_cannot_hold_takes_no_memory(tmp_path):
    written(tmp_path, [("s", 0, b"x")])
    data = bytearray(segment(tmp_path).read_bytes())
    data[24 + 4 : 24 + 8] = b"\xff" * 4  # bytes of the sender
    segment(tmp_path).write_bytes(data)

    def read_in_little_memory() -> None:
        in_use = int(re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), resource.RLIM_INFINITY))
        got, (damage,) = read(tmp_path)
        assert (got, damage.offset) == ([], 24)

    in_child(read_in_little_memory)


def test_damage_in_a_sealed_segment_costs_the_rest_of_that_segment_and_is_never_cut(tmp_path, caplog):
    contents = some(30)
    ends = written(tmp_path, contents, segment_bytes=400)
    of_one = [i for i, end in enumerate(ends) if end.segment == 1]
    assert len(of_one) > 2 and ends[-1].segment > 2
    path = segment(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[ends[of_one[0]].offset + 3] ^= 4
    path.write_bytes(data)
    with closing(SegmentLog(tmp_path, 400)) as log:
        assert log.cut_bytes == 0
    assert path.read_bytes() == data
    got, (damage,) = read(tmp_path)
    assert got == [c for i, c in enumerate(contents) if i not in of_one[1:]]
    lost = len(data) - ends[of_one[0]].offset
    assert (damage.path, damage.offset, damage.bytes_lost) == (path, ends[of_one[0]].offset, lost)
    list(read_log(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [str(damage)]
    assert is_one_line(str(damage)) and str(path) in str(damage)
    # Reading that does not touch the damage does not report it.
    assert read(tmp_path, ends[of_one[-1]]) == (contents[of_one[-1] + 1 :], [])
    assert read(tmp_path, LogPosition(0, 0), ends[of_one[0]]) == (contents[: of_one[0] + 1], [])


def test_a_damaged_head_of_a_file_costs_what_was_asked_for_of_it(tmp_path):
    ends = written(tmp_path, some(4))
    data = bytearray(segment(tmp_path).read_bytes())
    data[3] ^= 1
    segment(tmp_path).write_bytes(data)
    got, (damage,) = read(tmp_path, ends[0], ends[2])
    assert (got, damage.offset, damage.bytes_lost) == ([], 0, ends[2].offset - ends[0].offset)


def test_a_checksum_that_is_not_the_payloads_is_found_by_the_reader(tmp_path):
    with closing(SegmentLog(tmp_path, LARGE)) as log:
        log.append("s", 0, b"payload", xxh3_64_intdigest(b"another"))
    got, (damage,) = read(tmp_path)
    assert got == [] and "payload" in damage.reason


def test_a_last_file_of_rubbish_is_made_again_and_other_files_are_left_alone(tmp_path):
    written(tmp_path, some(10), segment_bytes=300)
    last = max(path.name for path in tmp_path.glob("*.seg"))
    (tmp_path / last).write_bytes(b"\0" * 500)
    (tmp_path / "notes.seg").write_bytes(b"mine")
    with closing(SegmentLog(tmp_path, 300)) as log:
        assert log.cut_bytes == 500
        assert log.end == LogPosition(int(last[:8]), 24)
    assert (tmp_path / "notes.seg").read_bytes() == b"mine"
    assert read(tmp_path)[1] == []


def test_another_format_is_refused_and_not_cut(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(segment_files.file_head, "__defaults__", (7,))
        written(tmp_path, some(3))
    data = segment(tmp_path).read_bytes()
    for use in (lambda: SegmentLog(tmp_path, LARGE), lambda: list(read_log(tmp_path))):
        with pytest.raises(CheckpointError, match=r"00000000\.seg has format 7, and this program reads format 1; "):
            use()
    assert segment(tmp_path).read_bytes() == data


# ---- a full disk and other refusals


def in_child(function) -> None:
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


def test_a_file_system_that_takes_no_more_leaves_every_record_before_and_no_part_of_the_next(tmp_path):
    contents = [("s", i, bytes([i + 1]) * 5000) for i in range(10)]

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (18_000, resource.RLIM_INFINITY))
        log = SegmentLog(tmp_path, LARGE)
        for one in contents[:3]:
            append(log, *one)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"00000000\.seg cannot be written \(File too large\); free") as e:
                append(log, *contents[3])
            assert is_one_line(str(e.value))
            assert segment(tmp_path).stat().st_size == log.end.offset
        append(log, "small", 0, b"fits")
        log.sync()

    in_child(fill)
    expected = [*contents[:3], ("small", 0, b"fits")]
    assert read(tmp_path) == (expected, [])
    assert written(tmp_path, contents[3:])
    assert read(tmp_path) == (expected + contents[3:], [])


@pytest.mark.parametrize("taken", [0, 1, 39, 48, 60])
def test_a_write_that_stops_half_way_is_undone(tmp_path, monkeypatch, taken):
    contents = some(6)
    writev = os.writev

    def full(fd: int, parts) -> int:
        if taken and os.fstat(fd).st_size == log.end.offset:
            return os.write(fd, b"".join(parts)[:taken])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with closing(SegmentLog(tmp_path, LARGE)) as log:
        for i, one in enumerate(contents):
            end = log.end
            monkeypatch.setattr(os, "writev", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                append(log, "s", i, b"z" * 100)
            assert log.end == end
            monkeypatch.setattr(os, "writev", writev)
            append(log, *one)
    assert read(tmp_path) == (contents, [])


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda fd, parts: os.write(fd, b"".join(parts)[:7]))
    written(tmp_path, some(20), segment_bytes=300)
    assert read(tmp_path) == (some(20), [])


def test_an_interrupt_in_a_write_leaves_no_part_of_the_record(tmp_path, monkeypatch):
    writev = os.writev

    def interrupted(fd: int, parts) -> int:
        writev(fd, parts)
        raise KeyboardInterrupt

    with closing(SegmentLog(tmp_path, LARGE)) as log:
        append(log, "s", 0, b"a")
        monkeypatch.setattr(os, "writev", interrupted)
        with pytest.raises(KeyboardInterrupt):
            append(log, "s", 1, b"b")
        monkeypatch.setattr(os, "writev", writev)
        append(log, "s", 2, b"c")
    assert read(tmp_path) == ([("s", 0, b"a"), ("s", 2, b"c")], [])


def test_a_segment_that_cannot_be_begun_leaves_nothing_and_can_be_tried_again(tmp_path, monkeypatch):
    with closing(SegmentLog(tmp_path, 50)) as log:
        append(log, "s", 0, b"a" * 50)
        with monkeypatch.context() as patch:
            patch.setattr(segments, "sync_folder", lambda folder: os.stat(folder / "missing"))
            with pytest.raises(CheckpointError, match=r"00000001\.seg cannot be begun \(No such file"):
                append(log, "s", 1, b"b")
        assert log.segments() == [0] and not segment(tmp_path, 1).exists()
        assert append(log, "s", 2, b"c").segment == 1
    assert content(read_log(tmp_path)) == [("s", 0, b"a" * 50), ("s", 2, b"c")]


def test_a_log_that_cannot_be_cut_back_takes_no_more_and_can_be_reopened(tmp_path, monkeypatch):
    def refuse(*_) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(SegmentLog(tmp_path, LARGE)) as log:
        append(log, "s", 0, b"a")
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", lambda fd, parts: os.write(fd, b"REC\n12345") and refuse())
            patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(CheckpointError):
                append(log, "s", 1, b"b")
        with pytest.raises(CheckpointError, match="cannot be cut back"):
            append(log, "s", 1, b"b")
    with closing(SegmentLog(tmp_path, LARGE)) as log:
        assert log.cut_bytes == 9
        append(log, "s", 1, b"b")
    assert read(tmp_path) == ([("s", 0, b"a"), ("s", 1, b"b")], [])


def test_a_disk_that_fails_to_sync_is_told_again_by_every_later_call(tmp_path, monkeypatch):
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(SegmentLog(tmp_path, LARGE)) as log:
        append(log, "s", 0, b"a")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(CheckpointError, match=r"cannot be written to the disk \(Input/output error\)"):
                log.sync()
        for use in (log.sync, lambda: append(log, "s", 1, b"b"), lambda: log.reclaim(())):
            with pytest.raises(CheckpointError, match="Input/output error"):
                use()


def test_what_the_operating_system_refuses_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    segment(tmp_path / "log").mkdir(parents=True)
    for use, path in (
        (lambda: SegmentLog(tmp_path / "file" / "log", LARGE), "file/log cannot be opened (Not a directory)"),
        (lambda: SegmentLog(tmp_path / "log", LARGE), "log cannot be opened (Is a directory)"),
        (lambda: list(read_log(tmp_path / "log")), "00000000.seg cannot be read (Is a directory)"),
        (lambda: list(read_log(tmp_path / "none")), "none cannot be read (No such file or directory)"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/") + ".*" + re.escape(path)) as e:
            use()
        assert is_one_line(str(e.value))
    segment(tmp_path / "log").rmdir()
    SegmentLog(tmp_path / "log", LARGE).close()  # the refused one does not hold the folder


# ---- one owner


def test_a_folder_has_one_log_at_a_time(tmp_path):
    with closing(SegmentLog(tmp_path, LARGE)):
        with pytest.raises(CheckpointError, match="is in use: another trainer") as e:
            SegmentLog(tmp_path, LARGE)
        assert is_one_line(str(e.value)) and str(tmp_path) in str(e.value)
        assert read(tmp_path) == ([], [])  # readers are welcome
    SegmentLog(tmp_path, LARGE).close()


def test_a_forked_child_can_only_close_the_log_and_does_not_release_it(tmp_path):
    log = SegmentLog(tmp_path, LARGE)

    def use() -> None:
        for call in (lambda: append(log, "s", 0, b"a"), log.sync, lambda: log.reclaim(())):
            with pytest.raises(RuntimeError, match="belongs to process"):
                call()
        log.close()

    in_child(use)
    with pytest.raises(CheckpointError, match="is in use"):
        SegmentLog(tmp_path, LARGE)
    append(log, "s", 0, b"b")
    log.close()
    assert read(tmp_path) == ([("s", 0, b"b")], [])


def test_a_closed_log_takes_nothing_and_closes_again(tmp_path):
    log = SegmentLog(tmp_path, LARGE)
    log.close()
    n_open = len(os.listdir("/proc/self/fd"))
    log.close()
    assert len(os.listdir("/proc/self/fd")) == n_open
    for call in (lambda: append(log, "s", 0, b"a"), log.sync, lambda: log.reclaim(())):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


def test_no_descriptor_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    written(tmp_path, some(30), segment_bytes=200)
    with closing(SegmentLog(tmp_path, 200)) as log:
        log.sync()
        with pytest.raises(CheckpointError):
            SegmentLog(tmp_path, 200)
    assert len(list(read_log(tmp_path))) == 30
    next(reading := iter(read_log(tmp_path)))
    reading.close()  # type: ignore[attr-defined]
    assert os.listdir("/proc/self/fd") == before


# ---- sync and reclaim


def test_sync_covers_the_current_file_and_all_that_were_sealed_since_the_last(tmp_path, monkeypatch):
    synced: list[str] = []
    fdatasync = os.fdatasync

    def watched(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", watched)
    names = [f"{i:08d}.seg" for i in range(5)]
    with closing(SegmentLog(tmp_path, 50)) as log:
        for i in range(3):
            append(log, "s", i, b"a" * 50)
        assert synced == []
        log.sync()
        assert synced == names[:3]
        log.sync()
        assert synced[3:] == names[2:3]
        append(log, "s", 3, b"a" * 50)
        log.sync()
        assert synced[4:] == names[2:4]
    synced.clear()
    with closing(SegmentLog(tmp_path, 50)) as log:  # nobody knows what the last process synced
        log.sync()
    assert synced == names[:4]


def test_a_new_file_has_its_name_synced_before_a_record_in_it_is_acknowledged(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(segments, "sync_folder", synced.append)
    with closing(SegmentLog(tmp_path, 50)) as log:
        for i in range(3):
            synced.clear()
            append(log, "s", i, b"a" * 50)
            assert synced == [tmp_path] * (i > 0)


def test_appends_go_on_while_another_thread_syncs(tmp_path, monkeypatch):
    waiting, go_on = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        waiting.set()
        assert go_on.wait(30)

    monkeypatch.setattr(os, "fdatasync", slow)
    with closing(SegmentLog(tmp_path, 50)) as log:
        append(log, "s", 0, b"a" * 50)
        thread = threading.Thread(target=log.sync)
        thread.start()
        try:
            assert waiting.wait(30)
            for i in range(1, 5):
                append(log, "s", i, b"a" * 50)
            assert thread.is_alive() and log.segments() == [0, 1, 2, 3, 4]
        finally:
            go_on.set()
            thread.join()
    assert content(read_log(tmp_path)) == [("s", i, b"a" * 50) for i in range(5)]


def test_reclaim_deletes_the_sealed_segments_that_are_not_live(tmp_path):
    contents = [("s", i, b"a" * 50) for i in range(6)]
    with closing(SegmentLog(tmp_path, 50)) as log:
        ends = [append(log, *one) for one in contents]
        assert log.reclaim({1, 3}) == 3
        assert log.segments() == [1, 3, 5] and sorted(p.name[7] for p in tmp_path.glob("*.seg")) == ["1", "3", "5"]
        assert log.reclaim({1, 3}) == 0
        log.sync()
        assert append(log, "s", 6, b"b").segment == 6
        assert log.reclaim({1}) == 2
    assert read(tmp_path) == ([contents[1], ("s", 6, b"b")], [])
    _, (damage,) = read(tmp_path, ends[0])
    assert "no such file" in damage.reason
    with closing(SegmentLog(tmp_path, 50)) as log:
        assert log.segments() == [1, 6]
        assert log.reclaim(()) == 1
        assert log.end.segment == 6  # a number is never given twice, whatever was deleted


def test_a_segment_that_is_reclaimed_while_the_log_is_read_is_passed_over(tmp_path):
    contents = [("s", i, b"a" * 50) for i in range(4)]
    with closing(SegmentLog(tmp_path, 50)) as log:
        for one in contents:
            append(log, *one)
        damages: list[Damage] = []
        reading = read_log(tmp_path, on_damage=damages.append)
        first = next(reading)
        log.reclaim({2})
        assert content([first, *reading]) == [contents[0], *contents[2:]]
        assert damages == []


# ---- any history


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(max_size=60)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("truncate"), st.integers(0, 300)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(actions=ACTIONS, segment_bytes=st.sampled_from([1, 100, 200, LARGE]))
def test_any_history_of_appends_reopenings_and_torn_tails_equals_a_list(tmp_path_factory, actions, segment_bytes):
    folder = tmp_path_factory.mktemp("log")
    twin: list[tuple[LogPosition, Content]] = []
    log = SegmentLog(folder, segment_bytes)
    for sequence, (action, value) in enumerate(actions):
        if action == "append":
            one = (f"s{sequence % 3}", sequence, value)
            twin.append((append(log, *one), one))
            continue
        number, size = log.end.segment, log.end.offset
        log.close()
        left = max(size - value, 0) if action == "truncate" else size
        os.truncate(segment(folder, number), left)
        twin = [(end, one) for end, one in twin if end <= LogPosition(number, left)]
        log = SegmentLog(folder, segment_bytes)
        whole = max([end.offset for end, _ in twin if end.segment == number], default=24 if left >= 24 else 0)
        assert log.cut_bytes == left - whole
    log.close()
    damages: list[Damage] = []
    records = list(read_log(folder, on_damage=damages.append))
    assert list(zip([record.end for record in records], content(records), strict=True)) == twin
    assert damages == []
