"""A searcher's end of the control channel: a DEALER socket."""

from __future__ import annotations

import logging
from typing import Protocol

from tba_megatron.errors import shown
from tba_megatron.transport.messages import (
    FromSearcher,
    Hello,
    Refused,
    Seen,
    ToSearcher,
    Unknown,
    decode_to_searcher,
    encode,
)
from tba_megatron.transport.sockets import Dealer

_log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20  # of a message from the trainer: the manifest of a very large model


class ControlChannel(Protocol):
    """A searcher's side of the control channel, whatever carries it."""

    def send(self, message: FromSearcher) -> None: ...

    def poll(self, timeout_s: float = ...) -> list[ToSearcher]:
        """What has arrived; waits up to ``timeout_s`` for a first message."""
        ...

    def close(self, linger_s: float = ...) -> None:
        """Wait up to ``linger_s`` for what has not left yet."""
        ...


class ControlClient:
    """The ``ControlChannel`` over ZeroMQ; for one thread. ``name`` keeps its identity over a lost connection.

    ``refused`` counts messages that were none, ``repeated`` those that had come before.
    """

    def __init__(self, address: str, secret: str, name: str = "") -> None:
        self._dealer = Dealer(address, secret, identity=name, most_bytes=MOST_BYTES)
        self._next_number = 0
        self._seen = Seen()
        self.refused = self.repeated = 0

    def send(self, message: FromSearcher) -> None:
        if isinstance(message, Hello):
            self._seen = Seen()  # the trainer that hears it may count from 0
        self._dealer.socket.send(encode(message, self._next_number))
        self._next_number += 1

    def poll(self, timeout_s: float = 0.0) -> list[ToSearcher]:
        messages = []
        if self._dealer.socket.poll(round(timeout_s * 1000)):
            while self._dealer.socket.poll(0):
                message = self._decoded(self._dealer.socket.recv_multipart())
                if message is not None:
                    messages.append(message)
        return messages

    def _decoded(self, frames: list[bytes]) -> ToSearcher | None:
        try:
            (data,) = frames
            number, message = decode_to_searcher(data)
        except ValueError as error:
            self.refused += 1
            _log.warning("a message of the trainer that is none: %s", shown(str(error), 200))
            return None
        # Who has no name there is answered without numbers.
        if isinstance(message, Unknown | Refused) or self._seen.is_fresh(number):
            return message
        self.repeated += 1
        return None

    def close(self, linger_s: float = 2.0) -> None:
        self._dealer.close(linger_s)
