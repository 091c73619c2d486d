"""What is left of a run in numbers: ``result.json``, written by rank 0 and read by the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

FILE = "result.json"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Ages are in optimizer steps. The ledger adds up: generated is the sum of the five states after it."""

    complete: bool
    stopped_by_signal: int
    attempt: int
    steps: int
    skipped_steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    weight_versions: int
    weight_transfers_failed: int
    trainer_wait_fraction: float  # of the time from the first step on
    searcher_idle_fraction: float  # of the searchers' time
    age_steps_p50: int
    age_steps_max: int
    startup_s: float
    rollouts_generated: int
    rollouts_in_flight: int
    rollouts_held_untrained: int
    rollouts_trained: int
    rollouts_discarded: int
    rollouts_discarded_duplicate: int
    rollouts_discarded_evicted_untrained: int
    rollouts_discarded_invalid: int
    rollouts_lost: int


def write_result(folder: Path, result: RunResult) -> None:
    partial = folder / f".{FILE}.{os.getpid()}"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    partial.rename(folder / FILE)


def read_result(folder: Path) -> RunResult | None:
    """None where the trainer wrote none."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=RunResult)
    except FileNotFoundError:
        return None
