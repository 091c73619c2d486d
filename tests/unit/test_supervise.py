"""The supervisor with tiny roles. Every child is looked for by its own process id."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tba_megatron.config_search import LaunchConfig
from tba_megatron.errors import RoleFailedError
from tba_megatron.ops import children, restarts, supervise
from tba_megatron.ops.restarts import Restarts
from tba_megatron.ops.roles import Role
from tba_megatron.ops.supervise import Supervisor

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0  # a bound on a hang, never a measure
APART_S = 600.0  # between the ends of two ranks: longer than any test


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


def count_is(n):
    """Shell: wait until ``n`` processes have written their ids."""
    return f'while [ "$(wc -l < "$PIDS")" -lt {n} ]; do sleep 0.01; done'


def alive(pid):
    """Not a zombie: one that nobody has collected yet is dead all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(parent):
    """Process ids, zombies too."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.add(int(path.parent.name))
    return found


def eventually(condition):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def run(ranks, searchers=(), stream=None, apart_s=APART_S, **policy):
    """Supervise a team, which is the same at each start, and searchers; nothing of them is left, not even a zombie."""
    before = children_of(os.getpid())
    try:
        with Supervisor(
            dict(os.environ), stream or io.StringIO(), LaunchConfig(**policy), apart_s=apart_s
        ) as supervisor:
            supervisor.run(lambda: ranks, searchers)
    finally:
        assert children_of(os.getpid()) <= before
    return supervisor


@contextmanager
def meanwhile(action):
    """``action`` in a thread beside the block."""
    thread = threading.Thread(target=action)
    thread.start()
    yield
    thread.join()


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.0)


# ---- policy


def test_restarts_are_counted_within_the_window_alone():
    policy = Restarts(2, 100.0)
    assert [policy.failed("a", at_s, 50.0) for at_s in (0, 60, 101, 161, 222)] == [0.0] * 5
    assert policy.failures("a") == 2
    assert policy.failed("b", 222, 50.0) == 0.0
    assert policy.failed("a", 230, 50.0) is None
    assert policy.failures("a") == 3


def test_without_restarts_the_first_failure_is_one_too_many():
    assert Restarts(0, 100.0).failed("a", 0.0, 50.0) is None


def test_pauses_grow_while_a_role_dies_soon_after_each_start():
    policy = Restarts(2000, 1e-3)  # older failures do not count, and yet it must not spin
    pauses = [policy.failed("a", float(n), 0.1) for n in range(1000)]
    assert pauses[:8] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert pauses[-1] == 8.0
    assert policy.failed("a", 2000.0, 60.0) == 0.0
    assert policy.failed("a", 2001.0, 0.1) == 0.0
    assert policy.failed("a", 2002.0, 0.1) == 0.5


# ---- the end of a team


def test_ranks_that_end_well_end_the_run(tmp_path):
    run([shell(tmp_path, "a", "true"), shell(tmp_path, "b", "sleep 0.05")])
    assert len(pids(tmp_path)) == 2
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_rank_that_fails_ends_all_others_and_says_its_last_words(tmp_path):
    waits = shell(tmp_path, "waits", "exec sleep 60")
    searches = shell(tmp_path, "searches", "exec sleep 60")
    # It fails only when the others are there to be ended.
    script = f'{count_is(3)}; for i in 1 2 3 4 5 6; do echo "line $i" >&2; done; exit 3'
    with pytest.raises(RoleFailedError) as caught:
        run([waits, shell(tmp_path, "fails", script)], [searches])
    message = str(caught.value)
    assert message.startswith("fails ended with exit code 3; the end of ")
    assert caught.value.exit_code == 1
    assert str(tmp_path / "logs" / "fails.log") in message
    assert [line.strip() for line in message.splitlines()[1:]] == [f"line {i}" for i in range(2, 7)]
    assert len(pids(tmp_path)) == 3
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("trap", ["exit 143", ""], ids=["leaves when asked", "ignores the request"])
def test_a_rank_that_does_not_end_when_another_has_ended_well_is_ended_and_named(trap, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "LEAVE_S", 0.3)
    hangs = shell(tmp_path, "train-1", f"trap '{trap}' TERM; echo in a queue >&2; while :; do sleep 0.02; done")
    searches = shell(tmp_path, "search-0", "exec sleep 60")
    ranks = [shell(tmp_path, "train-0", f"{count_is(3)}; sleep 0.1"), hangs]
    with pytest.raises(RoleFailedError) as caught:
        run(ranks, [searches], apart_s=0.2, trainer_restarts=3)
    assert str(caught.value).startswith(
        "train-1 did not end within 0.2 s after train-0, which ended with exit code 0; "
    )
    assert str(caught.value).endswith("train-1.log:\n  in a queue")
    assert caught.value.exit_code == 1
    assert len(pids(tmp_path)) == 3
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_team_that_is_started_anew_has_all_its_time_to_end(tmp_path):
    """Of the first, one rank had ended well before the other failed."""
    later = '[ $(wc -l < "$PIDS") -le 2 ] || exec sleep 1.5'
    ranks = [shell(tmp_path, "train-0", later), shell(tmp_path, "train-1", f"{later}; sleep 0.3; exit 1")]
    run(ranks, apart_s=1.2, trainer_restarts=1)
    assert len(pids(tmp_path)) == 4


def test_a_rank_that_was_killed_is_reported_by_its_signal(tmp_path):
    with pytest.raises(RoleFailedError, match=r"a ended with signal SIGKILL; .*a\.log says nothing about it"):
        run([shell(tmp_path, "a", "kill -KILL $$")])


def test_last_words_are_of_this_start_alone(tmp_path):
    log = tmp_path / "logs" / "a.log"
    log.parent.mkdir()
    log.write_text("of an earlier start\n")
    with pytest.raises(RoleFailedError) as caught:
        run([shell(tmp_path, "a", "echo new >&2; exit 1")])
    assert "new" in str(caught.value) and "earlier" not in str(caught.value)


@pytest.mark.parametrize("code", [2, 69])
def test_an_exit_code_that_says_why_wins_over_the_failures_that_it_causes(code, tmp_path):
    """Another rank notices that its peer is gone, and is collected first."""
    slow = shell(tmp_path, "train-0", f"trap 'echo the reason >&2; exit {code}' TERM; {count_is(2)}; sleep 60 & wait")
    hasty = shell(tmp_path, "train-1", f"{count_is(2)}; sleep 0.1; exit 1")
    with pytest.raises(RoleFailedError, match=rf"train-0 ended with exit code {code}; (?s:.*)the reason") as caught:
        run([slow, hasty])
    assert caught.value.exit_code == code


def test_of_ranks_that_found_no_searcher_the_first_is_quoted(tmp_path):
    script = f"trap 'sleep 0.2; echo no searcher came >&2; exit 69' TERM; {count_is(2)}; sleep 60 & wait"
    with pytest.raises(RoleFailedError, match=r"train-0 ended with exit code 69; (?s:.*)no searcher came"):
        run([shell(tmp_path, "train-0", script), shell(tmp_path, "train-1", f"{count_is(2)}; sleep 0.1; exit 69")])


def test_a_role_that_cannot_be_started_is_one_line(tmp_path):
    role = Role(name="a", argv=(str(tmp_path / "nothing"),), log=tmp_path / "a.log")
    with pytest.raises(RoleFailedError, match=r"a cannot be started .*No such file or directory.*a\.log"):
        run([shell(tmp_path, "waits", "exec sleep 60"), role])
    assert not any(alive(pid) for pid in pids(tmp_path))


# ---- what roles have started


@pytest.mark.parametrize("trap", ["", 'trap "" TERM; '], ids=["leaves when asked", "ignores the request"])
@pytest.mark.parametrize("end", ["kill -KILL $$", "exit 0"])
def test_what_a_role_had_started_ends_with_it(trap, end, tmp_path, monkeypatch):
    monkeypatch.setattr(children, "GROUP_S", 0.3)
    script = (
        f"({trap}echo $(exec sh -c 'echo $PPID') >> \"$PIDS\"; while :; do sleep 0.02; done) & {count_is(2)}; {end}"
    )
    with suppress(RoleFailedError):
        run([shell(tmp_path, "train-0", script)])
    assert len(set(pids(tmp_path))) == 2
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_shared_memory_of_what_a_killed_role_had_started_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "GROUP_S", 0.3)
    # A worker that ignores SIGTERM holds a segment; Python's resource tracker removes it once the worker is dead.
    worker = f"""
