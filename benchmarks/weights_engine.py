"""What an update costs a real vLLM engine that generates all the time: a searcher's step loop in a child process.

The loop is that of a searcher without its tasks and rollouts: a step, a look at the control channel, and a staged
version is applied between two steps. The trainer's end publishes over the real path.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.ranks import build_model, run_ranks
from benchmarks.weights_wire import LIMIT_S, Desk, hear, join, milliseconds, receivers
from tba_megatron.config_search import VllmEngineConfig
from tba_megatron.config_sections import TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.types import PolicyVersion, SamplingSettings

REQUESTS, PROMPT, NEW_TOKENS = 16, 16, 64  # in the engine at a time; tokens of each
STEPS_BETWEEN = 40  # of the engine, from one update to the next


def measure(hf_config: Mapping[str, Any], updates: int) -> dict[str, Any]:
    """Updates of one engine; each figure over all updates but the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(folder, hf_config)
        with receivers(1, generate, folder, hf_config["vocab_size"], method="spawn") as connections:
            (found,) = run_ranks(_publish, TrainerConfig(), hf_config, connections, updates)
    return report(found["updates"][1:], found["steps_s"], found["busy_steps_s"])


def report(
    updates: Sequence[Mapping[str, float]], steps_s: Sequence[float], busy_steps_s: Sequence[float]
) -> dict[str, Any]:
    """Steps of the engine while nothing was under way, and while a version arrived; in neither are those that follow
    an update, which compute again what it made stale."""
    step_s = statistics.median(steps_s)
    pauses = [update["pause_s"] / (update["apply_s"] + step_s) for update in updates]
    return {
        "updates": len(updates),
        "engine_step_ms": milliseconds(steps_s),
        "engine_step_while_receiving_ms": milliseconds(busy_steps_s),
        "apply_ms": milliseconds([update["apply_s"] for update in updates]),
        "pause_ms": milliseconds([update["pause_s"] for update in updates]),
        "first_step_after_ms": milliseconds([update["next_step_s"] for update in updates]),
        "pause_of_apply_and_a_step": round(statistics.median(pauses), 3),
    }


def _write_model(folder: Path, hf_config: Mapping[str, Any]) -> None:
    """What ``build_model`` makes of the configuration, as a Hugging Face folder."""
    from tba_megatron.models.hf_writer import file_names, write_weights
    from tba_megatron.models.random_weights import RandomTensors
    from tba_megatron.models.registry import ARCHITECTURES

    (folder / "config.json").write_text(json.dumps(hf_config))
    architecture = ARCHITECTURES[hf_config["architectures"][0]]
    shape = architecture.read(hf_config)
    tensors = RandomTensors(architecture, shape, 0)
    write_weights(folder / file_names(1)[0], [(name, tensors[name]) for name in architecture.tensor_shapes(shape)])


def _publish(
    groups: Groups, trainer: TrainerConfig, hf_config: Mapping[str, Any], connections: list[Connection], updates: int
) -> Any:
    desk = Desk(groups, build_model(groups, trainer, hf_config))
    desk.admit(connections)
    for _ in range(updates):
        desk.publish(connections)
        hear(connections[0])  # it has generated for a while
    connections[0].send("stop")
    found = hear(connections[0])
    desk.close()
    return found


# ---- the child


def generate(connection: Connection, folder: Path, vocabulary: int) -> None:
    from tba_megatron.dist import prepare_searcher_environment

    prepare_searcher_environment(threads=1)
    import torch

    from tba_megatron.search.vllm_engine import VllmEngine

    torch.set_num_threads(1)
    engine = VllmEngine(
        folder,
        VllmEngineConfig(max_sequences=REQUESTS, kv_cache_bytes=64 << 20),
        version=PolicyVersion(0, 0),
        max_length=PROMPT + NEW_TOKENS,
        seed=0,
    )
    _, *args = connection.recv()
    loop = _Loop(engine, vocabulary, join(*args), connection)
    while not connection.poll():
        loop.turn()
    connection.send({"updates": loop.updates, "steps_s": loop.steps_s, "busy_steps_s": loop.busy_steps_s})
    time.sleep(LIMIT_S)  # until it is killed: how an engine ends is not measured


class _Loop:
    """One turn is a step of the engine and whatever is to be done between two steps."""

    def __init__(self, engine: Any, vocabulary: int, control: Any, connection: Connection) -> None:
        import numpy as np

        self.updates: list[dict[str, float]] = []
        self.steps_s: list[float] = []
        self.busy_steps_s: list[float] = []  # while a version arrived beside them
        self._engine, self._control, self._connection = engine, control, connection
        self._draw = lambda: np.random.default_rng(self._asked).integers(2, vocabulary, PROMPT).astype(np.int32)
        self._asked = 0
        self._offered = ""
        self._stopped_s = 0.0  # when the last step ended
        self._applied_s: float | None = None  # how long that took which was applied since
        self._since_update = 0

    def turn(self) -> None:
        while self._engine.n_unfinished < REQUESTS:
            self._asked += 1
            sampling = SamplingSettings(n=1, temperature=1.0, top_p=1.0, max_new_tokens=NEW_TOKENS, eos_ids=())
            self._engine.submit(str(self._asked), self._draw(), sampling)
        started_s = time.monotonic()
        self._engine.step()
        ended_s = time.monotonic()
        if self._applied_s is not None:
            pause_s = started_s - self._stopped_s
            self.updates.append({"apply_s": self._applied_s, "pause_s": pause_s, "next_step_s": ended_s - started_s})
            self._applied_s, self._since_update = None, 0
        else:
            (self.busy_steps_s if self._offered else self.steps_s).append(ended_s - started_s)
            self._since_update += 1
            if self.updates and self._since_update == STEPS_BETWEEN:
                self._connection.send("ready for the next")
        self._stopped_s = ended_s
        self._take_weights()

    def _take_weights(self) -> None:
        from tba_megatron.search.engine import ReceiveState
        from tba_megatron.transport.messages import Applied, Offer

        for message in self._control.poll():
            if isinstance(message, Offer):
                self._offered = message.version
                self._engine.begin_receive(message, LIMIT_S)
        status = self._engine.poll_receive() if self._offered else None
        if status is None or status.state not in (ReceiveState.STAGED, ReceiveState.FAILED):
            return
        self._connection.send((time.monotonic(), status.reason))
        if status.state is ReceiveState.STAGED:
            started_s = time.monotonic()
            self._engine.apply()
            self._applied_s = time.monotonic() - started_s
            self._control.send(Applied(version=self._offered, pause_s=self._applied_s))
        self._offered = ""
