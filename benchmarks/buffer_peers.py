"""What stands beside this project's buffer: the package transferqueue, plain pickle and bare frames over ZeroMQ.

``python -m benchmarks.buffer_peers`` measures them in turn, with the same rollouts on the same cores; progress goes to
stderr, one JSON object to stdout. transferqueue needs ray and versions of its own, so it gets an environment in a cache
folder, made once (1.4 GB); where that fails, its entry is {"skipped": reason}.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.buffer_wire import ROOT, Rate, Sizes, bare_frames, plain_pickle

CACHE = Path("~/.cache/tba-megatron-bench")
PACKAGE = "transferqueue>=0.1.11,<0.2"
BATCHES = (64, 512, 4096)  # rollouts a put, and a fetch
MOST_STORED = 32_768  # rollouts in transferqueue: to find what is ready, a fetch looks at all that it holds
BARE, PICKLE, TRANSFERQUEUE = "bare frames, nothing stored", "pickle over ZeroMQ", "transferqueue"
INSTALL_S, RUN_S, END_S, POLL_S = 1200.0, 600.0, 15.0, 2.0

Part = Callable[[], Mapping[str, Rate]]


class Skipped(Exception):
    """Something to compare with cannot be had here; says why."""


def parts(sizes: Sizes, *, cache: Path = CACHE, batches: Sequence[int] = BATCHES) -> dict[str, Part]:
    """What ``interleaved`` runs, by name; each returns its rates by direction.

    transferqueue stores at most ``MOST_STORED`` rollouts.
    """
    return {
        BARE: lambda: bare_frames(sizes),
        PICKLE: lambda: plain_pickle(sizes),
        TRANSFERQUEUE: lambda: transferqueue(sizes, cache, batches),
    }


def interleaved(parts: Mapping[str, Part], repeats: int) -> dict[str, Any]:
    """Every part in turn, ``repeats`` times over: for each part and direction the measurement of median rate.

    ``all`` are the rates of all repeats, rollouts/s. A part that raises Skipped is not tried again.
    """
    found: dict[str, dict[str, list[Rate]]] = {name: {} for name in parts}
    skipped: dict[str, str] = {}
    for repeat in range(repeats):
        for name in [name for name in parts if name not in skipped]:
            started = time.perf_counter()
            try:
                measured = parts[name]()
            except Skipped as reason:
                skipped[name] = str(reason)
                say(f"{name}: skipped: {reason}")
                continue
            for direction, rate in measured.items():
                found[name].setdefault(direction, []).append(rate)
            rates = ", ".join(f"{rate.rollouts_s:,.0f}/s {direction}" for direction, rate in measured.items())
            say(f"{repeat + 1} of {repeats}: {name}: {rates} ({time.perf_counter() - started:.0f} s)")
    report: dict[str, Any] = {}
    for name, directions in found.items():
        report[name] = {"skipped": skipped[name]} if name in skipped else {}
        for direction, rates in directions.items():
            middle = statistics.median_low([rate.rollouts_s for rate in rates])
            chosen = next(rate for rate in rates if rate.rollouts_s == middle)
            report[name][direction] = chosen.as_dict() | {"all": [round(rate.rollouts_s) for rate in rates]}
    return report


def best(entry: Mapping[str, Any], direction: str, unit: str = "rollouts_s") -> float | None:
    """The highest median rate of a part in a direction, whatever its batches; None where there is none."""
    rates = [value[unit] for name, value in entry.items() if name.split(",")[0] == direction]
    return max(rates, default=None)


def transferqueue(sizes: Sizes, cache: Path = CACHE, batches: Sequence[int] = BATCHES) -> dict[str, Rate]:
    """Rates of the package for each batch: ``in, 64 a put`` and ``out, 64 a fetch``. Skipped when it cannot be had.

    One storage unit and one thread a process, which on two cores is its fastest.
    """
    python = environment(cache.expanduser())
    settings = {
        "senders": sizes.senders,
        "rollouts": min(sizes.rollouts, MOST_STORED),
        "tokens": sizes.tokens,
        "seed": sizes.seed,
        "batches": list(batches),
        "storage_units": 1,
    }
    report = _run(python, settings)
    say(", ".join(f"{name} {number}" for name, number in report["versions"].items()))
    rates = {}
    for direction, call in (("in", "put"), ("out", "fetch")):
        rates |= {f"{direction}, {n} a {call}": Rate(**found) for n, found in report[direction].items()}
    return rates


def environment(cache: Path) -> Path:
    """The Python of the environment that holds transferqueue, made where it is not; Skipped when that fails.

    torch is this environment's version where an index or a folder of wheels has it: any other may come with CUDA.
    """
    torch = version("torch")
    folder = cache / f"transferqueue-py{sys.version_info.major}.{sys.version_info.minor}-torch-{torch}"
    python, whole = folder / "bin" / "python", folder / "whole"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if whole.exists():
                return python
            say(f"making {folder}")
            _install([sys.executable, "-m", "venv", "--clear", str(folder)])
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", PACKAGE]
            try:
                _install([*pip, f"torch=={torch}"])
            except Skipped:
                _install(pip)
            whole.touch()
    except OSError as error:
        raise Skipped(f"no environment in {cache}: {error}") from None
    return python


def _install(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Skipped(f"{' '.join(command[1:])} did not end within {INSTALL_S:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise Skipped(f"{' '.join(command[1:])}: {lines[-1]}")


def _run(python: Path, settings: Mapping[str, Any]) -> Any:
    """What ``transferqueue_side`` prints; RuntimeError when it fails. No process that it started is left."""
    # Ray would make its workers nicer than the other sides, and its usage statistics need a network.
    extra = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TQ_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
    extra |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), "-W", "ignore", "-m", "benchmarks.peers.transferqueue_side", json.dumps(settings)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | extra, start_new_session=True, **pipes)
    family: set[psutil.Process] = set()
    deadline = time.monotonic() + RUN_S
    try:
        while True:
            family |= _descendants(process.pid)
            try:
                out, err = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"transferqueue did not end within {RUN_S:.0f} s") from None
    finally:
        if process.poll() is None:
            family |= _descendants(process.pid)
            process.kill()
            process.wait()
        _, left = psutil.wait_procs(list(family), timeout=END_S if process.returncode == 0 else 0.0)
        for each in left:
            each.kill()
        psutil.wait_procs(left, timeout=END_S)
    if process.returncode:
        raise RuntimeError(f"transferqueue ended with {process.returncode}:\n{err[-4000:]}")
    return json.loads(out.splitlines()[-1])


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def ratios(report: Mapping[str, Any], name: str, unit: str = "rollouts_s") -> dict[str, dict[str, float]]:
    """The best rate of the part ``name`` over that of every other part that was measured, by direction.

    With the unit ``rollouts_a_cpu_s`` it is what a busy machine disturbs least.
    """
    found: dict[str, dict[str, float]] = {}
    for direction in ("in", "out"):
        ours = best(report[name], direction, unit)
        others = {other: best(entry, direction, unit) for other, entry in report.items() if other != name}
        if ours is not None:
            found[direction] = {other: round(ours / rate, 4) for other, rate in others.items() if rate}
    return found


def use_cores(n: int) -> int:
    """This process and those that it starts use at most ``n`` of the cores that it may use; how many they are."""
    cores = sorted(os.sched_getaffinity(0))[:n]
    os.sched_setaffinity(0, cores)
    return len(cores)


def say(text: str) -> None:
    print(f"buffer: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=Sizes().rollouts, help="that are sent (%(default)s)")
    parser.add_argument("--tokens", type=int, default=Sizes().tokens, help="of a completion (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts (%(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="transferqueue's: rollouts a put")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of transferqueue's environment (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=(BARE, PICKLE, TRANSFERQUEUE), help="measure these alone")
    options = parser.parse_args(arguments)
    sizes = Sizes(rollouts=options.rollouts, tokens=options.tokens, seed=options.seed)
    started = time.perf_counter()
    chosen = parts(sizes, cache=options.cache, batches=options.batches)
    report = interleaved(
        {n: part for n, part in chosen.items() if not options.only or n in options.only}, options.repeats
    )
    whole: dict[str, Any] = {"parts": report}
    for key, unit in (("ratios", "rollouts_s"), ("ratios_by_cpu_s", "rollouts_a_cpu_s")):
        whole[key] = {name: ratios(report, name, unit) for name in report if name in (BARE, PICKLE)}
    whole["wall_s"] = round(time.perf_counter() - started, 1)
    print(json.dumps(whole, indent=1), flush=True)
    return 0


if __name__ == "__main__":
    use_cores(2)
    sys.exit(main())
