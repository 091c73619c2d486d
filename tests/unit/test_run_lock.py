"""One launch at a time in a run folder, and none while roles of a launch that was killed are still there."""

import io
import os
import signal
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
