"""``summary.json`` of a run: what it came to, whether it is complete, and the table at its end."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from tba_megatron.config import Config
from tba_megatron.errors import RunFolderError
from tba_megatron.ops.roles import has_searchers
from tba_megatron.trainer.result import RunResult, read_result

SUMMARY = "summary.json"


def is_complete(config: Config) -> bool:
    """All steps are made, or the data has ended; the final policy is measured and exported; the summary is written."""
    folder, result = config.run.folder, read_result(config.run.folder)
    if result is None or not result.complete or not (folder / SUMMARY).exists():
        return False
    if result.steps < config.trainer.steps:
        epochs = read_summary(folder)["epochs"]
        if not result.data_ended or (epochs is not None and epochs != config.search.epochs):
            return False
    measured = result.accuracy_after is not None or not config.evaluation.problems or not has_searchers(config)
    return measured and (folder / "hf").exists()


def read_summary(folder: Path) -> dict[str, object]:
    """RunFolderError when it is not what ``summarise`` makes."""
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text())
        result = msgspec.convert(summary, RunResult)  # what an older one lacks has its default
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); remove it and start again") from None
    return {"trainer_steps": result.steps, "epochs": None, **summary, **msgspec.structs.asdict(result)}


def write_summary(folder: Path, summary: dict[str, object]) -> None:
    """Whole or not at all."""
    partial = folder / f".{SUMMARY}.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.rename(folder / SUMMARY)


def summarise(result: RunResult, config: Config, wall_s: float) -> dict[str, object]:
    """The trainer's result with what the launcher knows: time, processor time of all roles, and paths."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        **msgspec.structs.asdict(result),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(sum(u.ru_utime + u.ru_stime for u in usage), 1),
        "seed": config.run.seed,
        "trainer_steps": config.trainer.steps,
        "epochs": config.search.epochs,
        "tensorboard": str(config.run.folder / "tensorboard"),
        "model": str(config.run.folder / "hf"),
    }


def print_summary(summary: dict[str, object], stream: TextIO) -> None:
    table = Table(show_header=False, title="summary", title_justify="left")
    discarded = (
        f"{summary['rollouts_discarded']} (duplicate {summary['rollouts_discarded_duplicate']}, evicted "
        f"{summary['rollouts_discarded_evicted_untrained']}, invalid {summary['rollouts_discarded_invalid']})"
    )
    steps = f"{summary['steps']} ({summary['skipped_steps']})"
    if summary["data_ended"]:
        steps = f"{summary['steps']} of {summary['trainer_steps']} ({summary['skipped_steps']}), the data has ended"
    rows = {
        "accuracy before": _percent(summary["accuracy_before"]),
        "accuracy after": _percent(summary["accuracy_after"]),
        "steps (skipped)": steps,
        "wall / cpu seconds": f"{summary['wall_s']} / {summary['cpu_s']}",
        "age in steps, median / max": f"{summary['age_steps_p50']} / {summary['age_steps_max']}",
        "trainer waited": _percent(summary["trainer_wait_fraction"]),
        "searchers idle": _percent(summary["searcher_idle_fraction"]),
        "searchers joined / lost": f"{summary['searchers_joined']} / {summary['searchers_lost']}",
        "weight versions published": summary["weight_versions"],
        "transfers failed / probe alerts": f"{summary['weight_transfers_failed']} / {summary['probe_alerts']}",
        "rollouts generated": summary["rollouts_generated"],
        "  trained": summary["rollouts_trained"],
        "  of all draws, first uses": _percent(summary["first_time_share"]),
        "  held untrained": summary["rollouts_held_untrained"],
        "  discarded": discarded,
        "  in flight / lost": f"{summary['rollouts_in_flight']} / {summary['rollouts_lost']}",
        "TensorBoard": f"tensorboard --logdir {summary['tensorboard']}",
        "model": summary["model"],
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console(file=stream, width=100).print(table)


def _percent(value: object) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, float) else "not measured"
