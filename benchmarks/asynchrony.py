"""What not waiting is worth: the quickstart's task in lock-step and asynchronously, one JSON object at the end.

``python -m benchmarks.asynchrony --folder runs/asynchrony [--seed 0] [section.key=value ...]``

Both runs start from one warm start and make the same number of steps on the same machine, one after the other; the
first tenth of the steps is left out of all shares. Idle is what a searcher did not spend on generating and scoring: no
prompts (throttled), no room in the shards, weights being applied, and computing again what they made stale. Exit code 1
when a claim does not hold or a run failed. ``section.key=value`` are for both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CONFIG = "configs/quickstart.yaml"
START, MODES = "start", ("sync", "async")
WARM = 0.1  # of the steps, before which nothing counts
MOST_WAITING = 0.05
LEAST_FIRST_TIME = 0.5

Rows = Sequence[Mapping[str, float]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.asynchrony", description="The quickstart's task in lock-step and asynchronously."
    )
    parser.add_argument("--seed", type=int, default=0, help="of both runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/asynchrony"), help="one run folder a mode")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    for name in (START, *MODES):
        shutil.rmtree(args.folder / name, ignore_errors=True)
    overrides = [f"run.seed={args.seed}", *args.overrides]
    if _tba("sft", args.folder / START, overrides):
        return 1
    found = {mode: run(mode, args.folder, overrides) for mode in MODES}
    print(json.dumps(report(args.seed, found), indent=2))
    return int(not all(claims(found).values()))


def run(mode: str, folder: Path, overrides: Sequence[str]) -> dict[str, float | None]:
    """One launch from the shared warm start; its output goes to stderr, so that stdout holds the JSON alone."""
    own = folder / mode
    shutil.copytree(folder / START / "sft", own / "sft")
    if _tba("launch", own, [*overrides, f"weights.mode={mode}"]):
        raise SystemExit(f"the {mode} run failed; see {own / 'logs'}")
    rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    return shares(steps_of(rows), json.loads((own / "summary.json").read_text()))


def _tba(command: str, folder: Path, overrides: Sequence[str]) -> int:
    argv = (sys.executable, "-m", "tba_megatron.cli.main", command, CONFIG, f"run.folder={folder}", *overrides)
    return subprocess.run(argv, stdout=sys.stderr, check=False).returncode


def steps_of(rows: Sequence[Mapping]) -> Rows:
    """The rows of optimizer steps, in order."""
    return [row for row in rows if "time/step_s" in row]


def shares(steps: Rows, summary: Mapping) -> dict[str, float | None]:
    """What a run is judged by, once it is warm; the gain is over the whole loop."""
    first = int(WARM * len(steps))
    warm, before = steps[first:], steps[first - 1] if first else None
    step_s, wait_s = (sum(row[name] for row in warm) for name in ("time/step_s", "time/wait_rollout_s"))
    busy_s, idle_s = (warm[-1][name] - (before[name] if before else 0.0) for name in ("fleet/busy_s", "fleet/idle_s"))
    loop_s = sum(row["time/step_s"] + row["time/wait_rollout_s"] for row in steps)
    accuracy = summary["accuracy_before"], summary["accuracy_after"]
    gain = None if None in accuracy else accuracy[1] - accuracy[0]
    return {
        "steps": len(steps),
        "loop_s": loop_s,
        "steps_per_s": len(warm) / (step_s + wait_s),
        "trainer_waiting": wait_s / (step_s + wait_s),
        "searcher_idle": idle_s / (busy_s + idle_s),
        "first_time_share": sum(row["buffer/first_time_share"] for row in warm) / len(warm),
        "age_p50": summary["age_steps_p50"],
        "age_max": summary["age_steps_max"],
        "snapshot_share": sum(row["time/weight_snapshot_s"] for row in warm) / (step_s + wait_s),
        "probe_share": sum(row["time/weight_probe_s"] for row in warm) / (step_s + wait_s),
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[1],
        "gain_per_s": None if gain is None else gain / loop_s,
        "probe_alerts": summary["probe_alerts"],
    }


def claims(found: Mapping[str, Mapping[str, float | None]]) -> dict[str, bool]:
    """By name, whether it holds."""
    lockstep, free = found["sync"], found["async"]
    return {
        f"async: the trainer waits below {MOST_WAITING}": _below(free["trainer_waiting"], MOST_WAITING),
        f"async: searchers idle below {MOST_WAITING}": _below(free["searcher_idle"], MOST_WAITING),
        f"async: trained for the first time at least {LEAST_FIRST_TIME}": _at_least(
            free["first_time_share"], LEAST_FIRST_TIME
        ),
        "accuracy gained a second: async not below sync": _at_least(free["gain_per_s"], lockstep["gain_per_s"]),
    }


def _below(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value < limit


def _at_least(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value >= limit


def report(seed: int, found: Mapping[str, Mapping[str, float | None]]) -> dict[str, object]:
    speed = {mode: found[mode]["steps_per_s"] or 0.0 for mode in MODES}
    return {
        "machine": f"{len(os.sched_getaffinity(0))} CPU cores",
        "seed": seed,
        "runs": found,
        "steps_per_s_async_over_sync": speed["async"] / speed["sync"],
        "claims": claims(found),
    }


if __name__ == "__main__":
    sys.exit(main())
