"""This project's buffer with so many rollouts in it: in through the real transport, out through the real sampler.

Two senders (``RolloutSender``, processes of their own) make messages of the groups that they hold as Python objects;
the receiver takes them into a ``StoredShard``, with a log or without. ``python -m benchmarks.buffer_held SETTINGS`` is
such a sender; it obeys lines on stdin.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.buffer_wire import PATIENCE_S, Rate, Sizes, answer, spawned, tell
from benchmarks.peers.rollouts import GROUP, PROMPT_TOKENS, make_rollouts
from tba_megatron.buffer.choice import alone
from tba_megatron.buffer.sampler import RewardRecency
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard
from tba_megatron.config_sections import RewardRecencySampler
from tba_megatron.heap import keep_freed_memory
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.transport.rollout_sender import RolloutSender
from tba_megatron.transport.rollouts import RolloutReceiver
from tba_megatron.transport.sockets import Listen, sockets_folder
from tba_megatron.types import (
    PolicyHistory,
    PolicySpan,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    RolloutId,
    StopReason,
)

TOKEN = "benchmark"
GROUPS_A_STEP = 64  # prompts of an optimizer step, and groups of a batch that fills
STEPS_A_VERSION = 4  # batches that one policy writes
PROMPTS_A_STEP, K = 64, 8
SAMPLER = RewardRecencySampler(recent_probability=0.5, recent_age_steps=2, inverse_temperature=1.0)
RUN = PolicyHistory(base_steps=(0,))
IDLE_S = 0.0002  # between two looks, while a rate is measured
WAIT_S = 0.005  # between two looks of a searcher that has no credit
HUGE, HUGE_TOKENS = 10_000_000, 16


def groups_of(sizes: Sizes, sender: int, n_groups: int, run: str, step: int) -> list[RolloutGroup]:
    """What a searcher has to send; no two prompts are equal, so no two rollouts are."""
    distinct = min(n_groups, sizes.groups_of_sender(sizes.distinct))
    made = make_rollouts(distinct, seed=sizes.seed, sender=sender, n_tokens=sizes.tokens)
    spans = (PolicySpan(version=PolicyVersion(0, step), start=0, end=sizes.tokens),)
    return [
        RolloutGroup(
            prompt_id=f"{run}/{sender}/{g}",
            prompt_token_ids=made.prompts[g % distinct],
            rollouts=tuple(
                Rollout(
                    rollout_id=RolloutId(f"{run}-searcher-{sender}", g * GROUP + i),
                    token_ids=made.tokens[g % distinct, i],
                    reward=float(made.rewards[g % distinct, i]),
                    stop_reason=StopReason.EOS,
                    spans=spans,
                    source="benchmark",
                    behaviour_logprobs=made.logprobs[g % distinct, i],
                )
                for i in range(GROUP)
            ),
        )
        for g in range(n_groups)
    ]


def fill(stored: StoredShard, rollouts: int, sizes: Sizes) -> int:
    """Puts about so many in, batch by batch; the step of the policy that wrote the last ones."""
    template = RolloutBatch.of_groups(groups_of(sizes, 99, GROUPS_A_STEP, "fill", 0))
    random = np.random.default_rng(sizes.seed)
    step = 0
    for number in range(max(1, rollouts // (GROUPS_A_STEP * GROUP))):
        step = number // STEPS_A_VERSION
        spans = template.spans_P.copy()
        spans[:, 1] = step
        stored.shard.add(
            replace(
                template,
                prompt_ids=tuple(f"fill/{number}/{g}" for g in range(GROUPS_A_STEP)),
                reward_S=random.random(GROUPS_A_STEP * GROUP),
                sequence_S=template.sequence_S + number * GROUPS_A_STEP * GROUP,
                spans_P=spans,
            )
        )
    return step


def growth(rollouts: int, sizes: Sizes) -> dict[str, float]:
    """Resident memory that a shard of so many rollouts adds to that of an empty one, over the bytes of its arrays."""
    stored = StoredShard(ReplayShard(1 << 40, 100))
    fill(stored, GROUPS_A_STEP * GROUP, sizes)
    stored.shard.clear()
    before = psutil.Process().memory_info().rss
    fill(stored, rollouts, sizes)
    grown = psutil.Process().memory_info().rss - before
    raw = stored.shard.bytes
    return {"rollouts": len(stored.shard), "raw_bytes": raw, "grown_bytes": grown, "ratio": round(grown / raw, 3)}


def measure(held: int, sizes: Sizes, disk: Path) -> dict[str, Rate]:
    """``out`` and ``in, segments off|on`` of a shard that holds ``held`` rollouts: for each that comes one leaves."""
    rates = {}
    for name, log in (("off", False), ("on", True)):
        with tempfile.TemporaryDirectory(dir=disk) as folder:
            stored = StoredShard(ReplayShard(held, 100), replay=Path(folder) / "replay" if log else None)
            stored.restore({}, [])
            step = fill(stored, held + GROUPS_A_STEP * GROUP, sizes)
            if not log:
                rates["out"] = _out(stored.shard, step, sizes)
            rates[f"in, segments {name}"] = receive(stored, sizes, f"{held}-{name}", step)
            stored.close()
    return rates


def huge(sizes: Sizes) -> dict[str, Any]:
    """Ten million short rollouts and a budget of bytes that holds no more: rates, and memory over an empty shard."""
    sizes = replace(sizes, tokens=HUGE_TOKENS)
    budget = HUGE * (2 * 4 * HUGE_TOKENS + 4 * PROMPT_TOKENS // GROUP)
    stored = StoredShard(ReplayShard(1 << 40, 100, capacity_bytes=budget))
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    step = fill(stored, HUGE + HUGE // 10, sizes)
    filled_s = time.perf_counter() - started
    grown = psutil.Process().memory_info().rss - before
    shard = stored.shard
    return {
        "tokens": HUGE_TOKENS,
        "held": len(shard),
        "budget_bytes": budget,
        "held_bytes": shard.bytes,
        "evicted": shard.counts().evicted_untrained,
        "grown_bytes": grown,
        "grown_bytes_a_rollout": round(grown / len(shard)),
        "fill_rollouts_s": round((HUGE + HUGE // 10) / filled_s),
        "out": _out(shard, step, sizes).as_dict(),
        "in, segments off": receive(stored, sizes, "huge", step).as_dict(),
    }


def _out(shard: ReplayShard, step: int, sizes: Sizes) -> Rate:
    """Draws for steps: groups chosen, rollouts drawn and gathered, and marked as trained on."""
    sampler = RewardRecency(SAMPLER)
    n = max(8, sizes.rollouts // (PROMPTS_A_STEP * K))

    def draw(seed: int) -> None:
        drawn = sampler.draw(shard, alone(), PROMPTS_A_STEP, K, seed, RUN, step)
        shard.mark_trained(drawn.rows)

    draw(n)
    cpu_s, started = time.process_time(), time.perf_counter()
    for seed in range(n):
        draw(seed)
    wall_s = time.perf_counter() - started
    return Rate(rollouts=n * PROMPTS_A_STEP * K, wall_s=wall_s, cpu_s=time.process_time() - cpu_s)


def listen() -> Listen:
    """On ipc, as runs on one host do."""
    return Listen(sockets="ipc", host="127.0.0.1", folder=sockets_folder(Path("benchmark")) / "attempt")


def receive(stored: StoredShard, sizes: Sizes, run: str, step: int) -> Rate:
    """What the senders send, taken in; without the warm-up."""
    groups, warm_up = sizes.groups_of_sender(sizes.rollouts), sizes.groups_of_sender(sizes.warm_up)
    with ExitStack() as stack:
        receiver = RolloutReceiver(listen(), TOKEN, log=stored.log)
        stack.callback(receiver.close)
        common = asdict(sizes) | {"address": receiver.address, "run": run, "step": step, "groups": groups}
        settings = [common | {"sender": s, "warm_up_groups": warm_up} for s in range(sizes.senders)]
        commands = (["benchmarks.buffer_held", json.dumps(each)] for each in settings)
        processes = stack.enter_context(spawned(commands))
        take(receiver, stored, warm_up * sizes.senders)
        for process in processes:
            tell(process, "go")
        cpu_s = time.process_time()
        started = take(receiver, stored, groups * sizes.senders)
        wall_s = time.perf_counter() - started
        cpu_s = time.process_time() - cpu_s + sum(answer(process)["cpu_s"] for process in processes)
    return Rate(rollouts=groups * sizes.senders * GROUP, wall_s=wall_s, cpu_s=cpu_s)


def take(
    receiver: RolloutReceiver, stored: StoredShard, n_groups: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Takes ``n_groups`` in; when the first of them arrived. RuntimeError when nothing comes for too long."""
    first = None
    heard = clock()
    while n_groups > 0:
        for arrival in receiver.drain():
            first = clock() if first is None else first
            stored.take(arrival.batch, arrival.sender, arrival.sequence, arrival.end)
            n_groups -= arrival.batch.n_groups
            heard = clock()
        if clock() - heard > PATIENCE_S:
            raise RuntimeError(f"no rollouts came for {PATIENCE_S} s")
        time.sleep(IDLE_S)
    assert first is not None
    return first


