"""One launch at a time in a run folder, and none while roles of a launch that was killed still save."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil

from tba_megatron.errors import RunFolderError

ORPHANS_S = 90.0  # how long a launch waits for the roles of one that was killed; they save and leave by themselves
_POLL_S = 0.2


@contextmanager
def alone_in(folder: Path, stream: TextIO) -> Iterator[int]:
    """Hold the run folder; the descriptor of its lock, which every role inherits: while one lives it is held.

    RunFolderError when another launch holds it, or it cannot be written to.
    """
    try:
        lock = (folder / ".lock").open("a+", encoding="utf-8", errors="replace")  # it may be damaged
    except OSError as error:
        raise _unusable(folder, error) from None
    with lock:
        _acquire(lock, folder, stream)
        lock.truncate(0)
        lock.write(f"{socket.gethostname()} {os.getpid()}\n")
        lock.flush()
        try:
            yield lock.fileno()
        finally:
            lock.truncate(0)  # only one that was killed leaves its name


def make_run_folder(folder: Path) -> None:
    """RunFolderError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"run folder {folder} cannot be written: {error.strerror or error}; choose another run.folder"
    )


def _acquire(lock: TextIO, folder: Path, stream: TextIO) -> None:
    deadline_s, told = time.monotonic() + ORPHANS_S, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not _holder_was_killed(lock) or time.monotonic() > deadline_s:
                raise RunFolderError(
                    f"run folder {folder} is in use by another tba launch; wait for it or choose another run.folder"
                ) from None
        if not told:
            told = True
            print(
                f"a launch in {folder} was killed; waiting until its roles have saved and left", file=stream, flush=True
            )
        time.sleep(_POLL_S)


def _holder_was_killed(lock: TextIO) -> bool:
    """Whether the launch that wrote into the lock is gone, so that only its roles can hold it.

    Of what is not a launch's line nobody knows, so its holder counts as one that lives.
    """
    lock.seek(0)
    host, _, pid = lock.read().strip().partition(" ")
    # No system counts processes as far as ten digits, and ``pid_exists`` raises beyond 31 bits.
    is_pid = re.fullmatch("[0-9]{1,9}", pid) is not None
    return host == socket.gethostname() and is_pid and not psutil.pid_exists(int(pid))
