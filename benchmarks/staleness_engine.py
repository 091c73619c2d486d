"""The searcher's half of a run at a forced policy lag: a real vLLM in a child process, which the trainer's half asks.

One version is loaded, from the files that a run with ``weights.transport: files`` writes, then prompts are completed
with it; nothing overlaps, so who wrote what is exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from tba_megatron.config import Config
from tba_megatron.dist import die_with_parent
from tba_megatron.transport.messages import Offer
from tba_megatron.types import Completion, PolicyVersion, Prompt, SamplingSettings, TokenIds

_LIMIT_S = 600.0  # only against a hang
_POLL_S = 0.001


class EngineProcess:
    """The child, and how to ask it. It ends with ``close``, and with its parent."""

    def __init__(self, config: Config, model: Path) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, model), daemon=True)
        self._process.start()
        theirs.close()

    def load(self, offer: Offer) -> None:
        """Generate with this version from now on."""
        assert self._ask("load", msgspec.msgpack.encode(offer)) == offer.version

    def complete(self, prompts: Sequence[Prompt], sampling: SamplingSettings) -> list[tuple[Completion, ...]]:
        """``sampling.n`` completions of each prompt, in their order."""
        return self._ask("complete", [prompt.token_ids for prompt in prompts], sampling)

    def _ask(self, *question: object) -> Any:
        self._connection.send(question)
        if not self._connection.poll(_LIMIT_S):
            raise RuntimeError(f"the engine has not answered within {_LIMIT_S:g} s")
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join(_LIMIT_S)


def _serve(connection: Connection, config: Config, model: Path) -> None:
    from tba_megatron.cli.search import make_engine
    from tba_megatron.dist import prepare_searcher_environment

    die_with_parent()
    prepare_searcher_environment(threads=1)
    import torch

    torch.set_num_threads(1)
    engine = make_engine(config, model, PolicyVersion(0, 0), seed=config.run.seed)
    while True:
        try:
            what, *arguments = connection.recv()
        except EOFError:
            break
        connection.send(_load(engine, *arguments) if what == "load" else _complete(engine, *arguments))
    engine.close()


def _load(engine: Any, offer: bytes) -> str:
    from tba_megatron.search.engine import ReceiveState

    engine.begin_receive(msgspec.msgpack.decode(offer, type=Offer), _LIMIT_S)
    while (status := engine.poll_receive()).state is not ReceiveState.STAGED:
        if status.state is ReceiveState.FAILED:
            raise RuntimeError(status.reason)
        time.sleep(_POLL_S)
    engine.apply()
    return str(engine.version)


def _complete(engine: Any, prompts: Sequence[TokenIds], sampling: SamplingSettings) -> list[tuple[Completion, ...]]:
    for i, token_ids in enumerate(prompts):
        engine.submit(str(i), token_ids, sampling)
    found: dict[str, tuple[Completion, ...]] = {}
    while engine.n_unfinished:
        found.update(engine.step())
    return [found[str(i)] for i in range(len(prompts))]
