"""The trainer's end of the control channel: a ROUTER socket at rank 0.

The server answers in a thread of its own, so that leases and heartbeats do not wait for a training step. The trainer
reads and changes the shared state through its methods only, each of which holds the lock for microseconds.
"""

from __future__ import annotations

import hmac
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from tba_megatron.errors import TransportError
from tba_megatron.transport.messages import (
    Applied,
    Beat,
    Evaluate,
    Evaluated,
    FromSearcher,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Offer,
    Probed,
    ReceiveFailed,
    Refused,
    SampleRollout,
    Stop,
    ToSearcher,
    Welcome,
    decode_from_searcher,
    encode,
)
from tba_megatron.transport.registry import Member, PromptLeases, Registry, State
from tba_megatron.types import PolicyVersion

_log = logging.getLogger(__name__)

_WAKE = b"wake"


class ControlServer:
    """Rank 0's side. ``close`` ends the thread; TransportError when the port is taken."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        token: str,
        lease_s: float,
        max_ahead_groups: int,
        shards: tuple[str, ...],
        newest: PolicyVersion,
        leases: PromptLeases,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._lease_s = lease_s
        self._shards = shards
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._registry = Registry(newest=newest)
        self._leases = leases
        self._max_ahead_groups = max_ahead_groups
        self._fresh_prompts = 0
        self._granting = True
        self._allowance = math.inf  # prompts that may still be leased
        self._outbox: deque[tuple[str, ToSearcher]] = deque()
        self._evaluations: deque[Evaluated] = deque()
        self._samples: deque[SampleRollout] = deque(maxlen=256)
        self._probes: deque[tuple[str, Probed]] = deque()
        self._peers: dict[bytes, str] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a searcher that reconnects is the same one
        try:
            self._router.bind(f"tcp://{host}:{port}" if port else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(
                f"transport.control_port: cannot listen on {host}:{port} ({error}); choose another port, or 0 for "
                f"a free one"
            ) from None
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_address = f"inproc://wake-{id(self)}"
        self._wake_in = self._context.socket(zmq.PULL)
        self._wake_in.bind(self._wake_address)
        self._wake_out = self._context.socket(zmq.PUSH)
        self._wake_out.connect(self._wake_address)
        self.refused = 0  # messages that were none, came from a stranger, or lacked the run's token
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    # ---- what the trainer asks and tells

    def members(self) -> list[Member]:
        """The living members."""
        with self._lock:
            return self._registry.living()

    def newest(self) -> PolicyVersion:
        with self._lock:
            return self._registry.newest

    def totals(self) -> tuple[int, int]:
        """(searchers that ever joined, searchers lost)."""
        with self._lock:
            return self._registry.joined_total, self._registry.lost_total

    def receive_failures(self) -> int:
        """Versions that a searcher could not take in, over all searchers and all time."""
        with self._lock:
            return self._registry.receive_failures_total

    def generated(self) -> tuple[dict[str, int], frozenset[str]]:
        """(rollouts that each searcher says it generated, the searchers that are gone)."""
        with self._lock:
            return dict(self._registry.generated()), self._registry.gone()

    def times(self) -> tuple[float, float]:
        """(busy, idle) seconds over all searchers, gone ones included."""
        with self._lock:
            members = self._registry.members.values()
            return sum(m.busy_s for m in members), sum(m.idle_s for m in members)

    def paused_s(self) -> float:
        """Of the idle seconds, those that new weights took: applying them, computing again what they made stale."""
        with self._lock:
            return sum(m.paused_s for m in self._registry.members.values())

    def unfinished_prompts(self) -> tuple[int, list[tuple[int, int]]]:
        """(next position, positions to visit again): what a checkpoint keeps of the prompt stream."""
        with self._lock:
            return self._leases.next_position, self._leases.unfinished()

    def outstanding_prompts(self) -> int:
        with self._lock:
            return self._leases.outstanding

    def note(self, *, arrived: dict[int, int], fresh_prompts: int) -> None:
        """Groups that arrived by lease, and how many groups the shards hold that were never trained on."""
        with self._lock:
            for lease, groups in arrived.items():
                self._leases.arrived(lease, groups)
            self._fresh_prompts = fresh_prompts
        self._wake()

    def published(self, version: PolicyVersion) -> None:
        with self._lock:
            self._registry.newest = version

    def set_epoch(self, searchers: tuple[str, ...], epoch: int) -> None:
        """``searchers`` are in the broadcast group ``epoch``; -1: in none."""
        with self._lock:
            for searcher in searchers:
                if searcher in self._registry.members:
                    self._registry.change(searcher, epoch=epoch, failure=None)

    def send(self, searcher: str, message: ToSearcher) -> None:
        with self._lock:
            if isinstance(message, Evaluate) and searcher in self._registry.members:
                self._registry.change(searcher, evaluating=True)
            if isinstance(message, Offer) and searcher in self._registry.members:
                self._registry.change(searcher, offered_round=message.round)
            self._outbox.append((searcher, message))
        self._wake()

    def allow(self, prompts: int) -> None:
        """Lease at most this many prompts from here on, those that come back from a lost searcher not counted."""
        with self._lock:
            self._allowance = prompts
        self._wake()

    def stop_granting(self) -> None:
        """Lease no more prompts."""
        with self._lock:
            self._granting = False

    def stop_searchers(self, reason: str) -> None:
        """Say stop to all living searchers and grant no more leases."""
        with self._lock:
            self._granting = False
            self._outbox.extend((m.searcher, Stop(reason=reason)) for m in self._registry.living())
        self._wake()

    def wait_until(self, condition: Callable[[list[Member]], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` of the living members holds; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._registry.living()), timeout_s)

    def member(self, searcher: str) -> Member | None:
        with self._lock:
            return self._registry.members.get(searcher)

    def take_evaluations(self) -> list[Evaluated]:
        with self._lock:
            done, self._evaluations = list(self._evaluations), deque()
            return done

    def take_probes(self) -> list[tuple[str, Probed]]:
        """(searcher, its answer) since the last call."""
        with self._lock:
            done, self._probes = list(self._probes), deque()
            return done

    def refuse_weights(self, searcher: str, reason: str) -> None:
        """What ``searcher`` runs is not what it was sent: it gets the newest version again, through another group."""
        with self._changed:
            if searcher in self._registry.members:
                self._registry.change(searcher, failure=reason, epoch=-1)

    def take_samples(self) -> list[SampleRollout]:
        with self._lock:
            samples = list(self._samples)
            self._samples.clear()
            return samples

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join(5.0)
        self._context.destroy(linger=500)

    # ---- the thread

    def _wake(self) -> None:
        with self._lock:
            self._wake_out.send(_WAKE)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(200))
            while self._wake_in in ready and self._wake_in.poll(0):
                self._wake_in.recv()
            while self._router in ready and self._router.poll(0):
                peer, *frames = self._router.recv_multipart()
                self._receive(peer, frames)
            self._tick()
        self._flush()

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            (data,) = frames
            message = decode_from_searcher(data)
        except ValueError as error:
            self.refused += 1
            _log.warning("refused a control message: %s", error)
            return
        with self._changed:
            if isinstance(message, Hello):
                self._hello(peer, message)
            elif peer in self._peers:
                self._handle(self._peers[peer], message)
            else:
                self.refused += 1
            self._changed.notify_all()

    def _hello(self, peer: bytes, message: Hello) -> None:
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            self.refused += 1
            _log.warning("refused searcher %s of %s: it lacks the token of this run", message.searcher, message.host)
            self._router.send_multipart([peer, encode(Refused(reason="the token is not this run's"))])
            return
        now_s = self._clock()
        self._peers[peer] = message.searcher
        version = PolicyVersion.parse(message.version)
        self._registry.join(
            Member(
                searcher=message.searcher,
                host=message.host,
                workers=message.workers,
                version=version,
                current=version >= self._registry.newest,
                joined_s=now_s,
                heard_s=now_s,
            )
        )
        self._outbox.append((message.searcher, Welcome(shards=self._shards)))
        _log.info("searcher %s joined from %s with version %s", message.searcher, message.host, message.version)

    def _handle(self, searcher: str, message: FromSearcher) -> None:
        change = self._registry.change
        change(searcher, heard_s=self._clock())
        if self._registry.members[searcher].gone is State.LOST and not isinstance(message, Goodbye):
            change(searcher, gone=None)  # it was only slow; what it sent was never refused
        match message:
            case Heartbeat():
                change(
                    searcher,
                    generated=message.generated,
                    busy_s=message.busy_s,
                    idle_s=message.idle_s,
                    paused_s=message.paused_s,
                    version=PolicyVersion.parse(message.version),
                    wanted_prompts=message.wanted_prompts,
                    received_prompts=message.received_prompts,
                )
                self._outbox.append((searcher, Beat()))
            case Applied():
                change(searcher, version=PolicyVersion.parse(message.version), current=True)
            case Probed():
                self._probes.append((searcher, message))
            case ReceiveFailed():
                if message.round == self._registry.members[searcher].offered_round:
                    change(searcher, failure=message.reason, epoch=-1)
                self._registry.receive_failures_total += 1
                _log.warning("searcher %s keeps its old weights: %s", searcher, message.reason)
            case Evaluated():
                change(searcher, evaluating=False)
                self._evaluations.append(message)
            case SampleRollout():
                self._samples.append(message)
            case Goodbye():
                change(
                    searcher,
                    generated=message.generated,
                    busy_s=message.busy_s,
                    idle_s=message.idle_s,
                    paused_s=message.paused_s,
                )
                self._registry.leave(searcher, State.LEFT)
                self._allowance += self._leases.take_back(searcher)

    def _tick(self) -> None:
        with self._changed:
            for searcher in self._registry.silent(self._clock(), self._lease_s):
                prompts = self._leases.take_back(searcher)
                self._allowance += prompts
                self._registry.leave(searcher, State.LOST)
                _log.warning(
                    "searcher %s was silent for %g s and is lost; %d prompts go to others",
                    searcher,
                    self._lease_s,
                    prompts,
                )
                self._changed.notify_all()
            self._grant()
        self._flush()

    def _grant(self) -> None:
        """Give prompts to those who want some, the emptiest first, as far as searchers may be ahead."""
        for member in sorted(self._registry.living(), key=lambda m: -m.wants):
            ahead = self._max_ahead_groups - self._leases.outstanding - self._fresh_prompts
            # In lock-step the turn alone decides: what is held from before it must not keep its prompts back.
            room = ahead if self._allowance == math.inf else int(self._allowance)
            if not self._granting or room <= 0:
                return
            if member.wants and member.current and not member.evaluating:
                lease, start, count = self._leases.grant(member.searcher, min(room, member.wants))
                self._allowance -= count
                self._registry.change(member.searcher, granted_prompts=member.granted_prompts + count)
                self._outbox.append((member.searcher, Lease(lease=lease, start=start, count=count)))

    def _flush(self) -> None:
        with self._lock:
            peers = {searcher: peer for peer, searcher in self._peers.items()}
            while self._outbox:
                searcher, message = self._outbox.popleft()
                if searcher in peers:
                    self._router.send_multipart([peers[searcher], encode(message)])
