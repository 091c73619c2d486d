"""What is left of a run in numbers: ``result.json``, written by rank 0 and read by the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tba_megatron.errors import RunFolderError

FILE = "result.json"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Ages are in optimizer steps. The ledger adds up: generated is the sum of the five states after it."""

    complete: bool
    stopped_by_signal: int
    steps: int
    skipped_steps: int
    # The rest is about searchers, and keeps these values where a run has none.
    attempt: int = 0
    data_ended: bool = False  # before all steps were made: every prompt was visited ``search.epochs`` times
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    weight_versions: int = 0
    weight_transfers_failed: int = 0  # rounds that a cohort did not get, and versions that a searcher could not take in
    probes_answered: int = 0
    probe_alerts: int = 0  # searchers that did not run what they were sent
    trainer_wait_fraction: float = 0.0  # of the time from the first step on
    searcher_idle_fraction: float = 0.0  # of the searchers' time
    searchers_joined: int = 0  # in this attempt; one that was lost and came back counts once
    searchers_lost: int = 0
    age_steps_p50: int = 0
    age_steps_max: int = 0
    first_time_share: float = 0.0  # of the rollouts in all steps, copies counted: those that were in no step before
    startup_s: float = 0.0
    rollouts_generated: int = 0
    rollouts_in_flight: int = 0
    rollouts_held_untrained: int = 0
    rollouts_trained: int = 0
    rollouts_discarded: int = 0
    rollouts_discarded_duplicate: int = 0
    rollouts_discarded_evicted_untrained: int = 0
    rollouts_discarded_invalid: int = 0
    rollouts_lost: int = 0


def write_result(folder: Path, result: RunResult) -> None:
    partial = folder / f".{FILE}.{os.getpid()}"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    partial.rename(folder / FILE)


def read_result(folder: Path) -> RunResult | None:
    """None where the trainer wrote none; RunFolderError when it is damaged."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=RunResult)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(f"{folder / FILE} cannot be read ({error}); remove it and start again") from None
