"""Signals, deaths and restarts of a whole run. The engine is the fake one: what is tested lies around it."""

import re
import signal
import socket
from collections.abc import Sequence

import pytest
from launching import (
    FAKE,
    eventually,
    kill,
    last_step,
    ledger_gap,
    outcome,
    processes_of,
    records,
    started,
    steps,
    summary_of,
    tba,
)

pytestmark = pytest.mark.slow

# A short lease: a searcher that was killed is found lost while the run still lasts.
SETTINGS = (FAKE, "sft.steps=2", "evaluation.problems=16", "transport.heartbeat_s=0.2", "transport.lease_s=3")


def long_run(*more: str) -> Sequence[str]:
    return (*SETTINGS, "trainer.steps=100000", *more)


def assert_whole(folder, n_steps, attempt):
    summary = summary_of(folder)
    assert (summary["complete"], summary["steps"], summary["attempt"]) == (True, n_steps, attempt)
    assert (ledger_gap(summary), summary["rollouts_in_flight"]) == (0, 0)
    assert summary["accuracy_before"] is not None and summary["accuracy_after"] is not None
    assert steps(folder) == list(range(1, n_steps + 1))
    assert processes_of(folder) == []
    return summary


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_launch_goes_on_from_there(tmp_path, number):
    with started(tmp_path, *long_run()) as process:
        eventually(lambda: last_step(tmp_path) >= 10, process)
        process.send_signal(number)
        code, output = outcome(process)
    assert code == 128 + number
    assert f"stopped by {number.name}; start again to resume" in output
    assert processes_of(tmp_path) == []
    saved = last_step(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{saved:08d}"]

    done = tba("launch", tmp_path, *SETTINGS, f"trainer.steps={saved + 10}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"attempt 1 resumes at step {saved} " in (tmp_path / "logs" / "train-0.log").read_text()
    assert_whole(tmp_path, saved + 10, attempt=1)


def test_a_signal_in_the_warm_start_is_no_failure(tmp_path):
    with started(tmp_path, FAKE, "sft.steps=100000", "trainer.steps=1") as process:
        eventually(lambda: processes_of(tmp_path, "sft"), process)
        process.terminate()
        code, output = outcome(process)
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; start again to resume" in output
    assert "Traceback" not in output
    assert processes_of(tmp_path) == []


def test_a_warm_start_that_is_stopped_goes_on_where_it_was(tmp_path):
    long = ("sft.steps=400", "sft.batch_size=8", "sft.held_out=0", "trainer.steps=2", "evaluation.problems=0")
    with started(tmp_path, FAKE, *long) as process:
        eventually(lambda: max(records(tmp_path, "sft/nll", "sft-log"), default=0) >= 5, process)
        process.send_signal(signal.SIGINT)
        code, output = outcome(process)
    assert code == 128 + signal.SIGINT, output
    assert "stopped by SIGINT; start again to resume" in output
    (saved,) = (tmp_path / "sft-checkpoints").iterdir()
    done = tba("launch", tmp_path, FAKE, *long)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed at step {int(saved.name.removeprefix('step-'))}" in (tmp_path / "logs" / "sft-0.log").read_text()
    assert list(records(tmp_path, "sft/nll", "sft-log")) == list(range(1, 401))


def test_a_run_resumes_at_other_parallel_sizes(tmp_path):
    settings = (*SETTINGS, "trainer.save_every_steps=3")
    for last, sizes in ((6, ()), (12, ("trainer.data_parallel=2",)), (18, ("trainer.tensor_parallel=2",))):
        done = tba("launch", tmp_path, *settings, *sizes, f"trainer.steps={last}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(tmp_path, 18, attempt=2)


def test_a_trainer_that_is_killed_is_reported_and_the_newest_checkpoint_is_resumed(tmp_path):
    with started(tmp_path, *long_run("trainer.save_every_steps=5")) as process:
        eventually(lambda: last_step(tmp_path) >= 12, process)
        kill(tmp_path, "train")
        code, output = outcome(process)
    assert code == 1
    assert "train-0 ended with signal SIGKILL" in output
    assert "Traceback" not in output
    assert processes_of(tmp_path) == []
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved % 5 == 0 and saved >= 10

    done = tba("launch", tmp_path, *SETTINGS, f"trainer.steps={saved + 10}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(tmp_path, saved + 10, attempt=1)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(tmp_path):
    with started(tmp_path, *long_run()) as process:
        eventually(lambda: last_step(tmp_path) >= 2, process)
        kill(tmp_path, "train")
        assert outcome(process)[0] == 1
    done = tba("launch", tmp_path, *SETTINGS, "trainer.steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(tmp_path, 5, attempt=1)


def test_a_searcher_that_is_killed_is_started_again_and_nothing_is_unaccounted_for(tmp_path):
    with started(tmp_path, *long_run()) as process:
        eventually(lambda: last_step(tmp_path) >= 10, process)
        kill(tmp_path, "search")
        killed_at = last_step(tmp_path)
        eventually(lambda: last_step(tmp_path) >= killed_at + 20, process)
        # The buffer may hold that many steps: the next one joins in its own time.
        log = tmp_path / "logs" / "train-0.log"
        eventually(lambda: len(re.findall(r"searcher \S+ joined", log.read_text())) == 2, process)
        eventually(lambda: "is lost" in log.read_text(), process)
        process.terminate()
        code, output = outcome(process)
    assert code == 128 + signal.SIGTERM
    assert "search-0 ended with signal SIGKILL; started again" in output

    last = last_step(tmp_path)
    done = tba("launch", tmp_path, *SETTINGS, f"trainer.steps={last + 5}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(tmp_path, last + 5, attempt=1)


def test_a_launcher_that_is_killed_leaves_no_process_and_can_be_started_again(tmp_path):
    with started(tmp_path, *long_run()) as process:
        eventually(lambda: last_step(tmp_path) >= 5, process)
        process.kill()
        process.wait()
        eventually(lambda: not processes_of(tmp_path))
    saved = last_step(tmp_path)
    done = tba("launch", tmp_path, *SETTINGS, f"trainer.steps={saved + 5}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(tmp_path, saved + 5, attempt=1)


def test_a_second_launch_in_the_same_folder_is_refused(tmp_path):
    with started(tmp_path, *long_run()) as process:
        eventually(lambda: processes_of(tmp_path), process)
        second = tba("launch", tmp_path, *long_run())
        assert process.poll() is None
        process.terminate()
    assert second.returncode == 2
    (line,) = second.stderr.splitlines()
    assert "is in use by another tba launch" in line


def test_a_control_port_that_is_taken_is_one_clear_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tcp = ("transport.sockets=tcp", f"transport.control_port={port}")
        done = tba("launch", tmp_path, *SETTINGS, "trainer.steps=2", *tcp)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if str(port) in line]
    assert "transport.control_port: cannot listen on 127.0.0.1" in line
    assert processes_of(tmp_path) == []
