"""A whole run on one machine: warm start, then trainer ranks and searchers side by side, then the summary."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tba_megatron.config import Config
from tba_megatron.config_load import store_config
from tba_megatron.config_search import MAIN_SOURCE
from tba_megatron.dist import run_environment
from tba_megatron.errors import ModelError, RoleFailedError
from tba_megatron.ops.roles import STORE, Role, has_searchers, searchers, searchers_by_source, trainer_ranks
from tba_megatron.ops.run_lock import alone_in, make_run_folder
from tba_megatron.ops.summary import SUMMARY, is_complete, print_summary, read_summary, summarise, write_summary
from tba_megatron.ops.supervise import Supervisor
from tba_megatron.trainer.result import read_result
from tba_megatron.transport.rendezvous import remove_held, remove_rendezvous
from tba_megatron.transport.sockets import remove_sockets


def launch(config: Config, stream: TextIO) -> int:
    """Run everything and write ``summary.json``; the exit code. A run that is complete is left as it is.

    RoleFailedError when a role failed once too often, RunFolderError when another launch is at work in the run folder.
    """
    started_s = time.monotonic()
    folder = config.run.folder
    stored = folder / "config.yaml"
    _check_model(config)
    make_run_folder(folder)
    with (
        _alone_in(folder, stream) as lock,
        Supervisor(run_environment(), stream, config.launch, apart_s=_apart_s(config), inherited=(lock,)) as supervisor,
    ):
        store_config(config, folder)  # not before the folder is ours: the roles of another launch read this file
        if is_complete(config):
            summary = read_summary(folder)
            why = "its data has ended; " if summary["data_ended"] else "raise trainer.steps to go on, or "
            print(f"{folder} is complete; {why}choose another run.folder", file=stream)
            print_summary(summary, stream)
            return 0
        if config.sft.steps and not (config.start_model / "config.json").exists():
            print(f"warm start: {config.sft.steps} steps on demonstrations", file=stream, flush=True)
            supervisor.run(lambda: _new_ranks(config, "sft", stored))
        if not supervisor.signal:
            (folder / SUMMARY).unlink(missing_ok=True)  # that of fewer steps is no longer true
            print(f"training: {config.trainer.steps} steps, {_data(config)}", file=stream, flush=True)
            supervisor.run(lambda: _new_ranks(config, "train", stored), searchers(config, stored))
        if supervisor.signal:
            print(f"stopped by {signal.Signals(supervisor.signal).name}; start again to resume", file=stream)
            return 128 + supervisor.signal
    result = read_result(folder)
    if result is None:
        raise RoleFailedError(f"the trainer ended well but wrote no result; see {folder / 'logs'}")
    summary = summarise(result, config, time.monotonic() - started_s)
    write_summary(folder, summary)
    print_summary(summary, stream)
    return 0


def _check_model(config: Config) -> None:
    """ModelError before anything is written: a run folder belongs to the first configuration that it holds."""
    if not (config.model.path / "config.json").exists():
        raise ModelError(f"model.path: {config.model.path} holds no config.json; give a Hugging Face folder")


def _apart_s(config: Config) -> float:
    """How long after the first trainer rank the last one may end.

    The last thing that all do together is the export, and all its files are written then; or, in a run that is not
    complete, the last question whether all rollouts have come. What is left differs: a stage leader and rank 0 wait for
    a version that is on its way, in which the stages' parts, ready searchers, the group and a bucket have
    ``weights.timeout_s`` each; rank 0 writes the result, leaders close their files. For that they get what ranks wait
    for one another in training: whoever hangs in a collective has said by then, itself, what is wrong.
    """
    return config.trainer.distributed_timeout_s + 4 * config.weights.timeout_s


def _data(config: Config) -> str:
    if not has_searchers(config):
        return "a recording"
    sources = searchers_by_source(config)
    total = f"{sum(sources.values())} searcher(s)"
    if not sources.keys() - {MAIN_SOURCE}:
        return total
    return f"{total}: {', '.join(f'{n} {name}' for name, n in sources.items())}"


@contextmanager
def _alone_in(folder: Path, stream: TextIO) -> Iterator[int]:
    """Hold the run folder, cleared of what a launch that was killed may have left."""
    with alone_in(folder, stream) as lock:
        _clear(folder)
        try:
            yield lock
        finally:
            _clear(folder)


def _clear(folder: Path) -> None:
    """No role lives: what trainers have left, and the versions that were held for searchers that started."""
    _clear_of_trainers(folder)
    remove_held(folder / "weights")


def _clear_of_trainers(folder: Path) -> None:
    """Searchers must not follow the address of a trainer that is gone; a store is of use to the ranks of one start."""
    remove_rendezvous(folder)
    remove_sockets(folder)
    for store in folder.glob(f"{STORE}*"):
        store.unlink(missing_ok=True)


def _new_ranks(config: Config, command: str, stored: Path) -> Sequence[Role]:
    _clear_of_trainers(config.run.folder)
    return trainer_ranks(config, command, stored)
