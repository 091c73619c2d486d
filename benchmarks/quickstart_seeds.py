"""How much the quickstart learns, over seeds: one whole launch a seed, one JSON object at the end.

``python -m benchmarks.quickstart_seeds --seeds 0 1 2 --folder runs/seeds [section.key=value ...]``

A gain is ``accuracy_after - accuracy_before``, both sampled on the same held-out problems. A run that is complete is
not run again. Seconds describe the machine that was used, and what else ran on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CONFIG = "configs/quickstart.yaml"
STATES = ("in_flight", "held_untrained", "trained", "discarded", "lost")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all seeds in turn; 1 when a launch failed or a ledger does not add up."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quickstart_seeds", description="The gain of the quickstart over seeds."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"), help="one run folder a seed goes in here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    rows = [run_seed(seed, args.folder / f"seed-{seed}", args.overrides) for seed in args.seeds]
    print(json.dumps({"machine": machine(), "seeds": rows, **gains(rows)}, indent=2))
    return int(any(row["exit_code"] or row["ledger_gap"] for row in rows))


def run_seed(seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, object]:
    """One launch; its output goes to stderr, so that stdout holds the JSON alone."""
    command = (sys.executable, "-m", "tba_megatron.cli.main", "launch", CONFIG)
    done = subprocess.run(
        [*command, f"run.folder={folder}", f"run.seed={seed}", *overrides], stdout=sys.stderr, check=False
    )
    path = folder / "summary.json"
    return row(seed, done.returncode, json.loads(path.read_text()) if done.returncode == 0 else {})


def row(seed: int, exit_code: int, summary: dict) -> dict[str, object]:
    """What the table of a seed shows; None where the summary has no value."""
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    return {
        "seed": seed,
        "exit_code": exit_code,
        "accuracy_before": before,
        "accuracy_after": after,
        "gain": None if before is None or after is None else after - before,
        "steps": summary.get("steps"),
        "cpu_s": summary.get("cpu_s"),
        "wall_s": summary.get("wall_s"),
        "ledger_gap": (
            summary["rollouts_generated"] - sum(summary[f"rollouts_{state}"] for state in STATES) if summary else None
        ),
    }


def gains(rows: Sequence[dict]) -> dict[str, float | None]:
    found = [r["gain"] for r in rows if r["gain"] is not None]
    return {
        "median_gain": statistics.median(found) if found else None,
        "min_gain": min(found, default=None),
    }


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} CPU cores"


if __name__ == "__main__":
    sys.exit(main())
