"""``tba search``: one searcher. It finds the trainer through the run folder."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tba_megatron.cli.common import start_logging
from tba_megatron.config import Config
from tba_megatron.config_agree import refuse_other_problems
from tba_megatron.config_search import AddressRendezvous, FakeEngineConfig, VllmEngineConfig
from tba_megatron.dist import prepare_searcher_environment
from tba_megatron.errors import ConfigError, EngineError, ModelError, NoTrainerError, TaskError, TransportError
from tba_megatron.heap import keep_freed_memory
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.search.engine import SearchEngine
from tba_megatron.search.reference import ReferenceScorer
from tba_megatron.search.source import check_same_tokenizer, fixed_model
from tba_megatron.tasks.base import Task
from tba_megatron.tasks.registry import make_task
from tba_megatron.transport.rendezvous import HELD, MARKER, Rendezvous, read_rendezvous
from tba_megatron.transport.sockets import read_secret
from tba_megatron.types import PolicyVersion

_log = logging.getLogger(__name__)


def run(config: Config, args: argparse.Namespace) -> int:
    start_logging()
    keep_freed_memory()
    engine = config.search.engine
    if isinstance(engine, VllmEngineConfig):
        prepare_searcher_environment(engine.threads)  # before anything imports torch, which reads it once
    from tba_megatron.search.rollout_maker import new_name
    from tba_megatron.search.searcher import Searcher
    from tba_megatron.transport.control_client import ControlClient
    from tba_megatron.transport.rollout_sender import RolloutSender

    host = socket.gethostname()
    name = new_name(host)
    if isinstance(engine, VllmEngineConfig):
        import tba_megatron.search.vllm_engine  # noqa: F401  some seconds, while the trainer starts

    find = partial(_find, config, host)
    rendezvous = _wait_for_trainer(config, find)
    refuse_other_problems(config)
    with _start_weights(rendezvous) as (version, weights):
        tokenizer = HfTokenizer(weights)
        task = make_task(config.task, tokenizer, config.run.seed, config.model.max_length)
        if task.dropped_prompts:
            _log.warning("%d prompts are longer than model.max_length and are left out", task.dropped_prompts)
        _check_problems(task, config.evaluation.problems)
        model = fixed_model(config)
        if model is not None:
            check_same_tokenizer(weights, model)
            version = version.as_foreign()
        seed = zlib.crc32(name.encode())
        search_engine = make_engine(config, model or weights, version, seed)
    reference = make_reference(config, seed)
    _log.info("searcher %s starts with version %s (source %s)", name, search_engine.version, config.search.source)
    searcher = Searcher(
        config=config,
        engine=search_engine,
        task=task,
        tokenizer=tokenizer,
        name=name,
        host=host,
        rendezvous=rendezvous,
        find=find,
        dial=lambda found: ControlClient(found.address, found.token, name),
        connect=partial(RolloutSender, resend_s=config.transport.resend_s, most_bytes=config.most_message_bytes),
        reference=reference,
    )
    try:
        return searcher.run()
    except EngineError as error:
        # What is left of an engine that died, its threads and sockets, can keep a process from ending: and only one
        # that has ended is started again.
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def _check_problems(task: Task, problems: int) -> None:
    """ConfigError when there are fewer held-out problems: an evaluation would find out in the midst of a run."""
    try:
        task.held_out_prompts(problems)
    except TaskError as error:
        raise ConfigError([f"evaluation.problems: {error}"]) from None


def make_engine(config: Config, model: Path, version: PolicyVersion, seed: int) -> SearchEngine:
    """The engine that ``search.engine`` names."""
    engine = config.search.engine
    if isinstance(engine, VllmEngineConfig):
        from tba_megatron.search.vllm_engine import VllmEngine

        return VllmEngine(
            model,
            engine,
            version=version,
            max_length=config.model.max_length,
            seed=seed,
            behaviour_logprobs=config.search.behaviour_logprobs,
            in_flight=config.search.in_flight,
        )
    from tba_megatron.search.fake_engine import FakeEngine

    return FakeEngine(
        model, engine, version=version, seed=seed, dtype=config.trainer.dtype, in_flight=config.search.in_flight
    )


def make_reference(config: Config, seed: int) -> ReferenceScorer | None:
    """Who scores completions under the start model, where that is searchers' work. ModelError where it is not there."""
    if config.objective.reference.placement != "searcher":
        return None
    engine, model = config.search.engine, config.start_model
    if isinstance(engine, FakeEngineConfig):
        from tba_megatron.search.fake_engine import FakeReference

        return FakeReference()
    if not (model / "config.json").is_file():
        raise ModelError(
            f"objective.reference.placement: searcher needs the start model in {model}, which has no config.json here; "
            f"keep it on a disk that searchers share, or choose device"
        )
    from tba_megatron.search.vllm_reference import VllmReference

    return VllmReference(
        model,
        engine,
        temperature=config.objective.temperature,
        max_length=config.model.max_length,
        seed=seed,
    )


def _wait_for_trainer(config: Config, find: Callable[[], Rendezvous | None]) -> Rendezvous:
    deadline_s = time.monotonic() + config.transport.patience_s
    while time.monotonic() < deadline_s:
        found = find()
        if found is not None and (Path(found.weights) / MARKER).exists():
            return found
        time.sleep(0.1)
    by_address = isinstance(config.transport.rendezvous, AddressRendezvous)
    what = f"{MARKER} in its weights" if by_address else "rendezvous.json and its weights"
    raise NoTrainerError(
        f"no trainer wrote {what} in {config.run.folder} within {config.transport.patience_s:g} s; is it running, with "
        f"the same run.folder?"
    )


def _find(config: Config, host: str) -> Rendezvous | None:
    """Where the trainer is as of now; TransportError when it cannot be reached from ``host``."""
    where = config.transport.rendezvous
    if isinstance(where, AddressRendezvous):
        return Rendezvous(
            address=f"tcp://{config.transport.host}:{config.transport.control_port}",
            host=config.transport.host,
            token=read_secret(where.key_file),
            attempt=-1,
            weights=str((config.run.folder / "weights").resolve()),
        )
    found = read_rendezvous(config.run.folder)
    if found is not None and found.address.startswith("ipc:") and found.host != host:
        raise TransportError(
            f"transport.sockets: the trainer listens on ipc sockets of host {found.host}, and this is {host}; set "
            f"transport.sockets to tcp and transport.host to an address of {found.host}"
        )
    return found


@contextmanager
def _start_weights(rendezvous: Rendezvous) -> Iterator[tuple[PolicyVersion, Path]]:
    """The newest version, in a folder that stays while it is loaded: the trainer removes its own as newer ones come."""
    from tba_megatron.transport.weight_files import hold_newest

    weights = Path(rendezvous.weights)
    try:
        folder = tempfile.TemporaryDirectory(prefix=HELD, dir=weights)
    except OSError as error:
        raise TransportError(f"{weights} cannot be written to ({error}); is it on a disk that all share?") from None
    with folder as name:
        yield hold_newest(weights, Path(name)), Path(name)
