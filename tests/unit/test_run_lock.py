"""One launch at a time in a run folder, and none while roles of a launch that was killed are still there."""

import fcntl
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tba_megatron.errors import RunFolderError
from tba_megatron.ops.run_lock import alone_in, make_run_folder

# Holds the folder and starts a role that inherits the lock and lives until its stdin ends.
LAUNCH = """
import subprocess, sys
from pathlib import Path
from tba_megatron.ops.run_lock import alone_in
with alone_in(Path(sys.argv[1]), sys.stdout) as lock:
    role = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, pass_fds=(lock,))
    print(role.pid, flush=True)
    role.wait()
"""


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_launch_waits_for_the_roles_of_one_that_was_killed_and_is_refused_while_that_lives(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    role = int(other.stdout.readline())
    try:
        with pytest.raises(RunFolderError, match="is in use by another tba launch"), alone_in(tmp_path, io.StringIO()):
            pass
        other.kill()
        other.wait()
        stream, held = io.StringIO(), threading.Event()

        def launch() -> None:
            with alone_in(tmp_path, stream):
                held.set()

        thread = threading.Thread(target=launch)
        thread.start()
        wait_for(lambda: "was killed; waiting until its roles have saved and left" in stream.getvalue())
        assert not held.is_set()
        os.kill(role, signal.SIGTERM)
        assert held.wait(60)
        thread.join()
    finally:
        other.stdin.close()
        other.stdout.close()


def test_a_folder_is_free_after_its_launch_and_as_it_was(tmp_path):
    for _ in range(2):
        with alone_in(tmp_path, io.StringIO()):
            assert (tmp_path / ".lock").read_text().split()[1] == str(os.getpid())
        assert (tmp_path / ".lock").read_bytes() == b""


HERE = socket.gethostname().encode()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\x80",
        HERE + b" \xb2\n",
        HERE + " \u00b2\n".encode(),
        HERE + b" 99999999999\n",
        HERE + b" " + b"1" * 5000,
    ],
    ids=["binary", "not a number", "a digit that is no number", "no process id", "long"],
)
def test_a_lock_that_is_held_and_damaged_is_one_line(content, tmp_path):
    (tmp_path / ".lock").write_bytes(content)
    with (tmp_path / ".lock").open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match=r"is in use by another tba launch"), alone_in(tmp_path, io.StringIO()):
            pass
    with alone_in(tmp_path, io.StringIO()):
        assert (tmp_path / ".lock").read_text().split()[1] == str(os.getpid())


def test_a_run_folder_that_cannot_be_made_or_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"run folder \S+file cannot be written: File exists; choose another"):
        make_run_folder(tmp_path / "file")
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with (
        pytest.raises(RunFolderError, match=r"run folder \S+run cannot be written: Is a directory"),
        alone_in(tmp_path / "run", io.StringIO()),
    ):
        pass
