"""Processes of the crash test: one owns a shard, is killed and begins again; others send to it all the time."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import StoredShard, generations
from tba_megatron.rollout_batch import decode, encode
from tba_megatron.transport.rollout_sender import RolloutSender
from tba_megatron.transport.rollouts import RolloutReceiver
from tba_megatron.transport.sockets import Listen
from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutGroup, RolloutId, StopReason

TOKEN = "of-this-run"
GROUP_SIZE = 4
REPEATED = 16  # of so many rollouts the last one is as the one before it
TOKENS = 128
SEGMENT_BYTES = 1 << 18
BATCH_BYTES = 1 << 12  # a group a message
WINDOW_BYTES = 1 << 15
TURN_S = 0.01  # between two looks at what has arrived; with the window it limits how much there is to read again
ORPHAN_POLL_S = 0.5


# A sender


def completion(name: str, sequence: int) -> np.ndarray:
    """[TOKENS] that tell who made it and which one it is."""
    told = sequence - (sequence % REPEATED == REPEATED - 1)
    return np.array([ord(name[-1]), told, *range(told % 997, told % 997 + TOKENS - 2)], np.int32)


def rollout(name: str, sequence: int) -> Rollout:
    return Rollout(
        rollout_id=RolloutId(name, sequence),
        token_ids=completion(name, sequence),
        reward=sequence / 7,
        stop_reason=StopReason.EOS,
        spans=(PolicySpan(version=PolicyVersion(0, 3), start=0, end=TOKENS),),
        source="test",
        behaviour_logprobs=np.full(TOKENS, -sequence, np.float32),
    )


def prompt_id(name: str, sequence: int) -> str:
    return f"{name}-{sequence // REPEATED % 50}"


def group(name: str, first: int) -> RolloutGroup:
    rollouts = tuple(rollout(name, first + i) for i in range(GROUP_SIZE))
    tokens = np.frombuffer(prompt_id(name, first).encode(), np.uint8).astype(np.int32)
    return RolloutGroup(prompt_id=prompt_id(name, first), prompt_token_ids=tokens, rollouts=rollouts)


def send(address: str, name: str, link: Connection) -> None:
    """Sends as fast as it can; tells (made, acknowledged) rollouts when asked, and the same at last when told to end.

    It ends by itself when nobody is at the other end of ``link``.
    """
    sender = RolloutSender([address], TOKEN, name, resend_s=0.05, batch_bytes=BATCH_BYTES)
    made = 0
    while True:
        while sender.room:
            sender.send(group(name, made))
            made += GROUP_SIZE
        sender.flush()
        if not link.poll(0.001):
            continue
        try:
            if link.recv() == "end":
                link.send((made, made - sender.close(linger_s=60.0)))
                return
        except EOFError:
            return
        sender.flush()
        link.send((made, made - open_rollouts(sender)))


def open_rollouts(sender: RolloutSender) -> int:
    """Not acknowledged yet."""
    (lane,) = sender._lanes
    return lane.outbound.unacknowledged_rollouts + sum(len(group.rollouts) for group, _ in lane.pending)


# The owner of the shard


def begin(folder: Path) -> StoredShard:
    stored = StoredShard(ReplayShard(1 << 40, 1 << 40), replay=folder / "replay", segment_bytes=SEGMENT_BYTES)
    saved = sorted(folder.glob("step-*"))
    parts = {}
    if saved:
        with np.load(saved[-1] / "shard-0.npz") as columns:
            parts[0] = dict(columns)
    stored.restore(parts, generations(folder / "replay"))
    return stored


def report(stored: StoredShard) -> dict[str, dict[str, int]]:
    """Of each sender: rollouts received, held and trained, its messages; AssertionError where they are not one each."""
    shard, counts = stored.shard, stored.shard.counts()
    rows = shard.rows.living()
    received = Counter(counts.received)
    assert sum(received.values()) == counts.held_untrained + counts.trained + counts.duplicate
    told = {}
    for name, n in received.items():
        mine = rows[shard.rows.searcher[rows] == shard.names.number(name)]
        expected = [i for i in range(n) if i % REPEATED != REPEATED - 1]
        order = np.argsort(shard.rows.sequence[mine])
        mine = mine[order]
        assert shard.rows.sequence[mine].tolist() == expected, "lost or twice"
        assert shard.rows.reward[mine].tolist() == [i / 7 for i in expected]
        repeated = [1 + (i % REPEATED == REPEATED - 2 and i + 1 < n) for i in expected]
        assert shard.rows.copies[mine].tolist() == repeated
        told[name] = {"received": n, "messages": stored.delivered[name]}
    assert counts.duplicate == sum(n // REPEATED for n in received.values())
    assert len(shard) == sum(received.values()) - counts.duplicate
    assert counts.trained == int(np.count_nonzero(shard.rows.uses[rows]))
    return told


def check_payload(stored: StoredShard) -> None:
    """Every token and log-prob, and that what is held can be sent on."""
    shard = stored.shard
    prompts = shard.prompts.all_numbers()
    rows, sizes = shard.rows_of(prompts)
    batch = decode(encode(shard.batch(prompts, sizes, rows, shard.rows.copies[rows])))
    for one in batch.groups():
        for r in one.rollouts:
            name, sequence = r.rollout_id.searcher, r.rollout_id.sequence
            assert one.prompt_id == prompt_id(name, sequence)
            np.testing.assert_array_equal(r.token_ids, completion(name, sequence))
            assert r.behaviour_logprobs is not None and (r.behaviour_logprobs == -sequence).all()


def save(stored: StoredShard, folder: Path) -> None:
    """As a checkpoint is saved: it counts once it has its name."""
    number = len(list(folder.glob("step-*")))
    partial = folder / "partial"
    partial.mkdir(exist_ok=True)
    columns = stored.state_columns()
    stored.sync()
    np.savez(partial / "shard-0.npz", **columns)  # type: ignore[arg-type]
    partial.rename(folder / f"step-{number:08d}")


def own(folder: Path, port: int, out: int, save_after: int, until: Callable[[], bool]) -> None:
    """Owns the shard in ``folder`` until it is killed, or ``until`` says so; tells lines of JSON to ``out``.

    The first tells what was there; the second that something was acknowledged; the last, all. ``save_after`` messages
    a checkpoint is made, in which something has been trained; -1: none.
    """
    stored = begin(folder)
    tell(out, report(stored))
    receiver = RolloutReceiver(
        Listen(sockets="tcp", host="127.0.0.1", folder=folder),
        TOKEN,
        port=port,
        log=stored.log,
        delivered=stored.delivered,
        window_bytes=WINDOW_BYTES,
        fsync_every_s=0.02,
    )
    parent, looked_s, taken = os.getppid(), time.monotonic(), 0
    while not until():
        for arrival in receiver.drain():
            stored.take(arrival.batch, arrival.sender, arrival.sequence, arrival.end)
            if not taken:
                tell(out, {})
            taken += 1
            if taken == save_after:
                rows = stored.shard.rows.living()
                stored.shard.mark_trained(rows[:: 1 + taken])
                save(stored, folder)
                stored.reclaim(sorted(folder.glob("step-*")))
        if time.monotonic() > looked_s + ORPHAN_POLL_S:
            looked_s = time.monotonic()
            if os.getppid() != parent:
                return
        time.sleep(TURN_S)
    for arrival in receiver.drain():
        stored.take(arrival.batch, arrival.sender, arrival.sequence, arrival.end)
    receiver.close()
    stored.close()
    check_payload(stored)
    tell(out, report(stored))


def tell(out: int, value: object) -> None:
    os.write(out, json.dumps(value).encode() + b"\n")
