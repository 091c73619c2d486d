"""Rollouts on the wire, and the shard's end of it; a searcher's end is in rollout_sender.py.

A message is [token, head, payload]: who sends it, its number and checksum, and an encoded ``RolloutBatch``; without a
payload it only asks for an answer. A thread of the shard receives while the trainer computes: it writes each message
to the log, if there is one, and acknowledges it after that. What is sent when, and again, is decided in delivery.py.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
import xxhash
import zmq

from tba_megatron.errors import TbaError, TransportError, shown
from tba_megatron.rollout_batch import RolloutBatch, decode
from tba_megatron.transport.delivery import Inbound, Verdict
from tba_megatron.types import LogPosition, RolloutGroup

_log = logging.getLogger(__name__)

_WAKE = b"wake"
_TURN_MESSAGES = 16  # received between two looks at what the trainer has taken in
_COPY_BYTES = 1 << 16  # shorter ones may lie unaligned in a buffer of ZeroMQ's, which they would keep alive

_Number = Annotated[int, msgspec.Meta(ge=0)]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Of a message."""

    sender: str  # an incarnation: a searcher that starts again is another one
    sequence: _Number
    checksum: int  # XXH3 of the payload, 64 bits


_encoder = msgspec.msgpack.Encoder()
_heads = msgspec.msgpack.Decoder(Head)


def owner_of(prompt_id: str, n_shards: int) -> int:
    """The shard of a prompt: a hash that is the same in every process and every run."""
    return zlib.crc32(prompt_id.encode()) % n_shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A message that is safe: ``end`` is the end of its record in the log, None without a log."""

    batch: RolloutBatch
    sender: str
    sequence: int
    n_bytes: int
    end: LogPosition | None


class ArrivalLog(Protocol):
    """Where messages are kept before they are acknowledged.

    ``append`` returns the end of the record once it is with the operating system; ``sync``, which another thread calls
    meanwhile, once all before it is on the disk. A TbaError of either ends the receiving.
    """

    def append(self, sender: str, sequence: int, payload: memoryview, checksum: int) -> LogPosition: ...

    def sync(self) -> None: ...


class RolloutInbox(Protocol):
    """Where a shard's batches arrive. The counts are of messages."""

    @property
    def refused(self) -> int:
        """Those without the run's token, and those that are no batch of rollouts."""
        ...

    @property
    def corrupt(self) -> int: ...

    @property
    def duplicates(self) -> int: ...

    @property
    def gaps(self) -> int: ...

    @property
    def waiting_bytes(self) -> int:
        """Arrived and not taken in."""
        ...

    def drain(self, max_seconds: float | None = None, min_groups: int = 1) -> Iterator[Arrival]:
        """What has arrived by now, without waiting; after ``max_seconds`` only until ``min_groups`` groups were given.

        An arrival is taken in, and gives its sender new credit, when the next is asked for.
        """
        ...

    def close(self) -> object: ...


class RolloutOutbox(Protocol):
    """A searcher's way to the shards; for one thread."""

    @property
    def room(self) -> bool:
        """False while more waits to be sent than a message may hold: make no new rollouts."""
        ...

    def send(self, group: RolloutGroup) -> None: ...

    def flush(self) -> None:
        """Send what may be sent, hear answers, send again what is due; never waits. Call it often."""
        ...

    def close(self, linger_s: float = ...) -> int:
        """Wait up to ``linger_s`` for acknowledgements; the number of rollouts without one."""
        ...