def _send(settings: dict[str, Any]) -> dict[str, float]:
    """Sends the warm-up and, when told to, the groups, or groups without end where their number is 0."""
    sizes = Sizes(**{name: settings[name] for name in asdict(Sizes())})
    sender, run = settings["sender"], settings["run"]
    n_groups, warm_up = settings["groups"] or sizes.groups_of_sender(sizes.distinct), settings["warm_up_groups"]
    groups = groups_of(sizes, sender, n_groups + warm_up, run, settings["step"])
    outbox = RolloutSender([settings["address"]], TOKEN, f"{run}-{sender}")
    _send_all(outbox, groups[n_groups:])
    while outbox.unacknowledged:
        outbox.flush()
        time.sleep(IDLE_S)
    if sys.stdin.readline().strip() != "go":
        sys.exit("the benchmark that started this process is gone")
    cpu_s = time.process_time()
    _send_all(outbox, groups[:n_groups])
    turn = 0
    while not settings["groups"]:
        turn += 1
        again = [replace(group, prompt_id=f"{group.prompt_id}/{turn}") for group in groups[:n_groups]]
        _send_all(outbox, again, WAIT_S)
    left = outbox.close(PATIENCE_S)
    if left:
        sys.exit(f"{left} rollouts were not acknowledged")
    return {"cpu_s": time.process_time() - cpu_s}


def _send_all(outbox: RolloutSender, groups: list[RolloutGroup], wait_s: float = IDLE_S) -> None:
    for group in groups:
        while not outbox.room:
            outbox.flush()
            time.sleep(wait_s)
        outbox.send(group)
    outbox.flush()


if __name__ == "__main__":
    keep_freed_memory()
    print(json.dumps(_send(json.loads(sys.argv[1]))))
