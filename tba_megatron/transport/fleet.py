"""What the trainer does when a searcher speaks or is silent: pure, without sockets, threads or clocks.

Each message that a searcher says goes in with its number and the time; what the trainer says comes out in ``outbox``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from dataclasses import dataclass

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
    SampleRollout,
    Seen,
    Stop,
    ToSearcher,
    Welcome,
)
from tba_megatron.transport.registry import Member, PromptLeases, Registry, State
from tba_megatron.types import PolicyVersion

_log = logging.getLogger(__name__)

_SAMPLES = 256  # kept for the next table

SHORT_BEATS = 10  # heartbeats in a row that show fewer prompts than were given: some of them were lost


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSettings:
    """``shards``: their addresses; ``epochs``: visits of each prompt, 0 without an end."""

    lease_s: float
    silent_s: float
    max_ahead_groups: int
    shards: tuple[str, ...]
    epochs: int = 0


class Fleet:
    """All searchers of this attempt, and their prompts."""

    def __init__(self, settings: FleetSettings, newest: PolicyVersion, leases: PromptLeases) -> None:
        self._settings = settings
        self.registry, self.leases = Registry(newest=newest), leases
        self.fresh_prompts = 0  # groups that shards hold and that were never trained on
        self.granting = True
        self.allowance = math.inf  # prompts that may still be leased
        self.outbox: deque[tuple[str, ToSearcher]] = deque()
        self.evaluations: deque[Evaluated] = deque()
        self.samples: deque[SampleRollout] = deque(maxlen=_SAMPLES)
        self.probes: deque[tuple[str, Probed]] = deque()
        self.repeated = 0  # messages that had come before
        self._seen: dict[str, Seen] = {}
        self._counted: dict[str, int] = {}  # the number of the newest message with counts, or of a later hello
        self._prompts = 0  # of the task, in one epoch
        self._alone_since_s: float | None = None
        self._stop: Stop | None = None  # once it was said

    # ---- what is said

    def hello(self, number: int, hello: Hello, now_s: float) -> None:
        if not self._is_fresh(hello.searcher, number):
            return
        self._is_newest(hello.searcher, number)  # counts that were said before it are of prompts that were dropped
        prompts = self.leases.take_back(hello.searcher)  # it has dropped them, if it is known
        self.allowance += prompts
        version = PolicyVersion.parse(hello.version)
        self.registry.join(
            Member(
                searcher=hello.searcher,
                host=hello.host,
                workers=hello.workers,
                version=version,
                source=hello.source,
                takes_every=hello.takes_every,
                generated=hello.generated,
                current=hello.takes_every == 0 or version >= self.registry.newest,
                joined_s=now_s,
                heard_s=now_s,
            )
        )
        self._know_prompts(hello)
        self.outbox.append((hello.searcher, Welcome(shards=self._settings.shards, newest=str(self.registry.newest))))
        if self._stop is not None:
            self.outbox.append((hello.searcher, self._stop))  # it comes as the others leave
        _log.info(
            "searcher %s joined from %s with version %s (source %s)",
            hello.searcher,
            hello.host,
            hello.version,
            hello.source,
        )

    def hear(self, searcher: str, number: int, message: FromSearcher, now_s: float) -> None:
        """``searcher`` has said hello before."""
        if not self._is_fresh(searcher, number):
            return
        change = self.registry.change
        if not isinstance(message, Goodbye):
            self.registry.heard(searcher, now_s)
        member = self.registry.members[searcher]
        match message:
            case Heartbeat():
                if self._is_newest(searcher, number) and member.gone is None:
                    self._heartbeat(member, message, now_s)
            case Applied():
                version = max(member.version, PolicyVersion.parse(message.version))
                change(searcher, version=version, current=True)
            case Probed():
                self.probes.append((searcher, message))
            case ReceiveFailed():
                if message.round == member.offered_round:
                    change(searcher, failure=message.reason, epoch=-1)
                self.registry.receive_failures_total += 1
                _log.warning("searcher %s keeps its old weights: %s", searcher, message.reason)
            case Evaluated():
                change(searcher, evaluating=False)
                self.evaluations.append(message)
            case SampleRollout():
                self.samples.append(message)
            case Goodbye():
                self._is_newest(searcher, number)  # a heartbeat that comes after it was said before
                change(
                    searcher,
                    generated=message.generated,
                    busy_s=message.busy_s,
                    idle_s=message.idle_s,
                    paused_s=message.paused_s,
                )
                self.registry.leave(searcher, State.LEFT)
                self.allowance += self.leases.take_back(searcher)

    def _is_fresh(self, searcher: str, number: int) -> bool:
        fresh = self._seen.setdefault(searcher, Seen()).is_fresh(number)
        self.repeated += not fresh
        return fresh

    def _is_newest(self, searcher: str, number: int) -> bool:
        """Counts only grow: what was said before the newest of them is out of date."""
        newest = number > self._counted.get(searcher, -1)
        if newest:
            self._counted[searcher] = number
        return newest

    def _heartbeat(self, member: Member, message: Heartbeat, now_s: float) -> None:
        version = PolicyVersion.parse(message.version)
        changes: dict[str, object] = {}
        # A connection that broke may have taken a message with it. What is asked of a searcher is asked again.
        overdue_s = self._settings.lease_s
        # Nobody receives more than it was given: whatever is above that was another trainer's.
        received = min(message.received_prompts, member.granted_prompts)
        missing = min(member.missing_prompts, member.granted_prompts - received)  # some may come after all
        short = received < member.granted_prompts - missing
        changes |= {
            "short_beats": member.short_beats + 1 if short else 0,
            "short_since_s": member.short_since_s if member.short_beats else now_s,
        }
        # Where prompts are given all the time, some may be under way whenever it speaks, but not each time.
        always_short = member.short_beats >= SHORT_BEATS and now_s - member.short_since_s > overdue_s
        if short and (always_short or now_s - member.granted_s > overdue_s):
            prompts = self.leases.take_back(member.searcher)
            self.allowance += prompts
            missing = member.granted_prompts - received
            changes["short_beats"] = 0
            _log.warning("searcher %s never got its prompts; %d go to others", member.searcher, prompts)
        if member.evaluating and not message.evaluates and now_s - member.asked_s > overdue_s:
            changes |= {"evaluating": False, "evaluations_lost": member.evaluations_lost + 1}
        self.registry.change(
            member.searcher,
            generated=message.generated,
            busy_s=message.busy_s,
            idle_s=message.idle_s,
            paused_s=message.paused_s,
            version=max(version, member.version),
            wanted_prompts=message.wanted_prompts,
            received_prompts=received,
            missing_prompts=missing,
            **changes,
        )
        self.outbox.append((member.searcher, Beat(newest=str(self.registry.newest))))

    def _know_prompts(self, hello: Hello) -> None:
        """Where the data end, once a searcher has counted the task's prompts."""
        if self._settings.epochs and hello.prompts and not self._prompts:
            self.leases.end = self._settings.epochs * hello.prompts
        if self._prompts and hello.prompts not in (0, self._prompts):
            _log.warning(
                "searcher %s has %d prompts in an epoch, others have %d; do all read the same data?",
                hello.searcher,
                hello.prompts,
                self._prompts,
            )
        self._prompts = self._prompts or hello.prompts

    # ---- what the trainer says

    def say(self, searcher: str, message: ToSearcher, now_s: float) -> None:
        if searcher in self.registry.members:
            if isinstance(message, Evaluate):
                self.registry.change(searcher, evaluating=True, asked_s=now_s)
            elif isinstance(message, Offer):
                self.registry.change(searcher, offered_round=message.round)
        self.outbox.append((searcher, message))

    def stop(self, reason: str, *, final: bool) -> None:
        """All living ones; no more prompts for anybody."""
        self.granting, self._stop = False, Stop(reason=reason, final=final)
        self.outbox.extend((m.searcher, self._stop) for m in self.registry.living())

    # ---- what time does

    def tick(self, now_s: float) -> list[str]:
        """Lose who is overdue, and give prompts to who wants some; the lost ones."""
        lost = self.registry.overdue(now_s, self._settings.lease_s)
        for searcher in lost:
            prompts = self.leases.take_back(searcher)
            self.allowance += prompts
            self.registry.leave(searcher, State.LOST)
            _log.warning(
                "searcher %s was silent for %g s and is lost; %d prompts go to others",
                searcher,
                self._settings.lease_s,
                prompts,
            )
        self._grant(now_s)
        return lost

    def absent_s(self, now_s: float) -> float:
        """How long no searcher has lived; the time begins when it is first asked for."""
        if self.registry.living():
            self._alone_since_s = None
            return 0.0
        if self._alone_since_s is None:
            self._alone_since_s = now_s
        return now_s - self._alone_since_s

    def states(self, now_s: float) -> Counter[State]:
        return self.registry.states(now_s, self._settings.silent_s)

    def heard(self, now_s: float) -> list[Member]:
        """Living members that are not silent."""
        return [m for m in self.registry.living() if now_s - m.heard_s <= self._settings.silent_s]

    @property
    def epoch(self) -> float:
        """How many times the prompts were leased, all in all; 0 while nobody knows their number."""
        return self.leases.next_position / self._prompts if self._prompts else 0.0

    def _grant(self, now_s: float) -> None:
        """Give prompts to those who want some, as far as searchers may be ahead.

        The emptiest first, and of equals who was given some longest ago: no source takes all the room.
        """
        for member in sorted(self.heard(now_s), key=lambda m: (-m.wants, m.granted_s, m.granted_prompts)):
            ahead = self._settings.max_ahead_groups - self.leases.outstanding - self.fresh_prompts
            # In lock-step the turn alone decides: what is held from before it must not keep its prompts back.
            room = ahead if self.allowance == math.inf else int(self.allowance)
            if not self.granting or room <= 0:
                return
            if member.wants and member.current and not member.evaluating:
                granted = self.leases.grant(member.searcher, min(room, member.wants))
                if granted is None:
                    return
                lease, start, count = granted
                self.allowance -= count
                self.registry.change(member.searcher, granted_prompts=member.granted_prompts + count, granted_s=now_s)
                self.outbox.append((member.searcher, Lease(lease=lease, start=start, count=count)))
