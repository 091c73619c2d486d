"""A whole run on one machine: warm start, then trainer ranks and searchers side by side, then the summary."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from tba_megatron.config import Config
from tba_megatron.config_load import store_config
from tba_megatron.config_sections import SearcherData
from tba_megatron.dist import STORE_FILE, run_environment
from tba_megatron.errors import ModelError, RoleFailedError, RunFolderError
from tba_megatron.ops.supervise import Role, Supervisor, tba
from tba_megatron.trainer.result import RunResult, read_result
from tba_megatron.transport.rendezvous import HELD, remove_rendezvous

SUMMARY = "summary.json"
_STORE = ".store-"


def launch(config: Config, stream: TextIO) -> int:
    """Run everything and write ``summary.json``; the exit code. A run that is complete is left as it is.

    RoleFailedError when a role failed, RunFolderError when another launch is at work in the run folder.
    """
    started_s = time.monotonic()
    folder = config.run.folder
    stored = folder / "config.yaml"
    _check_model(config)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder), Supervisor(run_environment(), stream) as supervisor:
        store_config(config, folder)  # not before the folder is ours: the roles of another launch read this file
        if is_complete(config):
            print(f"{folder} is complete; raise trainer.steps to go on, or choose another run.folder", file=stream)
            print_summary(_stored_summary(folder), stream)
            return 0
        if config.sft.steps and not (config.start_model / "config.json").exists():
            print(f"warm start: {config.sft.steps} steps on demonstrations", file=stream, flush=True)
            supervisor.run(_trainer_ranks(config, "sft", stored))
        if not supervisor.signal:
            (folder / SUMMARY).unlink(missing_ok=True)  # that of fewer steps is no longer true
            searchers = _searchers(config, stored)
            source = f"{len(searchers)} searcher(s)" if _has_searchers(config) else "a recording"
            print(f"training: {config.trainer.steps} steps, {source}", file=stream, flush=True)
            supervisor.run([*_trainer_ranks(config, "train", stored), *searchers])
        if supervisor.signal:
            print(f"stopped by {signal.Signals(supervisor.signal).name}; start again to resume", file=stream)
            return 128 + supervisor.signal
    result = read_result(folder)
    if result is None:
        raise RoleFailedError(f"the trainer ended well but wrote no result; see {folder / 'logs'}")
    summary = summarise(result, config, time.monotonic() - started_s)
    partial = folder / f".{SUMMARY}.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.rename(folder / SUMMARY)
    print_summary(summary, stream)
    return 0


def _check_model(config: Config) -> None:
    """ModelError before anything is written: a run folder belongs to the first configuration that it holds."""
    if not (config.model.path / "config.json").exists():
        raise ModelError(f"model.path: {config.model.path} holds no config.json; give a Hugging Face folder")


def is_complete(config: Config) -> bool:
    """All steps are made, the final policy is measured and exported, and the summary is written."""
    folder, result = config.run.folder, read_result(config.run.folder)
    if result is None or not result.complete or result.steps < config.trainer.steps:
        return False
    measured = result.accuracy_after is not None or not config.evaluation.problems or not _has_searchers(config)
    return measured and (folder / "hf").exists() and (folder / SUMMARY).exists()


def _stored_summary(folder: Path) -> dict[str, object]:
    """RunFolderError when it is not what ``summarise`` makes."""
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text())
        result = msgspec.convert(summary, RunResult)  # what an older one lacks has its default
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); remove it and start again") from None
    return {**summary, **msgspec.structs.asdict(result)}


def _has_searchers(config: Config) -> bool:
    return isinstance(config.trainer.data, SearcherData)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the run folder, cleared of what a launch that was killed may have left."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"run folder {folder} is in use by another tba launch; wait for it or choose another run.folder"
            ) from None
        _clear(folder)
        try:
            yield
        finally:
            _clear(folder)


def _clear(folder: Path) -> None:
    """Searchers must not follow the address of a trainer that is gone; a store is of no use after its launch."""
    remove_rendezvous(folder)
    for store in folder.glob(f"{_STORE}*"):
        store.unlink(missing_ok=True)
    for held in folder.glob(f"weights/{HELD}*"):
        shutil.rmtree(held, ignore_errors=True)


def _trainer_ranks(config: Config, command: str, stored: Path) -> list[Role]:
    """torchrun's variables, and a file to meet in: on one machine no port has to be free."""
    world_size = config.trainer.world_size
    store = config.run.folder.resolve() / f"{_STORE}{time.time_ns()}"
    return [
        Role(
            name=f"{command}-{rank}",
            argv=tba(command, stored),
            log=config.run.folder / "logs" / f"{command}-{rank}.log",
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                STORE_FILE: str(store),
            },
            visible=rank == 0,
        )
        for rank in range(world_size)
    ]


def _searchers(config: Config, stored: Path) -> list[Role]:
    return [
        Role(
            name=f"search-{i}",
            argv=tba("search", stored),
            log=config.run.folder / "logs" / f"search-{i}.log",
            vital=False,
        )
        for i in range(config.search.searchers if _has_searchers(config) else 0)
    ]


def summarise(result: RunResult, config: Config, wall_s: float) -> dict[str, object]:
    """The trainer's result with what the launcher knows: time, processor time of all roles, and paths."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        **msgspec.structs.asdict(result),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(sum(u.ru_utime + u.ru_stime for u in usage), 1),
        "seed": config.run.seed,
        "tensorboard": str(config.run.folder / "tensorboard"),
        "model": str(config.run.folder / "hf"),
    }


def print_summary(summary: dict[str, object], stream: TextIO) -> None:
    table = Table(show_header=False, title="summary", title_justify="left")
    discarded = (
        f"{summary['rollouts_discarded']} (duplicate {summary['rollouts_discarded_duplicate']}, evicted "
        f"{summary['rollouts_discarded_evicted_untrained']}, invalid {summary['rollouts_discarded_invalid']})"
    )
    rows = {
        "accuracy before": _percent(summary["accuracy_before"]),
        "accuracy after": _percent(summary["accuracy_after"]),
        "steps (skipped)": f"{summary['steps']} ({summary['skipped_steps']})",
        "wall / cpu seconds": f"{summary['wall_s']} / {summary['cpu_s']}",
        "age in steps, median / max": f"{summary['age_steps_p50']} / {summary['age_steps_max']}",
        "trainer waited": _percent(summary["trainer_wait_fraction"]),
        "searchers idle": _percent(summary["searcher_idle_fraction"]),
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
