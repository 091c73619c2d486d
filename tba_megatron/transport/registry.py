"""Who searches, with which weights, on which prompts: pure state, without sockets or clocks.

``Registry`` is what the control server knows; what depends on time takes ``now_s``. ``PromptLeases`` hands out
positions of the task's prompt stream and takes back what a lost searcher had.

    joining -> current <-> behind        silent: any of the three that was not heard for a while
       living                            lost: silent for its whole lease; left: it said goodbye
Whoever speaks again is back: a silent or lost one as it was, one that left when it says hello again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tba_megatron.types import PolicyVersion

ATTEMPT_LEASES = 1 << 32  # leases of one attempt: what arrives by a lease of another is known by its number


class State(StrEnum):
    JOINING = "joining"  # said hello, in no broadcast group yet
    CURRENT = "current"  # runs the newest published version, or takes no versions
    BEHIND = "behind"  # in the group, with older weights
    SILENT = "silent"  # not heard for some heartbeats: it keeps its prompts, and no version waits for it
    LEFT = "left"  # said goodbye
    LOST = "lost"  # silent for longer than its lease


LIVING = (State.JOINING, State.CURRENT, State.BEHIND, State.SILENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One searcher incarnation."""

    searcher: str
    host: str
    workers: int
    version: PolicyVersion
    joined_s: float
    heard_s: float
    source: str = "searcher"
    takes_every: int = 1  # steps that a version must be newer than its last to be sent to it; 0: it takes none
    epoch: int = -1  # of the broadcast group it is in
    failure: str | None = None  # why its last receive failed
    offered_round: int = -1  # of its newest offer
    generated: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    current: bool = True  # it runs the newest version, or has at some time; before that it gets no prompts
    wanted_prompts: int = 0  # when it last spoke
    received_prompts: int = 0  # when it last spoke; never more than it was granted
    granted_prompts: int = 0
    missing_prompts: int = 0  # of those, what never came and went to others
    granted_s: float = 0.0  # when it was last given some
    evaluating: bool = False
    asked_s: float = 0.0  # when it was asked to
    evaluations_lost: int = 0  # questions that never reached it, or whose answer may never come
    short_since_s: float = 0.0  # since when each of its heartbeats has shown fewer prompts than it was given,
    short_beats: int = 0  # and how many those were
    gone: State | None = None

    @property
    def wants(self) -> int:
        """Prompts that it still wants, those that are on their way to it taken off."""
        on_their_way = self.granted_prompts - self.missing_prompts - self.received_prompts
        return max(0, self.wanted_prompts - on_their_way)

    @property
    def awaits_group(self) -> bool:
        """It takes weights and is in no broadcast group."""
        return self.takes_every > 0 and self.epoch < 0

    def state(self, newest: PolicyVersion, now_s: float, silent_s: float) -> State:
        if self.gone is not None:
            return self.gone
        if now_s - self.heard_s > silent_s:
            return State.SILENT
        if self.awaits_group:
            return State.JOINING
        return State.CURRENT if self.version == newest or not self.takes_every else State.BEHIND


