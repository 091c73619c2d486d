"""The supervisor with tiny roles. Every child is looked for by its own process id."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tba_megatron.errors import RoleFailedError
from tba_megatron.ops.supervise import RESTARTS, Role, Supervisor

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0  # a bound on a hang, never a measure


def shell(folder, name, script, **options):
    """A role that runs ``script``, in which $PIDS is the file that collects process ids."""
    return Role(
        name=name,
        argv=("/bin/sh", "-c", f'echo $$ >> "$PIDS"; {script}'),
        log=folder / "logs" / f"{name}.log",
        environment={"PIDS": str(folder / "pids")},
        **options,
    )


def pids(folder):
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pid):
    """Not a zombie: one that nobody has collected yet is dead all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def supervise(roles, stream=None):
    with Supervisor(dict(os.environ), stream or io.StringIO()) as supervisor:
        supervisor.run(roles)
    return supervisor


def test_roles_that_end_well_end_the_run(tmp_path):
    supervise([shell(tmp_path, "a", "true"), shell(tmp_path, "b", "sleep 0.05")])
    assert len(pids(tmp_path)) == 2
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_vital_role_that_fails_ends_all_others_and_says_its_last_words(tmp_path):
    waits = shell(tmp_path, "waits", "exec sleep 60")
    searches = shell(tmp_path, "searches", "exec sleep 60", vital=False)
    # It fails only when the others are there to be ended.
    script = """while [ "$(wc -l < "$PIDS")" -lt 3 ]; do sleep 0.01; done
        for i in 1 2 3 4 5 6; do echo "line $i" >&2; done; exit 3"""
    with pytest.raises(RoleFailedError) as caught:
        supervise([waits, searches, shell(tmp_path, "fails", script)])
    message = str(caught.value)
    assert message.startswith("fails ended with exit code 3; the end of ")
    assert str(tmp_path / "logs" / "fails.log") in message
    assert [line.strip() for line in message.splitlines()[1:]] == [f"line {i}" for i in range(2, 7)]
    assert len(pids(tmp_path)) == 3
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_vital_role_that_was_killed_is_reported_by_its_signal(tmp_path):
    with pytest.raises(RoleFailedError, match=r"a ended with signal SIGKILL; .*a\.log is empty"):
        supervise([shell(tmp_path, "a", "kill -KILL $$")])


def test_what_a_killed_role_had_started_ends_with_it(tmp_path):
    script = 'sh -c \'echo $$ >> "$PIDS"; exec sleep 60\' & while [ "$(wc -l < "$PIDS")" -lt 2 ]; do sleep 0.01; done'
    with pytest.raises(RoleFailedError):
        supervise([shell(tmp_path, "train-0", f"{script}; kill -KILL $$")])
    assert len(pids(tmp_path)) == 2
    assert eventually(lambda: not any(alive(pid) for pid in pids(tmp_path)))


def test_a_role_that_ignores_the_request_to_end_is_killed(tmp_path, monkeypatch):
    stubborn = shell(tmp_path, "stubborn", 'trap "" TERM; while :; do sleep 0.05; done')
    with Supervisor(dict(os.environ), io.StringIO()) as supervisor:
        supervisor._start(stubborn)
        assert eventually(lambda: pids(tmp_path))
        time.sleep(0.05)  # the trap is set after the id is written
        monkeypatch.setattr("tba_megatron.ops.supervise.LEAVE_S", 0.2)
    assert not alive(pids(tmp_path)[0])


def test_a_searcher_that_fails_is_started_again_a_few_times_only(tmp_path):
    stream = io.StringIO()
    searcher = shell(tmp_path, "search-0", "echo cannot >&2; exit 7", vital=False)
    with pytest.raises(RoleFailedError, match=rf"search-0 failed {RESTARTS + 1} times, last with exit code 7"):
        supervise([shell(tmp_path, "train-0", "exec sleep 60"), searcher], stream)
    assert stream.getvalue().splitlines() == ["search-0 ended with exit code 7; started again"] * RESTARTS
    assert len(pids(tmp_path)) == RESTARTS + 2
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_searcher_that_ends_well_is_not_started_again(tmp_path):
    trainer = shell(tmp_path, "train-0", 'while [ "$(wc -l < "$PIDS")" -lt 2 ]; do sleep 0.01; done; sleep 0.1')
    supervise([trainer, shell(tmp_path, "search-0", "exit 0", vital=False)])
    assert len(pids(tmp_path)) == 2


