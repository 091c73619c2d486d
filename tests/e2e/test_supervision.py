"""What ``tba launch`` does about roles that fail, with whole runs. The engine is the fake one."""

import os
import re
import signal

import pytest
from launching import (
    FAKE,
    eventually,
    kill,
    last_step,
    ledger_gap,
    outcome,
    processes_of,
    shared_memory,
    started,
    steps,
    summary_of,
    tba,
)

from tba_megatron.transport.sockets import sockets_folder

pytestmark = pytest.mark.slow

# A short lease: a searcher that was killed is found lost while the run still lasts.
SETTINGS = (FAKE, "sft.steps=2", "evaluation.problems=16", "transport.heartbeat_s=0.2", "transport.lease_s=3")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    before = shared_memory()
    yield
    assert processes_of(tmp_path) == []
    assert shared_memory() <= before
    assert not (tmp_path / "rendezvous.json").exists()
    assert list(tmp_path.glob(".store-*")) == []
    assert not sockets_folder(tmp_path).exists()


def assert_whole(folder, n_steps, attempt):
    summary = summary_of(folder)
    assert (summary["complete"], summary["steps"], summary["attempt"]) == (True, n_steps, attempt)
    assert (ledger_gap(summary), summary["rollouts_in_flight"]) == (0, 0)
    assert summary["accuracy_before"] is not None and summary["accuracy_after"] is not None
    assert steps(folder) == list(range(1, n_steps + 1))


def found(folder, pattern):
    """What matches in the log of rank 0."""
    log = folder / "logs" / "train-0.log"
    return re.findall(pattern, log.read_text()) if log.exists() else []


def kill_trainer(folder, process, at_step, n_kills):
    """SIGKILL for its last rank; the step that its successor resumes at."""
    eventually(lambda: last_step(folder) >= at_step, process)
    os.kill(processes_of(folder, "train")[-1], signal.SIGKILL)
    resumed = rf"attempt {n_kills} resumes at step (\d+) "
    eventually(lambda: found(folder, resumed), process)
    return int(found(folder, resumed)[0])


@pytest.mark.parametrize("sizes", [(), ("trainer.data_parallel=2", "search.searchers=2")], ids=["1 rank", "2 ranks"])
def test_a_trainer_that_is_killed_is_started_again_and_finishes(sizes, tmp_path):
    settings = (*SETTINGS, *sizes, "trainer.steps=150", "trainer.save_every_steps=10")
    with started(tmp_path, *settings, "launch.trainer_restarts=2", "launch.searcher_restarts=20") as process:
        resumed = kill_trainer(tmp_path, process, at_step=15, n_kills=1)
        kill_trainer(tmp_path, process, at_step=resumed + 15, n_kills=2)
        code, output = outcome(process)
    assert code == 0, output
    assert output.count("ended with signal SIGKILL; all trainer ranks are started again") == 2
    assert "Traceback" not in output
    assert_whole(tmp_path, 150, attempt=2)


def kill_searcher(folder, process, n_joined):
    eventually(lambda: len(found(folder, r"searcher \S+ joined")) >= n_joined, process)
    kill(folder, "search")


def test_a_searcher_may_be_killed_often_over_more_than_a_window(tmp_path):
    # A start takes longer than a window.
    settings = (*SETTINGS, "trainer.steps=300", "launch.searcher_restarts=1", "launch.window_s=0.5")
    with started(tmp_path, *settings) as process:
        for n_joined in range(1, 6):
            kill_searcher(tmp_path, process, n_joined)
        code, output = outcome(process)
    assert code == 0, output
    assert output.count("search-0 ended with signal SIGKILL; started again") == 5
    assert_whole(tmp_path, 300, attempt=0)


def test_a_launcher_that_is_killed_in_a_run_that_restarts_leaves_nothing(tmp_path):
    settings = (*SETTINGS, "launch.trainer_restarts=5", "trainer.data_parallel=2", "search.searchers=2")
    with started(tmp_path, *settings, "trainer.steps=100000") as process:
        eventually(lambda: last_step(tmp_path) >= 5, process)
        process.kill()
        process.wait()
        eventually(lambda: not processes_of(tmp_path))
    saved = last_step(tmp_path)
    done = tba("launch", tmp_path, *settings, f"trainer.steps={saved + 5}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(tmp_path, saved + 5, attempt=1)


def test_searchers_of_sources_are_started_beside_the_others(tmp_path):
    sources = "search.sources={hot: {searchers: 2, temperature: 1.5}}"
    done = tba("launch", tmp_path, *SETTINGS, "trainer.steps=20", sources)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training: 20 steps, 3 searcher(s): 1 searcher, 2 hot" in done.stdout
    logs = {path.stem for path in (tmp_path / "logs").glob("search-*")}
    assert logs == {"search-0", "search-hot-0", "search-hot-1"}
    assert_whole(tmp_path, 20, attempt=0)


def test_an_engine_that_cannot_be_built_ends_the_run_with_exit_code_2(tmp_path):
    """No restart helps: the configuration asks for a teacher that is not there."""
    missing = tmp_path / "teacher"
    sources = f"search.sources={{teacher: {{policy: {{kind: fixed, path: {missing}}}}}}}"
    mixed = "buffer.sampler.recent_probability=0.5"
    done = tba("launch", tmp_path, *SETTINGS, "trainer.steps=100000", sources, mixed)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "search-teacher-0 ended with exit code 2" in done.stderr
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr
