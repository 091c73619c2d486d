"""The seams without sockets: an in-process rollout queue and an in-process control channel.

Everything passes through the same codecs as on the wire, so what works here fails there only where the network does.
For one process and one shard: tests, and debugging a searcher without a trainer.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator

from tba_megatron.transport.messages import (
    FromSearcher,
    ToSearcher,
    decode_from_searcher,
    decode_to_searcher,
    encode,
)
from tba_megatron.transport.rollouts import decode_group, encode_group
from tba_megatron.types import RolloutGroup


class MemoryRollouts:
    """A ``RolloutOutbox`` and the ``RolloutInbox`` behind it; the two ends may live in two threads."""

    refused = 0  # nobody else can reach it

    def __init__(self) -> None:
        self._messages: deque[list[bytes]] = deque()

    def send(self, group: RolloutGroup) -> None:
        self._messages.append(encode_group(group))

    def drain(self) -> Iterator[RolloutGroup]:
        while self._messages:
            yield decode_group(self._messages.popleft())

    def close(self, linger_s: float = 0.0) -> None:
        pass


class MemoryControl:
    """A searcher's ``ControlChannel``; the trainer's end is ``tell`` and ``heard``."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.heard: deque[FromSearcher] = deque()

    def tell(self, message: ToSearcher) -> None:
        self._told.put(encode(message))

    def send(self, message: FromSearcher) -> None:
        self.heard.append(decode_from_searcher(encode(message)))

    def poll(self, timeout_s: float = 0.0) -> list[ToSearcher]:
        messages: list[ToSearcher] = []
        try:
            messages.append(decode_to_searcher(self._told.get(timeout=timeout_s)))
            while True:
                messages.append(decode_to_searcher(self._told.get_nowait()))
        except queue.Empty:
            return messages

    def close(self, linger_s: float = 0.0) -> None:
        pass