import os, signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=4096)
open({str(tmp_path / "name")!r}, "w").write(memory.name)
time.sleep(60)
"""
    (tmp_path / "worker.py").write_text(worker)
    script = (
        f"{sys.executable} {tmp_path}/worker.py & while [ ! -s {tmp_path}/name ]; do sleep 0.01; done; kill -KILL $$"
    )
    with pytest.raises(RoleFailedError, match="SIGKILL"):
        run([shell(tmp_path, "train-0", script)])
    assert not (Path("/dev/shm") / (tmp_path / "name").read_text()).exists()


def test_a_role_that_ignores_the_request_to_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "LEAVE_S", 0.2)
    ready = tmp_path / "ready"
    stubborn = shell(tmp_path, "search-0", f'trap "" TERM; touch {ready}; while :; do sleep 0.05; done')
    run([shell(tmp_path, "train-0", f"while [ ! -e {ready} ]; do sleep 0.01; done")], [stubborn])
    assert len(pids(tmp_path)) == 2
    assert not any(alive(pid) for pid in pids(tmp_path))


# ---- searchers


@pytest.mark.parametrize(("code", "words"), [("exit 7", "exit code 7"), ("exit 75", "exit code 75")])
def test_a_searcher_that_fails_is_started_again_a_few_times_only(code, words, tmp_path, no_pauses):
    stream = io.StringIO()
    searcher = shell(tmp_path, "search-0", f"echo cannot >&2; {code}")
    with pytest.raises(RoleFailedError) as caught:
        run([shell(tmp_path, "train-0", "exec sleep 60")], [searcher], stream, searcher_restarts=3, window_s=100)
    assert re.match(
        rf"search-0 failed 4 times within 100 s, last with {words}; the end of .*\n  cannot$", str(caught.value)
    )
    assert caught.value.exit_code == 1
    again = rf"search-0 ended with {words}; started again \(%d of 3 times within 100 s\); see .*search-0\.log"
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(again % n, line) for n, line in enumerate(lines, 1))
    assert len(pids(tmp_path)) == 5
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_searcher_may_fail_as_often_as_it_likes_over_more_than_a_window(tmp_path, no_pauses):
    stream = io.StringIO()
    searcher = shell(tmp_path, "search-0", "sleep 0.1; exit 7")
    trainer = shell(tmp_path, "train-0", count_is(8))
    run([trainer], [searcher], stream, searcher_restarts=1, window_s=0.05)
    assert stream.getvalue().count("started again") >= 6


def test_the_pause_before_a_restart_blocks_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(restarts, "MOST_PAUSE_S", 60.0)
    stream = io.StringIO()
    fails = shell(tmp_path, "search-0", "exit 7")
    fails_too = shell(tmp_path, "search-1", f"{count_is(4)}; exit 7")  # after the first has died twice
    trainer = shell(tmp_path, "train-0", count_is(5))
    run([trainer], [fails, fails_too], stream)  # ends long before the pause does
    assert "search-0 ended with exit code 7; started again after 60 s (2 of 3 times" in stream.getvalue()
    assert "search-1 ended with exit code 7; started again (1 of 3 times" in stream.getvalue()


def test_a_configuration_that_a_searcher_cannot_use_ends_the_run_once_the_trainer_has_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "LEAVE_S", 0.0)  # for saving it has longer than that
    saved = tmp_path / "saved"
    trainer = shell(
        tmp_path, "train-0", f"trap 'sleep 0.3; touch {saved}; exit 143' TERM; sleep 60 & {count_is(2)}; wait"
    )
    searcher = shell(tmp_path, "search-0", f"{count_is(2)}; sleep 0.1; echo no such engine >&2; exit 2")
    with pytest.raises(RoleFailedError, match=r"search-0 ended with exit code 2; (?s:.*)no such engine") as caught:
        run([trainer], [searcher])
    assert caught.value.exit_code == 2
    assert saved.exists()
    assert len(pids(tmp_path)) == 2


def test_a_searcher_that_leaves_is_said_once_and_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "SAY_LEFT_S", 0.05)
    stream = io.StringIO()
    trainer = shell(tmp_path, "train-0", f"{count_is(2)}; sleep 0.4")
    run([trainer], [shell(tmp_path, "search-0", "exit 0")], stream)
    assert stream.getvalue() == "search-0 has left (exit code 0) and is not started again\n"
    assert len(pids(tmp_path)) == 2


def test_searchers_that_leave_at_the_end_of_a_run_are_not_worth_a_line(tmp_path):
    stream = io.StringIO()
    trainer = shell(tmp_path, "train-0", f"{count_is(2)}; sleep 0.1")
    run([trainer], [shell(tmp_path, "search-0", "exit 0")], stream)
    assert stream.getvalue() == ""


def test_a_searcher_that_stays_is_asked_to_leave_when_the_team_has_ended(tmp_path):
    asked = tmp_path / "asked"
    trap = f"trap 'touch {asked}; exit 0' TERM; echo ready >> {tmp_path}/ready; sleep 60 & wait"
    trainer = shell(tmp_path, "train-0", f"while [ ! -e {tmp_path}/ready ]; do sleep 0.01; done")
    run([trainer], [shell(tmp_path, "search-0", trap)])
    assert asked.exists()
    assert not any(alive(pid) for pid in pids(tmp_path))


# ---- teams that are started anew


def starts(folder, name):
    """How often a role was started, by its log."""
    path = folder / "logs" / f"{name}.log"
    return path.read_text().count("start") if path.exists() else 0


def test_ranks_are_started_anew_together_while_searchers_live(tmp_path):
    made = []
    # At the first start rank 1 is killed and rank 0, which takes SIGTERM for a wish, hangs; then both end well.
    first = f"echo start >&2; if [ ! -e {tmp_path}/again ]; then"
    hangs = f"{first} trap '' TERM; echo >> {tmp_path}/ready; while :; do sleep 0.02; done; fi"
    killed = f"{first} while [ ! -e {tmp_path}/ready ]; do sleep 0.01; done; touch {tmp_path}/again; kill -KILL $$; fi"

    def team():
        made.append(len(made))
        if made[1:]:
            assert not any(alive(pid) for pid in pids(tmp_path) if pid not in searcher_pids())
        ranks = {"train-0": hangs, "train-1": killed}
        return [shell(tmp_path, name, script) for name, script in ranks.items()]

    def searcher_pids():
        return [int(line) for line in (tmp_path / "logs" / "search-0.log").read_text().split()]

    stream = io.StringIO()
    searcher = shell(tmp_path, "search-0", "echo $$ >&2; exec sleep 60")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervise, "TEAM_S", 0.3)
        with Supervisor(dict(os.environ), stream, LaunchConfig(trainer_restarts=1), apart_s=APART_S) as supervisor:
            supervisor.run(team, [searcher])
    assert made == [0, 1]
    assert (starts(tmp_path, "train-0"), starts(tmp_path, "train-1")) == (2, 2)
    assert len(searcher_pids()) == 1
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(
        "train-1 ended with signal SIGKILL; all trainer ranks are started again (1 of 1 times within 600 s); see "
    )


def test_a_team_that_fails_once_too_often_ends_the_run(tmp_path, no_pauses):
    stream = io.StringIO()
    ranks = [shell(tmp_path, "train-0", "exec sleep 60"), shell(tmp_path, "train-1", "echo start >&2; exit 5")]
    with pytest.raises(RoleFailedError) as caught:
        run(ranks, [shell(tmp_path, "search-0", "exec sleep 60")], stream, trainer_restarts=2)
    assert str(caught.value).startswith("the trainer failed 3 times within 600 s, last with train-1's exit code 5; ")
    assert caught.value.exit_code == 1
    assert starts(tmp_path, "train-1") == 3
    assert stream.getvalue().count("all trainer ranks are started again") == 2
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("code", [2, 69])
def test_a_team_that_would_end_in_the_same_way_is_not_started_anew(code, tmp_path):
    with pytest.raises(RoleFailedError) as caught:
        run([shell(tmp_path, "train-0", f"echo start >&2; exit {code}")], trainer_restarts=5)
    assert caught.value.exit_code == code
    assert starts(tmp_path, "train-0") == 1


def test_a_configuration_that_one_rank_cannot_use_is_noticed_while_the_team_is_ended(tmp_path):
    refuses = shell(tmp_path, "train-0", f"trap 'echo bad value >&2; exit 2' TERM; {count_is(2)}; sleep 60 & wait")
    fails = shell(tmp_path, "train-1", f"{count_is(2)}; sleep 0.1; echo start >&2; exit 1")
    with pytest.raises(RoleFailedError, match=r"train-0 ended with exit code 2; (?s:.*)bad value") as caught:
        run([refuses, fails], trainer_restarts=5)
    assert caught.value.exit_code == 2
    assert starts(tmp_path, "train-1") == 1


def test_searchers_that_have_left_are_started_with_the_next_team(tmp_path):
    """They may have left because a trainer that failed afterwards told them to."""
    stream = io.StringIO()
    trainer = shell(
        tmp_path, "train-0", f"{count_is(2)}; sleep 0.2; [ $(wc -l < $PIDS) -ge 3 ] || exit 1; {count_is(4)}"
    )
    run([trainer], [shell(tmp_path, "search-0", "exit 0")], stream, trainer_restarts=1)
    assert "search-0 has left, and is started again with the trainer" in stream.getvalue()
    assert len(pids(tmp_path)) == 4


def test_a_hundred_restarts_leave_no_descriptor_and_no_zombie(tmp_path, no_pauses, monkeypatch):
    monkeypatch.setattr(supervise, "POLL_S", 0.001)
    descriptors, uncollected, done = [], [], tmp_path / "done"
    looking = threading.Lock()  # at files, which takes a descriptor

    def zombies() -> int:
        return sum(not alive(pid) for pid in children_of(os.getpid()) - before)

    def team():
        with looking:
            descriptors.append(len(os.listdir("/proc/self/fd")))
        last = f"[ $(wc -l < $PIDS) -gt 200 ] || exit 1; while [ ! -e {done} ]; do sleep 0.05; done"
        return [shell(tmp_path, "train-0", last)]

    def look() -> None:
        """Lets the last rank go when all that had ended before it is collected, by a launcher that still runs."""
        deadline, left = time.monotonic() + 60, -1
        while left and time.monotonic() < deadline:
            time.sleep(0.01)
            with looking:
                left = zombies() if len(pids(tmp_path)) > 200 else -1
        uncollected.append(left)
        done.touch()

    before = children_of(os.getpid())
    stream, watcher = io.StringIO(), threading.Thread(target=look)
    # Each leaves a process behind, and some in a session of their own.
    leaves = "sleep 60 & setsid sh -c 'sleep 60 & sleep 0.1' & exit 7"
    searcher = shell(tmp_path, "search-0", f"[ $(wc -l < $PIDS) -gt 200 ] && exec sleep 60; {leaves}")
    policy = LaunchConfig(trainer_restarts=1000, searcher_restarts=1000)
    with Supervisor(dict(os.environ), stream, policy, apart_s=APART_S) as supervisor:
        watcher.start()
        supervisor.run(team, [searcher])
    watcher.join()
    assert stream.getvalue().count("started again") >= 190
    assert len(set(descriptors[1:])) == 1
    assert uncollected == [0]
    assert children_of(os.getpid()) <= before


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_ranks_which_may_finish(tmp_path, number):
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
        f'trap "[ -e {saved} ] || touch {tmp_path}/too-early" TERM; while [ ! -e {saved} ]; do sleep 0.02; done',
    )

    def interrupt():
        eventually(lambda: (tmp_path / "ready").exists() and len(pids(tmp_path)) == 2)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with meanwhile(interrupt):
        supervisor = run([trainer], [searcher])
    assert supervisor.signal == number
    assert signal.getsignal(number) is before
    assert saved.exists()
    assert not (tmp_path / "too-early").exists()
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_second_signal_is_answered_and_changes_nothing(tmp_path):
    stream = io.StringIO()
    script = f"trap 'touch {tmp_path}/saving' TERM; echo >> {tmp_path}/ready; while [ ! -e {tmp_path}/end ]; do :; done"

    def interrupt():
        eventually((tmp_path / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually((tmp_path / "saving").exists)
        (tmp_path / "saving").unlink()
        os.kill(os.getpid(), signal.SIGINT)
        eventually(stream.getvalue)
        (tmp_path / "end").touch()

    with meanwhile(interrupt):
        supervisor = run([shell(tmp_path, "train-0", script)], stream=stream)
    assert supervisor.signal == signal.SIGTERM
    assert re.fullmatch(r"SIGINT: already stopping; train-0 may take another \d+ s to leave\n", stream.getvalue())
    assert not (tmp_path / "saving").exists()


def test_a_signal_after_the_team_has_ended_does_not_undo_the_end(tmp_path):
    stream = io.StringIO()
    trainer = shell(tmp_path, "train-0", f"while [ ! -e {tmp_path}/ready ]; do sleep 0.01; done")
    script = f"trap 'touch {tmp_path}/asked' TERM; echo >> {tmp_path}/ready; while [ ! -e {tmp_path}/end ]; do :; done"

    def interrupt():
        eventually((tmp_path / "asked").exists)
        os.kill(os.getpid(), signal.SIGINT)
        eventually(stream.getvalue)
        (tmp_path / "end").touch()

    with meanwhile(interrupt):
        supervisor = run([trainer], [shell(tmp_path, "search-0", script)], stream)
    assert supervisor.signal == 0
    assert "SIGINT: already stopping; search-0 may take another" in stream.getvalue()


def test_a_signal_ends_a_pause_and_nothing_is_started_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(restarts, "MOST_PAUSE_S", 60.0)
    stream = io.StringIO()

    def interrupt():
        eventually(lambda: "after 60 s" in stream.getvalue())
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(interrupt):
        supervisor = run([shell(tmp_path, "train-0", "exit 1")], stream=stream, trainer_restarts=5)
    assert supervisor.signal == signal.SIGTERM
    assert len(pids(tmp_path)) == 2


def test_a_signal_while_a_team_is_ended_stops_the_run(tmp_path):
    stream = io.StringIO()
    script = f"trap '' TERM; echo >> {tmp_path}/ready; while [ ! -e {tmp_path}/end ]; do :; done; exit 1"
    fails = shell(tmp_path, "train-1", f"while [ ! -e {tmp_path}/ready ]; do sleep 0.01; done; exit 1")

    def interrupt():
        eventually(stream.getvalue)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        (tmp_path / "end").touch()

    with meanwhile(interrupt):
        supervisor = run([shell(tmp_path, "train-0", script), fails], stream=stream, trainer_restarts=5)
    assert supervisor.signal == signal.SIGTERM
    assert len(pids(tmp_path)) == 2


@pytest.mark.parametrize(
    "script",
    ["echo ready >> {0}/ready; exec sleep 60", "trap 'exit 143' TERM; echo ready >> {0}/ready; while :; do :; done"],
    ids=["cannot handle it yet", "saved and says so"],
)
def test_a_rank_that_a_signal_stopped_is_no_failure(script, tmp_path):
    def interrupt():
        eventually(lambda: (tmp_path / "ready").exists() and pids(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(interrupt):
        supervisor = run([shell(tmp_path, "sft-0", script.format(tmp_path))], trainer_restarts=3)
    assert supervisor.signal == signal.SIGTERM
    assert len(pids(tmp_path)) == 1
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_rank_that_fails_after_a_signal_is_reported_and_not_started_anew(tmp_path):
    def interrupt():
        eventually(lambda: (tmp_path / "ready").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    script = f"trap 'exit 1' TERM; echo ready >> {tmp_path}/ready; while :; do :; done"
    with meanwhile(interrupt), pytest.raises(RoleFailedError, match="ended with exit code 1"):
        run([shell(tmp_path, "train-0", script)], trainer_restarts=3)


def test_a_rank_that_does_not_leave_after_a_signal_is_killed_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "TERM_S", 0.2)
    monkeypatch.setattr(supervise, "TEAM_S", 0.2)

    def interrupt():
        eventually(lambda: (tmp_path / "ready").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    script = f"trap '' TERM; echo ready >> {tmp_path}/ready; while :; do sleep 0.02; done"
    with meanwhile(interrupt), pytest.raises(RoleFailedError, match=r"did not leave within 0\.2 s .*: train-0"):
        run([shell(tmp_path, "train-0", script)])
    assert not any(alive(pid) for pid in pids(tmp_path))


def launcher(folder):
    """A launcher in a process of its own, with a rank and a searcher that both sleep."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from tba_megatron.config_search import LaunchConfig\n"
        "from tba_megatron.ops.roles import Role\n"
        "from tba_megatron.ops.supervise import Supervisor\n"
        f"folder = Path({str(folder)!r})\n"
        "argv = ('/bin/sh', '-c', 'echo $$ >> \"$PIDS\"; exec sleep 60')\n"
        "roles = [Role(name=n, argv=argv, log=folder / n, environment={'PIDS': str(folder / 'pids')})\n"
        "         for n in ('train-0', 'search-0')]\n"
        "with Supervisor(dict(os.environ), sys.stdout, LaunchConfig(), apart_s=600.0) as supervisor:\n"
        "    supervisor.run(lambda: roles[:1], roles[1:])\n"
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


# ---- output


def test_output_is_seen_for_a_visible_role_and_logged_for_others(tmp_path, capfd):
    script = "echo to stdout; echo to stderr >&2"
    run([shell(tmp_path, "seen", script, visible=True), shell(tmp_path, "hidden", script)])
    assert capfd.readouterr() == ("to stdout\n", "")
    assert (tmp_path / "logs" / "seen.log").read_text() == "to stderr\n"
    assert sorted((tmp_path / "logs" / "hidden.log").read_text().splitlines()) == ["to stderr", "to stdout"]


def test_a_role_gets_the_environment_it_was_given_and_its_own(tmp_path):
    role = shell(tmp_path, "a", 'echo "$FROM_RUN $PIDS"')
    with Supervisor({"FROM_RUN": "run"}, io.StringIO(), LaunchConfig(), apart_s=APART_S) as supervisor:
        supervisor.run(lambda: [role])
    assert role.log.read_text() == f"run {tmp_path / 'pids'}\n"
