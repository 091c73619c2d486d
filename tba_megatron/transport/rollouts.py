"""Rollouts on the wire, and the shard's end of it; a searcher's end is in rollout_sender.py.

A message is [token, head, payload]: who sends it, its number and checksum, and an encoded ``RolloutBatch``; without a
payload it only asks for an answer. The token is the run's secret. A thread of the shard receives while the trainer
computes: it writes each message to the log, if there is one, and acknowledges it after that. What is sent when, and
again, is decided in delivery.py.
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

from tba_megatron.errors import TbaError, shown
from tba_megatron.rollout_batch import RolloutBatch, decode
from tba_megatron.transport.delivery import Inbound, Verdict
from tba_megatron.transport.sockets import MOST_BYTES, Listen, Router, worth_a_line
from tba_megatron.types import LogPosition, RolloutGroup
from tba_megatron.untrusted import decoded

_log = logging.getLogger(__name__)

_WAKE = b"wake"
_TURN_MESSAGES = 16  # received between two looks at what the trainer has taken in
_COPY_BYTES = 1 << 16  # shorter ones may lie unaligned in a buffer of ZeroMQ's, which they would keep alive

_MOST_FRAMES = 3

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Of a message."""

    sender: Annotated[str, msgspec.Meta(max_length=256)]  # one numbering of one incarnation of a searcher
    sequence: _Number
    checksum: int  # XXH3 of the payload, 64 bits
    oldest: _Number = 0  # the first message that the sender still has, or will have


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
        """Those without the run's token, those that are too large or no batch of rollouts; and peers not let in."""
        ...

    @property
    def corrupt(self) -> int: ...

    @property
    def duplicates(self) -> int: ...

    @property
    def gaps(self) -> int: ...

    @property
    def forgotten(self) -> int:
        """Those that were acknowledged before the shard began anew, and that its log does not have."""
        ...

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

    @property
    def unacknowledged(self) -> int:
        """Rollouts that no shard has said to have."""
        ...

    def send(self, group: RolloutGroup) -> None: ...

    def reconnect(self, addresses: Sequence[str], secret: str) -> int:
        """Go on with the shards of the trainer's next attempt; the number of rollouts that are given up.

        As many shards as before get all that is not acknowledged, under the same numbers. Other shards know nothing of
        those: what was sent and not acknowledged may be stored or not, so it is given up, and what was not sent goes to
        the new owners. TransportError for an address that is none; all is as before then.
        """
        ...

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
    never. ``most_bytes`` of a message are taken. TransportError when it cannot listen. ``drain`` raises what has ended
    the receiving.
    """

    def __init__(
        self,
        listen: Listen,
        secret: str,
        *,
        name: str = "shard-0",
        port: int = 0,
        log: ArrivalLog | None = None,
        delivered: Mapping[str, int] | None = None,
        window_bytes: int = 256 << 20,
        fsync_every_s: float = 0.0,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._token, self._arrival_log, self._fsync_every_s = secret.encode(), log, fsync_every_s
        self._inbound = Inbound(window_bytes, delivered)
        self._peers: dict[str, bytes] = {}  # where a sender was last heard
        self._arrived: deque[Arrival] = deque()
        self._taken: deque[Arrival] = deque()
        self._arrived_bytes = self._taken_bytes = 0  # each is written by one thread alone
        self._fault: TbaError | None = None
        self._closing = threading.Event()
        self._written = threading.Event()  # something in the log may not be synced
        self._woken = False
        self.corrupt = self.duplicates = self.gaps = 0
        self._router = Router(listen, name, secret, port=port, most_bytes=most_bytes)
        self.address = self._router.address
        context = self._router.context
        self._wake_in, self._wake_out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
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
    def refused(self) -> int:
        return self._router.refused

    @property
    def forgotten(self) -> int:
        return self._inbound.forgotten

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
        if self._router.context.closed:
            return
        self._closing.set()
        self._written.set()
        self._wake()
        for thread in self._threads:
            thread.join()
        self._router.close(0.0)

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
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._fault is not None:
                return  # nothing more is acknowledged
            to_answer: set[str] = set()
            if self._wake_in in ready:
                self._wake_in.recv()
                to_answer |= self._hear_taken()
            if self._router.socket in ready:
                to_answer |= self._receive_some()
            now_s = time.monotonic()
            for sender in to_answer:
                answer = self._inbound.answer(sender, now_s)
                self._router.socket.send_multipart([self._peers[sender], _encoder.encode(answer)])

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
            message = self._router.receive(_MOST_FRAMES)
            if message is None:
                break
            if not message:
                continue
            peer, *frames = message
            sender = self._receive(frames)
            if sender is not None:
                self._peers[sender] = peer.bytes
                heard.add(sender)
        return heard

    def _receive(self, frames: Sequence[zmq.Frame]) -> str | None:
        """Take in one message; its sender, unless it may not or cannot be answered."""
        if not frames or not hmac.compare_digest(frames[0].bytes, self._token):
            self._router.refuse("it lacks the token of this run")
            return None
        try:
            _, head_frame, *payloads = frames
            head = decoded(_heads, head_frame.buffer)
            if head.oldest > head.sequence:
                raise ValueError(
                    f"its sender says to have message {head.oldest} and later ones, and sends {head.sequence}"
                )
        except ValueError as error:
            self._router.refuse(str(error))
            return None
        now_s = time.monotonic()
        if not payloads:
            self._inbound.judge(head.sender, head.sequence, now_s, head.oldest)
            return head.sender
        payload = memoryview(payloads[0].bytes if len(payloads[0]) < _COPY_BYTES else payloads[0].buffer)
        if xxhash.xxh3_64_intdigest(payload) != head.checksum:
            self.corrupt += 1
            if worth_a_line(self.corrupt):
                _log.warning(
                    "rollouts: message %d of %s came damaged and will be sent again (%d so far)",
                    head.sequence,
                    shown(head.sender),
                    self.corrupt,
                )
            return None
        match self._inbound.judge(head.sender, head.sequence, now_s, head.oldest):
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
            self._router.refuse(str(error))
            self._inbound.accepted(head.sender, n_bytes)
            self._inbound.taken(head.sender, n_bytes)
            return
        if self._arrival_log is not None:
            end = self._arrival_log.append(head.sender, head.sequence, payload, head.checksum)
            self._written.set()
        self._inbound.accepted(head.sender, n_bytes)
        self._arrived_bytes += n_bytes
        self._arrived.append(Arrival(batch=batch, sender=head.sender, sequence=head.sequence, n_bytes=n_bytes, end=end))
