"""A relay between searchers and trainer that delays, repeats and reorders what both say, by a seed.

It holds the run's secret, so it is let in at both ends. To searchers it is the trainer: they dial it, and in each
``Welcome`` it puts addresses of its own for those of the shards.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from tba_megatron.transport.messages import Welcome, decode_to_searcher, encode
from tba_megatron.transport.sockets import Dealer, Listen, Router

MOST_BYTES = 256 << 20
MOST_FRAMES = 8
_HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Shares are of messages. A late one waits up to ``late_s``; a repeated one comes again as late at most."""

    late: float = 0.3
    late_s: float = 0.3
    repeated: float = 0.15


@dataclass(kw_only=True, eq=False)
class _Way:
    """From one listening socket to one address of the trainer. ``lanes``: a connection for each peer."""

    front: Router
    target: str
    is_control: bool
    lanes: dict[bytes, Dealer] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class _Direction:
    """Of one lane. ``newest``: the largest number that has left, to see what is overtaken."""

    arrived: int = 0
    newest: int = -1


@dataclass(order=True)
class _Message:
    due_s: float
    number: int
    socket: zmq.Socket = field(compare=False)
    frames: Sequence[bytes] = field(compare=False)
    direction: _Direction = field(compare=False)
    place: int = field(compare=False)


class Relay:
    """Serves in a thread until ``close``. ``port`` is the control port that searchers dial.

    ``counts``: messages that were ``passed``, of them ``late``, ``repeated`` (one more than were said) and
    ``overtaken`` (a later one of the same lane has left before).
    """

    def __init__(self, trainer_port: int, secret: str, *, seed: int, faults: Faults) -> None:
        self._secret, self._faults, self._random = secret, faults, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._poller = zmq.Poller()
        self._ways: list[_Way] = []
        self._back: dict[zmq.Socket, tuple[_Way, bytes]] = {}
        self._directions: dict[tuple[zmq.Socket, bytes], _Direction] = {}
        self._waiting: list[_Message] = []
        self._n = 0
        control = self._open(f"tcp://{_HOST}:{trainer_port}", is_control=True)
        self.port = int(control.address.rpartition(":")[2])
        self._closing = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """RuntimeError when the relay itself has failed."""
        self._closing.set()
        self._thread.join()
        for way in self._ways:
            for dealer in way.lanes.values():
                dealer.close(0.0)
            way.front.close(0.0)
        if self._fault is not None:
            raise RuntimeError("the relay has failed") from self._fault

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                wait_s = min(0.1, max(0.0, self._waiting[0].due_s - time.monotonic())) if self._waiting else 0.1
                for socket, _ in self._poller.poll(round(wait_s * 1000)):
                    self._receive(socket)
                self._send_due()
        except BaseException as error:
            self._fault = error
            raise

    def _open(self, target: str, *, is_control: bool) -> Router:
        listen = Listen(sockets="tcp", host=_HOST, folder=Path("/nonexistent"))
        front = Router(listen, f"relay-{len(self._ways)}", self._secret, most_bytes=MOST_BYTES)
        self._ways.append(_Way(front=front, target=target, is_control=is_control))
        self._poller.register(front.socket, zmq.POLLIN)
        return front

    def _receive(self, socket: zmq.Socket) -> None:
        """Pass on what waits at one socket."""
        if socket in self._back:
            way, peer = self._back[socket]
            while socket.poll(0):
                frames = socket.recv_multipart()
                if way.is_control:
                    frames = [self._rewritten(frames[0])]
                self._pass(way.front.socket, [peer, *frames], peer)
            return
        way = next(way for way in self._ways if way.front.socket is socket)
        while (found := way.front.receive(MOST_FRAMES)) is not None:
            if found:
                peer, *frames = [frame.bytes for frame in found]
                self._pass(self._lane(way, peer).socket, frames, peer)

    def _lane(self, way: _Way, peer: bytes) -> Dealer:
        if peer not in way.lanes:
            identity = peer.decode() if way.is_control else ""
            dealer = Dealer(way.target, self._secret, identity=identity, most_bytes=MOST_BYTES)
            way.lanes[peer] = dealer
            self._back[dealer.socket] = (way, peer)
            self._poller.register(dealer.socket, zmq.POLLIN)
        return way.lanes[peer]

    def _rewritten(self, data: bytes) -> bytes:
        number, message = decode_to_searcher(data)
        if not isinstance(message, Welcome):
            return data
        return encode(msgspec.structs.replace(message, shards=tuple(map(self._address_for, message.shards))), number)

    def _address_for(self, shard: str) -> str:
        for way in self._ways:
            if way.target == shard:
                return way.front.address
        return self._open(shard, is_control=False).address

    def _pass(self, socket: zmq.Socket, frames: Sequence[bytes], peer: bytes) -> None:
        """Decide what becomes of a message."""
        direction = self._directions.setdefault((socket, peer), _Direction())
        place, direction.arrived = direction.arrived, direction.arrived + 1
        self.counts["passed"] += 1
        copies = 1 + (self._random.random() < self._faults.repeated)
        self.counts["repeated"] += copies - 1
        for copy in range(copies):
            late_s = 0.0
            if copy or self._random.random() < self._faults.late:
                late_s = self._random.uniform(0.0, self._faults.late_s)
                self.counts["late"] += 1
            self._n += 1
            due_s = time.monotonic() + late_s
            heapq.heappush(self._waiting, _Message(due_s, self._n, socket, frames, direction, place))

    def _send_due(self) -> None:
        while self._waiting and self._waiting[0].due_s <= time.monotonic():
            message = heapq.heappop(self._waiting)
            self.counts["overtaken"] += message.place < message.direction.newest
            message.direction.newest = max(message.direction.newest, message.place)
            message.socket.send_multipart(message.frames)
