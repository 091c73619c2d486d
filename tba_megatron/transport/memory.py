"""The seams without sockets: an in-process rollout queue and an in-process control channel.

Everything passes through the same codecs as on the wire, so what works here fails there only where the network does.
For one process and one shard: tests, and debugging a searcher without a trainer.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence

from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.rollout_batch import decode as decode_batch
from tba_megatron.rollout_batch import encode as encode_batch
from tba_megatron.transport.messages import (
    FromSearcher,
    ToSearcher,
    decode_from_searcher,
    decode_to_searcher,
    encode,
)
from tba_megatron.transport.rollouts import Arrival
from tba_megatron.types import RolloutGroup


class MemoryRollouts:
    """A ``RolloutOutbox`` and the ``RolloutInbox`` behind it; the two ends may live in two threads."""

    refused = corrupt = duplicates = gaps = forgotten = 0  # nobody else can reach it, and nothing is lost on the way
    unacknowledged = 0  # what is sent has arrived
    room = True

    def __init__(self, sender: str = "memory") -> None:
        self._sender = sender
        self._pending: list[RolloutGroup] = []
        self._messages: deque[bytes] = deque()
        self._drained = 0  # messages
        self._flushed_bytes = self._taken_bytes = 0  # each is written by one end alone

    @property
    def waiting_bytes(self) -> int:
        return self._flushed_bytes - self._taken_bytes

    def send(self, group: RolloutGroup) -> None:
        self._pending.append(group)

    def flush(self) -> None:
        if self._pending:
            payload = encode_batch(RolloutBatch.of_groups(self._pending))
            self._pending = []
            self._flushed_bytes += len(payload)
            self._messages.append(payload)

    def drain(self, max_seconds: float | None = None, min_groups: int = 1) -> Iterator[Arrival]:
        started_s, groups = time.monotonic(), 0
        for _ in range(len(self._messages)):
            payload = self._messages.popleft()
            arrival = Arrival(
                batch=decode_batch(payload),
                sender=self._sender,
                sequence=self._drained,
                n_bytes=len(payload),
                end=None,
            )
            self._drained += 1
            try:
                yield arrival
            finally:
                self._taken_bytes += arrival.n_bytes
            groups += arrival.batch.n_groups
            if groups >= min_groups and max_seconds is not None and time.monotonic() - started_s >= max_seconds:
                return

    def reconnect(self, addresses: Sequence[str], secret: str) -> int:
        """There is one shard, and it is never another."""
        return 0

    def close(self, linger_s: float = 0.0) -> int:
        self.flush()
        return 0


class MemoryControl:
    """A searcher's ``ControlChannel``; the trainer's end is ``tell`` and ``heard``."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.heard: deque[FromSearcher] = deque()

    def tell(self, message: ToSearcher) -> None:
        self._told.put(encode(message))

    def send(self, message: FromSearcher) -> None:
        self.heard.append(decode_from_searcher(encode(message))[1])

    def poll(self, timeout_s: float = 0.0) -> list[ToSearcher]:
        messages: list[ToSearcher] = []
        try:
            messages.append(decode_to_searcher(self._told.get(timeout=timeout_s))[1])
            while True:
                messages.append(decode_to_searcher(self._told.get_nowait())[1])
        except queue.Empty:
            return messages

    def close(self, linger_s: float = 0.0) -> None:
        pass