class RolloutReceiver:
    """A shard's inbox; ``address`` is where it listens.

    ``delivered`` says for senders of before how many of their messages the log holds. Of all senders together, about
    ``window_bytes`` wait at most. With a log, it is synced every ``fsync_every_s`` when there is something new; 0:
    never. TransportError when ``host`` cannot be listened on. ``drain`` raises what has ended the receiving.
    """

    def __init__(
        self,
        host: str,
        token: str,
        *,
        port: int = 0,
        log: ArrivalLog | None = None,
        delivered: Mapping[str, int] | None = None,
        window_bytes: int = 256 << 20,
        fsync_every_s: float = 0.0,
    ) -> None:
        self._token, self._arrival_log, self._fsync_every_s = token.encode(), log, fsync_every_s
        self._inbound = Inbound(window_bytes, delivered)
        self._peers: dict[str, bytes] = {}  # where a sender was last heard
        self._arrived: deque[Arrival] = deque()
        self._taken: deque[Arrival] = deque()
        self._arrived_bytes = self._taken_bytes = 0  # each is written by one thread alone
        self._fault: TbaError | None = None
        self._closing = threading.Event()
        self._written = threading.Event()  # something in the log may not be synced
        self._woken = False
        self.refused = self.corrupt = self.duplicates = self.gaps = 0
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        try:
            self._router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(f"transport.host: cannot listen on {host}: {error}") from None
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_in, self._wake_out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        self._threads = [threading.Thread(target=self._run, args=(self._serve,), name="receive-rollouts", daemon=True)]
        if log is not None and fsync_every_s > 0:  # apart, as a slow disk must not hold up what arrives
            self._threads.append(
                threading.Thread(target=self._run, args=(self._keep_synced,), name="sync-rollouts", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    # ---- the trainer's thread

    @property
    def waiting_bytes(self) -> int:
        return self._arrived_bytes - self._taken_bytes

    def drain(self, max_seconds: float | None = None, min_groups: int = 1) -> Iterator[Arrival]:
        if self._fault is not None:
            raise self._fault
        if not all(thread.is_alive() for thread in self._threads):
            raise RuntimeError("a thread that receives rollouts has ended; stderr has its traceback")
        started_s, groups = time.monotonic(), 0
        for _ in range(len(self._arrived)):  # senders that go on must not keep the trainer here
            arrival = self._arrived.popleft()
            try:
                yield arrival
            finally:
                self._taken_bytes += arrival.n_bytes
                self._taken.append(arrival)
                self._wake()
            groups += arrival.batch.n_groups
            if groups >= min_groups and max_seconds is not None and time.monotonic() - started_s >= max_seconds:
                return

    def close(self) -> None:
        """End the thread. What was not drained is lost, unless there is a log."""
        if self._context.closed:
            return
        self._closing.set()
        self._written.set()
        self._wake()
        for thread in self._threads:
            thread.join()
        self._context.destroy(linger=0)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._wake_out.send(_WAKE)

    # ---- the threads

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except TbaError as error:
            self._fault = error  # the trainer's thread raises it

    def _keep_synced(self) -> None:
        assert self._arrival_log is not None
        while self._written.wait() and not self._closing.wait(self._fsync_every_s):
            self._written.clear()  # before the sync, so that what comes during it is synced by the next
            self._arrival_log.sync()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._fault is not None:
                return  # nothing more is acknowledged
            to_answer: set[str] = set()
            if self._wake_in in ready:
                self._wake_in.recv()
                to_answer |= self._hear_taken()
            if self._router in ready:
                to_answer |= self._receive_some()
            now_s = time.monotonic()
            for sender in to_answer:
                answer = self._inbound.answer(sender, now_s)
                self._router.send_multipart([self._peers[sender], _encoder.encode(answer)])

    def _hear_taken(self) -> set[str]:
        """Credit for what the trainer has taken in; who has to be told."""
        self._woken = False  # before looking, so that what comes after the look wakes again
        while self._taken:
            arrival = self._taken.popleft()
            self._inbound.taken(arrival.sender, arrival.n_bytes)
        return set(self._inbound.short(time.monotonic()))

    def _receive_some(self) -> set[str]:
        """Take in some messages; the senders that get an answer."""
        heard: set[str] = set()
        for _ in range(_TURN_MESSAGES):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            sender = self._receive(frames)
            if sender is not None:
                self._peers[sender] = peer.bytes
                heard.add(sender)
        return heard

    def _receive(self, frames: Sequence[zmq.Frame]) -> str | None:
        """Take in one message; its sender, unless it may not or cannot be answered."""
        if not frames or not hmac.compare_digest(frames[0].bytes, self._token):
            self._refuse("it lacks the token of this run")
            return None
        try:
            _, head_frame, *payloads = frames
            head = _heads.decode(head_frame.buffer)
            if len(payloads) > 1:
                raise ValueError(f"{len(frames)} frames")
        except ValueError as error:
            self._refuse(str(error))
            return None
        now_s = time.monotonic()
        if not payloads:
            self._inbound.judge(head.sender, head.sequence, now_s)
            return head.sender
        payload = memoryview(payloads[0].bytes if len(payloads[0]) < _COPY_BYTES else payloads[0].buffer)
        if xxhash.xxh3_64_intdigest(payload) != head.checksum:
            self.corrupt += 1
            _log.warning("rollouts: message %d of %s came damaged; it will be sent again", head.sequence, head.sender)
            return None
        match self._inbound.judge(head.sender, head.sequence, now_s):
            case Verdict.ACCEPT:
                self._accept(head, payload)
            case Verdict.DUPLICATE:
                self.duplicates += 1
            case Verdict.GAP:
                self.gaps += 1
        return head.sender

    def _accept(self, head: Head, payload: memoryview) -> None:
        n_bytes, end = len(payload), None
        try:
            batch = decode(payload)
        except ValueError as error:
            # It came as it was sent, so it will never be better: acknowledged, it is out of its sender's way.
            self._refuse(str(error))
            self._inbound.accepted(head.sender, n_bytes)
            self._inbound.taken(head.sender, n_bytes)
            return
        if self._arrival_log is not None:
            end = self._arrival_log.append(head.sender, head.sequence, payload, head.checksum)
            self._written.set()
        self._inbound.accepted(head.sender, n_bytes)
        self._arrived_bytes += n_bytes
        self._arrived.append(Arrival(batch=batch, sender=head.sender, sequence=head.sequence, n_bytes=n_bytes, end=end))

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        _log.warning("refused a rollout message: %s", shown(reason))