class PromptLeases:
    """Positions 0, 1, 2, ... of the prompt stream, leased in batches; returned ones go out again first.

    Every position is visited at least once: a position is done when its group arrived, and comes back when its
    searcher is lost. ``next_position`` and the returned ones are all there is to save. ``end``: the first position that
    is never leased, None for an endless stream.
    """

    def __init__(
        self,
        next_position: int = 0,
        returned: list[tuple[int, int]] | None = None,
        *,
        attempt: int = 0,
        end: int | None = None,
    ) -> None:
        self.next_position, self.end = next_position, end
        self._returned: deque[tuple[int, int]] = deque(returned or [])
        self._leases: dict[int, tuple[str, int, int, int]] = {}  # lease -> searcher, start, count, arrived
        self._last_lease = attempt * ATTEMPT_LEASES - 1

    @property
    def outstanding(self) -> int:
        """Prompts that are leased and whose groups have not arrived."""
        return sum(count - arrived for _, _, count, arrived in self._leases.values())

    @property
    def exhausted(self) -> bool:
        """All positions before the end were leased, and none came back."""
        return self.end is not None and self.next_position >= self.end and not self._returned

    @property
    def finished(self) -> bool:
        """The groups of all positions before the end have arrived."""
        return self.exhausted and not self._leases

    def grant(self, searcher: str, count: int) -> tuple[int, int, int] | None:
        """(lease, start, count) of at most ``count`` >= 1 prompts; None when there are none left."""
        if self._returned:
            start, available = self._returned.popleft()
            if available > count:
                self._returned.appendleft((start + count, available - count))
            count = min(count, available)
        elif self.exhausted:
            return None
        else:
            start = self.next_position
            count = count if self.end is None else min(count, self.end - start)
            self.next_position += count
        self._last_lease += 1
        self._leases[self._last_lease] = (searcher, start, count, 0)
        return self._last_lease, start, count

    def arrived(self, lease: int, groups: int) -> None:
        """``groups`` of the lease's prompts have reached a shard. A lease that was taken back is ignored."""
        if lease not in self._leases:
            return
        searcher, start, count, before = self._leases[lease]
        if before + groups >= count:
            del self._leases[lease]
        else:
            self._leases[lease] = (searcher, start, count, before + groups)

    def take_back(self, searcher: str) -> int:
        """Return everything that ``searcher`` still had; how many prompts that is.

        Which prompts of a lease have arrived is not known, so a partly done lease is visited again as a whole.
        """
        leases = [lease for lease, (owner, *_) in self._leases.items() if owner == searcher]
        prompts = 0
        for lease in leases:
            _, start, count, _ = self._leases.pop(lease)
            self._returned.append((start, count))
            prompts += count
        return prompts

    def unfinished(self) -> list[tuple[int, int]]:
        """(start, count) of all that a checkpoint has to hand out again: returned and outstanding ones."""
        return sorted([*self._returned, *((start, count) for _, start, count, _ in self._leases.values())])


@dataclass
class Registry:
    """All members by incarnation. Only the control server's thread changes it, under its lock."""

    newest: PolicyVersion
    members: dict[str, Member] = field(default_factory=dict)
    joined_total: int = 0
    returned_total: int = 0  # of those that were lost or had left
    lost_total: int = 0
    receive_failures_total: int = 0

    def join(self, member: Member) -> None:
        """Says hello: a new one, or one that is known and has dropped its prompts."""
        before = self.members.get(member.searcher)
        if before is None:
            self.joined_total += 1
        else:
            member = replace(
                member,
                generated=max(member.generated, before.generated),
                evaluations_lost=before.evaluations_lost + before.evaluating,  # it has dropped the question as well
            )
            self.returned_total += before.gone is not None
        self.members[member.searcher] = member

    def change(self, searcher: str, **changes: Any) -> None:
        self.members[searcher] = replace(self.members[searcher], **changes)

    def heard(self, searcher: str, now_s: float) -> None:
        """It spoke: one that was taken for lost was only slow. One that left has to say hello."""
        back = self.members[searcher].gone is State.LOST
        self.change(searcher, heard_s=now_s, gone=None if back else self.members[searcher].gone)
        self.returned_total += back

    def leave(self, searcher: str, state: State) -> None:
        member = self.members[searcher]
        if member.gone is None:
            lost = member.evaluations_lost + member.evaluating
            self.change(searcher, gone=state, evaluating=False, evaluations_lost=lost)
            self.lost_total += state is State.LOST

    def overdue(self, now_s: float, lease_s: float) -> list[str]:
        """Living members that were not heard for ``lease_s``."""
        return [m.searcher for m in self.living() if now_s - m.heard_s > lease_s]

    def living(self) -> list[Member]:
        return [m for m in self.members.values() if m.gone is None]

    def states(self, now_s: float, silent_s: float) -> Counter[State]:
        return Counter(member.state(self.newest, now_s, silent_s) for member in self.members.values())

    def generated(self) -> Mapping[str, int]:
        return {m.searcher: m.generated for m in self.members.values()}

    def gone(self) -> frozenset[str]:
        return frozenset(m.searcher for m in self.members.values() if m.gone is not None)