def test_a_searcher_that_stays_is_ended_after_the_vital_roles(tmp_path, monkeypatch):
    monkeypatch.setattr("tba_megatron.ops.supervise.LEAVE_S", 0.2)
    trainer = shell(tmp_path, "train-0", 'while [ "$(wc -l < "$PIDS")" -lt 2 ]; do sleep 0.01; done')
    supervise([trainer, shell(tmp_path, "search-0", "exec sleep 60", vital=False)])
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_vital_roles_which_may_finish(tmp_path, number):
    saved = tmp_path / "saved"
    trainer = shell(
        tmp_path,
        "train-0",
        f'trap "touch {saved}; exit 0" TERM; echo ready >> {tmp_path}/ready; while :; do sleep 0.02; done',
    )
    # Like a searcher it leaves when the trainer says so, here by its file.
    searcher = shell(
        tmp_path,
        "search-0",
        f'trap "touch {tmp_path}/too-early" TERM; while [ ! -e {saved} ]; do sleep 0.02; done',
        vital=False,
    )

    def interrupt():
        eventually(lambda: (tmp_path / "ready").exists() and len(pids(tmp_path)) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(number)
    supervisor = supervise([trainer, searcher])
    thread.join()
    assert supervisor.signal == number
    assert signal.getsignal(number) is before
    assert saved.exists()
    assert not (tmp_path / "too-early").exists()
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize(
    "script",
    ["echo ready >> {0}/ready; exec sleep 60", "trap 'exit 143' TERM; echo ready >> {0}/ready; while :; do :; done"],
    ids=["cannot handle it yet", "saved and says so"],
)
def test_a_role_that_a_signal_stopped_is_no_failure(script, tmp_path):
    def interrupt():
        eventually(lambda: (tmp_path / "ready").exists() and pids(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert supervise([shell(tmp_path, "sft-0", script.format(tmp_path))]).signal == signal.SIGTERM
    thread.join()
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_role_that_fails_after_a_signal_is_reported(tmp_path):
    def interrupt():
        eventually(lambda: (tmp_path / "ready").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    script = f"trap 'exit 1' TERM; echo ready >> {tmp_path}/ready; while :; do :; done"
    with pytest.raises(RoleFailedError, match="ended with exit code 1"):
        supervise([shell(tmp_path, "train-0", script)])
    thread.join()


def launcher(folder):
    """A launcher in a process of its own, with a vital and another role that both sleep."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from tba_megatron.ops import supervise\n"
        "from tba_megatron.ops.supervise import Role, Supervisor\n"
        "supervise.LEAVE_S = 0.2\n"
        f"folder = Path({str(folder)!r})\n"
        "argv = ('/bin/sh', '-c', 'echo $$ >> \"$PIDS\"; exec sleep 60')\n"
        "roles = [Role(name=n, argv=argv, log=folder / n, environment={'PIDS': str(folder / 'pids')}, vital=v)\n"
        "         for n, v in (('train-0', True), ('search-0', False))]\n"
        "with Supervisor(dict(os.environ), sys.stdout) as supervisor: supervisor.run(roles)\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_takes_its_children_along(tmp_path, number):
    process = launcher(tmp_path)
    try:
        assert eventually(lambda: len(pids(tmp_path)) == 2)
        process.send_signal(number)
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert eventually(lambda: not any(alive(pid) for pid in pids(tmp_path)))


def test_output_is_seen_for_a_visible_role_and_logged_for_others(tmp_path, capfd):
    script = "echo to stdout; echo to stderr >&2"
    supervise([shell(tmp_path, "seen", script, visible=True), shell(tmp_path, "hidden", script)])
    assert capfd.readouterr() == ("to stdout\n", "")
    assert (tmp_path / "logs" / "seen.log").read_text() == "to stderr\n"
    assert sorted((tmp_path / "logs" / "hidden.log").read_text().splitlines()) == ["to stderr", "to stdout"]


def test_a_role_gets_the_environment_it_was_given_and_its_own(tmp_path):
    role = shell(tmp_path, "a", 'echo "$FROM_RUN $PIDS"')
    with Supervisor({"FROM_RUN": "run"}, io.StringIO()) as supervisor:
        supervisor.run([role])
    assert role.log.read_text() == f"run {tmp_path / 'pids'}\n"
