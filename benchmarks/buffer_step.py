"""A training step while two senders send as fast as they may, beside one without them."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.buffer_held import TOKEN, listen, take
from benchmarks.buffer_wire import Sizes, spawned, tell
from benchmarks.ranks import run_ranks
from benchmarks.trainer import Options, TrainerSide
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard
from tba_megatron.config_sections import TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.transport.rollouts import RolloutReceiver

MODEL = Options(layers=4, hidden=256, microbatch_tokens=2048, repetitions=0, share=0.5)
BLOCKS = 4  # of steps without senders and with them, in turn
CAPACITY = 100_000  # rollouts: from there on the oldest leave


def measure(steps: int, sizes: Sizes, disk: Path) -> dict[str, Any]:
    """Wall and CPU seconds of the trainer's thread, medians, and their ratios; ``steps`` of each kind."""
    return run_ranks(_measure, MODEL.trainer(), steps, sizes, disk)[0]


def _measure(groups: Groups, trainer: TrainerConfig, steps: int, sizes: Sizes, disk: Path) -> dict[str, Any]:
    from tba_megatron.trainer.loop import INTAKE_SHARE

    side, pairs = TrainerSide(groups, trainer, MODEL), MODEL.pairs("20 to 200 tokens")
    side.step(pairs)
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    taken = 0
    for block in range(BLOCKS):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=disk))
            stored = StoredShard(ReplayShard(CAPACITY, 100), replay=Path(folder) / "replay")
            stored.restore({}, [])
            stack.callback(stored.close)
            receiver = RolloutReceiver(listen(), TOKEN, log=stored.log)
            stack.callback(receiver.close)
            step_s = _steps(side, pairs, receiver, stored, steps // BLOCKS, found["without"], 1.0, INTAKE_SHARE)
            common = asdict(sizes) | {"address": receiver.address, "run": f"flood-{block}", "step": 0, "groups": 0}
            settings = [common | {"sender": s, "warm_up_groups": 64} for s in range(sizes.senders)]
            commands = (["benchmarks.buffer_held", json.dumps(each)] for each in settings)
            processes = stack.enter_context(spawned(commands))
            take(receiver, stored, 64 * sizes.senders)
            for process in processes:
                tell(process, "go")
            take(receiver, stored, 256)  # from here on they wait for credit
            before = stored.shard.next_arrival
            _steps(side, pairs, receiver, stored, steps // BLOCKS, found["with"], step_s, INTAKE_SHARE)
            taken += stored.shard.next_arrival - before
    medians = {kind: [statistics.median(column) for column in zip(*rows, strict=True)] for kind, rows in found.items()}
    return {
        "steps": len(found["with"]),
        "wall_s": {kind: round(wall_s, 4) for kind, (wall_s, _) in medians.items()},
        "thread_cpu_s": {kind: round(cpu_s, 4) for kind, (_, cpu_s) in medians.items()},
        "rollouts_taken_in_a_step": round(taken / len(found["with"])),
        "ratio": round(medians["with"][0] / medians["without"][0], 4),
        "ratio_of_thread_cpu_s": round(medians["with"][1] / medians["without"][1], 4),
    }


def _steps(
    side: TrainerSide,
    pairs: Any,
    receiver: RolloutReceiver,
    stored: StoredShard,
    n: int,
    found: list[tuple[float, float]],
    step_s: float,
    share: float,
) -> float:
    """Steps as the trainer's loop makes them: first what arrived, for a share of the last step's time and at least as
    many prompts as the step has.
    """
    for _ in range(n):
        started, cpu_s = time.perf_counter(), time.thread_time()
        for arrival in receiver.drain(share * step_s, len(pairs)):
            stored.take(arrival.batch, arrival.sender, arrival.sequence, arrival.end)
        side.step(pairs)
        step_s = time.perf_counter() - started
        found.append((step_s, time.thread_time() - cpu_s))
    return step_s
