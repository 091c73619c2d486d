"""A searcher's end of the control channel: a DEALER socket."""

from __future__ import annotations

from typing import Protocol

import zmq

from tba_megatron.transport.messages import FromSearcher, ToSearcher, decode_to_searcher, encode


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
    """The ``ControlChannel`` over ZeroMQ; for one thread. ``name`` keeps its identity over a lost connection."""

    def __init__(self, address: str, name: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        if name:
            self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 2000)  # zmq's default would wait for a dead trainer for ever
        self._socket.connect(address)

    def send(self, message: FromSearcher) -> None:
        self._socket.send(encode(message))

    def poll(self, timeout_s: float = 0.0) -> list[ToSearcher]:
        messages = []
        if self._socket.poll(round(timeout_s * 1000)):
            while self._socket.poll(0):
                messages.append(decode_to_searcher(self._socket.recv()))
        return messages

    def close(self, linger_s: float = 2.0) -> None:
        self._context.destroy(linger=round(linger_s * 1000))
