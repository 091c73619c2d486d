"""The trainer's end of the control channel: a ROUTER socket at rank 0.

The server answers in a thread of its own, so that leases and heartbeats do not wait for a training step. The trainer
reads and changes the shared state (``Fleet``) through its methods only, each of which holds the lock for microseconds.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from tba_megatron.transport.fleet import Fleet, FleetSettings
from tba_megatron.transport.messages import (
    Evaluated,
    Hello,
    Probed,
    Refused,
    SampleRollout,
    ToSearcher,
    Unknown,
    decode_from_searcher,
    encode,
)
from tba_megatron.transport.registry import Member, PromptLeases, State
from tba_megatron.transport.sockets import Listen, Router
from tba_megatron.types import PolicyVersion

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WAKE = b"wake"
_TICK_MS = 200
_TURN_MESSAGES = 256  # received between two looks at the clock
MOST_BYTES = 4 << 20  # of a message from a searcher: two texts of a sample rollout


class ControlServer:
    """Rank 0's side. ``close`` ends the thread; TransportError when the port is taken."""

    def __init__(
        self,
        listen: Listen,
        secret: str,
        settings: FleetSettings,
        *,
        port: int = 0,
        newest: PolicyVersion,
        leases: PromptLeases,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret, self._clock = secret, clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._fleet = Fleet(settings, newest, leases)
        self._peers: dict[bytes, str] = {}
        self._peer_of: dict[str, bytes] = {}
        self._sent: Counter[str] = Counter()  # messages to each searcher
        self._router = Router(listen, "control", secret, port=port, most_bytes=MOST_BYTES)
        self.address = self._router.address
        context = self._router.context
        self._wake_in, self._wake_out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._wake_in.bind("inproc://wake-control")
        self._wake_out.connect("inproc://wake-control")
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    # ---- what the trainer asks and tells

    @property
    def refused(self) -> int:
        """Messages that were none, and peers and searchers that were not let in."""
        return self._router.refused

    @property
    def repeated(self) -> int:
        """Messages that had come before."""
        return self._fleet.repeated

    def members(self) -> list[Member]:
        """The living members."""
        with self._lock:
            return self._fleet.registry.living()

    def reachable(self) -> list[Member]:
        """Of them, those that are not silent: who a version may wait for."""
        with self._lock:
            return self._fleet.heard(self._clock())

    def states(self) -> Counter[State]:
        with self._lock:
            return self._fleet.states(self._clock())

    def absent_s(self) -> float:
        """How long no searcher has lived."""
        with self._lock:
            return self._fleet.absent_s(self._clock())

    def newest(self) -> PolicyVersion:
        with self._lock:
            return self._fleet.registry.newest

    def totals(self) -> dict[str, int]:
        """Searchers that joined, were lost, and came back, over all time."""
        with self._lock:
            registry = self._fleet.registry
            return {
                "joined": registry.joined_total,
                "lost": registry.lost_total,
                "returned": registry.returned_total,
            }

    def receive_failures(self) -> int:
        """Versions that a searcher could not take in, over all searchers and all time."""
        with self._lock:
            return self._fleet.registry.receive_failures_total

    def generated(self) -> tuple[dict[str, int], frozenset[str]]:
        """(rollouts that each searcher says it generated, the searchers that are gone)."""
        with self._lock:
            return dict(self._fleet.registry.generated()), self._fleet.registry.gone()

    def times(self) -> tuple[float, float]:
        """(busy, idle) seconds over all searchers, gone ones included."""
        with self._lock:
            members = self._fleet.registry.members.values()
            return sum(m.busy_s for m in members), sum(m.idle_s for m in members)

    def paused_s(self) -> float:
        """Of the idle seconds, those that new weights took: applying them, computing again what they made stale."""
        with self._lock:
            return sum(m.paused_s for m in self._fleet.registry.members.values())

    def unfinished_prompts(self) -> tuple[int, list[tuple[int, int]]]:
        """(next position, positions to visit again): what a checkpoint keeps of the prompt stream."""
        with self._lock:
            return self._fleet.leases.next_position, self._fleet.leases.unfinished()

    def outstanding_prompts(self) -> int:
        with self._lock:
            return self._fleet.leases.outstanding

    def data_ended(self) -> bool:
        """The groups of all prompts have arrived, as often as each was to be visited."""
        with self._lock:
            return self._fleet.leases.finished

    def epoch(self) -> float:
        with self._lock:
            return self._fleet.epoch

    def note(self, *, arrived: dict[int, int], fresh_prompts: int) -> None:
        """Groups that arrived by lease, and how many groups the shards hold that were never trained on."""
        with self._lock:
            for lease, groups in arrived.items():
                self._fleet.leases.arrived(lease, groups)
            self._fleet.fresh_prompts = fresh_prompts
        self._wake()

    def published(self, version: PolicyVersion) -> None:
        with self._lock:
            self._fleet.registry.newest = version

    def set_epoch(self, searchers: tuple[str, ...], epoch: int) -> None:
        """``searchers`` are in the broadcast group ``epoch``; -1: in none."""
        with self._lock:
            for searcher in searchers:
                if searcher in self._fleet.registry.members:
                    self._fleet.registry.change(searcher, epoch=epoch, failure=None)

    def send(self, searcher: str, message: ToSearcher) -> None:
        with self._lock:
            self._fleet.say(searcher, message, self._clock())
        self._wake()

    def allow(self, prompts: int) -> None:
        """Lease at most this many prompts from here on, those that come back from a lost searcher not counted."""
        with self._lock:
            self._fleet.allowance = prompts
        self._wake()

    def stop_granting(self) -> None:
        """Lease no more prompts."""
        with self._lock:
            self._fleet.granting = False

    def stop_searchers(self, reason: str, *, final: bool) -> None:
        """Say stop to all living searchers; no more leases. ``final``: the run ends, not this trainer alone."""
        with self._lock:
            self._fleet.stop(reason, final=final)
        self._wake()

    def wait_until(self, condition: Callable[[list[Member]], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` of the living members holds; False after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._fleet.registry.living()), timeout_s)

    def member(self, searcher: str) -> Member | None:
        with self._lock:
            return self._fleet.registry.members.get(searcher)

    def take_evaluations(self) -> list[Evaluated]:
        with self._lock:
            return _taken(self._fleet.evaluations)

    def take_probes(self) -> list[tuple[str, Probed]]:
        """(searcher, its answer) since the last call."""
        with self._lock:
            return _taken(self._fleet.probes)

    def take_samples(self) -> list[SampleRollout]:
        with self._lock:
            return _taken(self._fleet.samples)

    def refuse_weights(self, searcher: str, reason: str) -> None:
        """What ``searcher`` runs is not what it was sent: it gets the newest version again, through another group."""
        with self._changed:
            if searcher in self._fleet.registry.members:
                self._fleet.registry.change(searcher, failure=reason, epoch=-1)

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join(5.0)
        self._wake_in.close()
        self._wake_out.close()
        self._router.close(linger_s=0.5)

    # ---- the thread

    def _wake(self) -> None:
        with self._lock:
            self._wake_out.send(_WAKE)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(_TICK_MS))
            while self._wake_in in ready and self._wake_in.poll(0):
                self._wake_in.recv()
            for _ in range(_TURN_MESSAGES if self._router.socket in ready else 0):
                message = self._router.receive(most_frames=1)
                if message is None:
                    break
                if message:
                    self._receive(message[0].bytes, [frame.bytes for frame in message[1:]])
            self._tick()
        self._flush()

    def _receive(self, peer: bytes, frames: Sequence[bytes]) -> None:
        try:
            (data,) = frames
            number, message = decode_from_searcher(data)
        except ValueError as error:
            self._router.refuse(str(error))
            return
        with self._changed:
            if isinstance(message, Hello):
                self._hello(peer, number, message)
            elif peer in self._peers:
                self._fleet.hear(self._peers[peer], number, message, self._clock())
            else:
                self._answer(peer, Unknown())
            self._changed.notify_all()

    def _hello(self, peer: bytes, number: int, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._secret.encode()):
            self._router.refuse(f"searcher {hello.searcher} of {hello.host} lacks the token of this run")
            self._answer(peer, Refused(reason="the token is not this run's"))
            return
        self._peers.pop(self._peer_of.get(hello.searcher, b""), None)
        self._peers[peer], self._peer_of[hello.searcher] = hello.searcher, peer
        self._fleet.hello(number, hello, self._clock())

    def _answer(self, peer: bytes, message: ToSearcher) -> None:
        """To one that has no name here, and therefore no numbers."""
        self._router.socket.send_multipart([peer, encode(message)])

    def _tick(self) -> None:
        with self._changed:
            if self._fleet.tick(self._clock()):
                self._changed.notify_all()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            outbox = self._fleet.outbox
            while outbox:
                searcher, message = outbox.popleft()
                if searcher in self._peer_of:
                    data = encode(message, self._sent[searcher])
                    self._sent[searcher] += 1
                    self._router.socket.send_multipart([self._peer_of[searcher], data])


def _taken(queue: deque[_T]) -> list[_T]:
    done = list(queue)
    queue.clear()
    return done
