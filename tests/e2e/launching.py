"""Start ``tba`` as users do, in a process of its own, and look at what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICKSTART = "configs/quickstart.yaml"
LIMIT_S = 600.0  # a bound on a hang, never a measure
FAKE = "search.engine={kind: fake}"

# Of issue and README: what anybody may rely on in summary.json.
SUMMARY_KEYS = {
    "accuracy_before",
    "accuracy_after",
    "steps",
    "wall_s",
    "cpu_s",
    "weight_versions",
    "trainer_wait_fraction",
    "searcher_idle_fraction",
    "age_steps_p50",
    "age_steps_max",
    "rollouts_generated",
    "rollouts_in_flight",
    "rollouts_held_untrained",
    "rollouts_trained",
    "rollouts_discarded",
    "rollouts_lost",
}


def arguments(command: str, folder: Path, *overrides: str, config: str = QUICKSTART) -> list[str]:
    return [sys.executable, "-m", "tba_megatron.cli.main", command, config, f"run.folder={folder}", *overrides]


def tba(command: str, folder: Path, *overrides: str, config: str = QUICKSTART) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        arguments(command, folder, *overrides, config=config),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@contextmanager
def started(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A launch to interfere with; what is left of it at the end of the block is ended, by its id."""
    process = subprocess.Popen(
        arguments("launch", folder, *overrides),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=LIMIT_S)
        except (ValueError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output, at its end."""
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def eventually(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for ``condition``; AssertionError with the output when ``process`` ends before."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {outcome(process)[1]}")
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def processes_of(folder: Path, command: str = "") -> list[int]:
    """Ids of living processes of this run folder: roles that run ``command``, or all, with what they started."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            stderr = os.readlink(entry / "fd" / "2")
        except OSError:
            continue
        role = f"{folder}/config.yaml" in words
        if (role and command in words) if command else (role or stderr.startswith(f"{folder}/logs/")):
            found.append(int(entry.name))
    return found


def kill(folder: Path, command: str) -> None:
    """SIGKILL for the one process of ``folder`` that runs ``command``."""
    (pid,) = processes_of(folder, command)
    os.kill(pid, signal.SIGKILL)


def shared_memory() -> set[str]:
    """What lies in /dev/shm and is not in use by a living process, which may belong to somebody else.

    A semaphore of another process has a name for a moment before it is mapped: what has gone by a second look is not
    left behind.
    """
    first = _unmapped()
    time.sleep(0.2)
    return first & _unmapped()


def _unmapped() -> set[str]:
    names = {entry.name for entry in Path("/dev/shm").iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            names -= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
        except OSError:
            continue
    return names


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def ledger_gap(summary: dict) -> int:
    states = ("in_flight", "held_untrained", "trained", "discarded", "lost")
    return summary["rollouts_generated"] - sum(summary[f"rollouts_{state}"] for state in states)


def records(folder: Path, metric: str, log: str = "") -> dict[int, float]:
    """``metric`` by step, in the order of the file; a step that is logged twice is an error."""
    path = folder / log / "metrics.jsonl"
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if not line.endswith("}"):
            continue  # being written
        record = json.loads(line)
        if metric in record:
            assert record["step"] not in found, f"step {record['step']} has two lines"
            found[record["step"]] = record[metric]
    return found


def steps(folder: Path) -> list[int]:
    return list(records(folder, "optim/loss"))


def last_step(folder: Path) -> int:
    return max(steps(folder), default=0)


def last_metrics(folder: Path) -> dict[str, float]:
    """The newest line of ``metrics.jsonl`` that is a step's; empty before the first. Cheap, for who asks often."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 15)))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if b'"optim/loss"' in line and line.startswith(b"{") and line.endswith(b"}"):
            return json.loads(line)
    return {}


def rollouts_of(folder: Path, *settings: str) -> list[dict[str, str]]:
    """What ``tba rollouts`` shows of all that is stored."""
    done = subprocess.run(
        [sys.executable, "-m", "tba_megatron.cli.main", "rollouts", str(folder), "limit=0", *settings],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names, *lines = [line for line in done.stdout.splitlines() if not line.startswith("# ")]
    return [dict(zip(names.split("\t"), line.split("\t"), strict=True)) for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder, to see whether anything changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
