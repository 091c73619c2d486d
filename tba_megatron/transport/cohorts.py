"""Which searchers get a version through which broadcast group: pure state, without sockets or clocks.

Searchers keep their cohort. A group is formed anew, under a number of its own, when a member is gone, has come, or has
left the group after a failure; nothing else in the run notices. Who takes versions more rarely than another is never
in one cohort with it, and who takes none is in no cohort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tba_megatron.transport.registry import Member
from tba_megatron.types import CohortPlan, PolicyVersion

_NO_GROUP = -1


@dataclass
class _Cohort:
    replica: int
    takes_every: int  # of all its members
    searchers: tuple[str, ...] = ()
    epoch: int = _NO_GROUP
    version: PolicyVersion | None = None  # that was sent last in this epoch
    sent_s: float = 0.0


class Cohorts:
    """Cohorts of at most ``size`` searchers, dealt to ``replicas`` data-parallel replicas of the trainer."""

    def __init__(self, size: int, replicas: int, apply_s: float) -> None:
        self._size, self._replicas, self._apply_s = size, replicas, apply_s
        self._cohorts: list[_Cohort] = []
        self._last_epoch = _NO_GROUP

    def plan(
        self, members: Sequence[Member], version: PolicyVersion, now_s: float, *, everybody: bool = False
    ) -> tuple[CohortPlan, ...]:
        """The cohorts that get ``version``, and how; empty when nobody needs it.

        A cohort whose members still have to apply their last version is passed over for at most ``apply_s``: a version
        for each step is of no use to a searcher that needs longer than a step to take one. So is, unless ``everybody``
        is to have the version, a cohort of a group that stands while the version is of the same attempt and fewer than
        ``takes_every`` steps newer than its last. A group that is formed anew gets the version at once: who has just
        come must not search with older weights than it could.
        """
        by_name = {member.searcher: member for member in members if member.takes_every > 0}
        self._assign(by_name)
        plans = []
        for cohort in self._cohorts:
            own = [by_name[searcher] for searcher in cohort.searchers]
            whole = cohort.epoch != _NO_GROUP and all(m.epoch == cohort.epoch for m in own)
            lags = not everybody and _lags(cohort, version)
            if whole and (cohort.version == version or lags or self._applying(cohort, own, now_s)):
                continue
            if not whole:
                self._last_epoch += 1
                cohort.epoch = self._last_epoch
            cohort.version, cohort.sent_s = version, now_s
            workers = tuple(member.workers for member in own)
            plans.append(
                CohortPlan(epoch=cohort.epoch, replica=cohort.replica, searchers=cohort.searchers, workers=workers)
            )
        return tuple(plans)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Of all groups that stand."""
        return tuple(cohort.epoch for cohort in self._cohorts if cohort.epoch != _NO_GROUP)

    def failed(self, epoch: int) -> None:
        """The group may be in any state: the next version goes through another."""
        for cohort in self._cohorts:
            if cohort.epoch == epoch:
                cohort.epoch = _NO_GROUP

    def late(self, members: Sequence[Member], now_s: float) -> list[Member]:
        """Members that had ``apply_s`` to apply what their cohort was sent and have not."""
        by_name = {member.searcher: member for member in members}
        found = []
        for cohort in self._cohorts:
            if cohort.version is not None and now_s - cohort.sent_s > self._apply_s:
                own = [by_name[searcher] for searcher in cohort.searchers if searcher in by_name]
                found += [member for member in own if _is_applying(member, cohort)]
        return found

    def _applying(self, cohort: _Cohort, members: Sequence[Member], now_s: float) -> bool:
        return now_s - cohort.sent_s <= self._apply_s and any(_is_applying(member, cohort) for member in members)

    def _assign(self, members: Mapping[str, Member]) -> None:
        """Take out who is gone, give a place to who is new: where a group is formed anew anyway, else with few."""
        for cohort in self._cohorts:
            kept = tuple(s for s in cohort.searchers if s in members and members[s].takes_every == cohort.takes_every)
            if kept != cohort.searchers:
                cohort.searchers, cohort.epoch = kept, _NO_GROUP
        placed = {searcher for cohort in self._cohorts for searcher in cohort.searchers}
        for searcher in sorted(members):
            if searcher not in placed:
                cohort = self._with_room(members[searcher].takes_every)
                cohort.searchers, cohort.epoch = (*cohort.searchers, searcher), _NO_GROUP
        self._cohorts = [cohort for cohort in self._cohorts if cohort.searchers]

    def _with_room(self, takes_every: int) -> _Cohort:
        open_ = [c for c in self._cohorts if c.takes_every == takes_every and len(c.searchers) < self._size]
        if open_:
            return min(open_, key=lambda cohort: (cohort.epoch != _NO_GROUP, len(cohort.searchers)))
        served = [sum(cohort.replica == replica for cohort in self._cohorts) for replica in range(self._replicas)]
        self._cohorts.append(_Cohort(replica=served.index(min(served)), takes_every=takes_every))
        return self._cohorts[-1]


def _lags(cohort: _Cohort, version: PolicyVersion) -> bool:
    """Whether ``version`` is not new enough for a cohort that has its last one."""
    last = cohort.version
    return last is not None and last.attempt == version.attempt and version.step - last.step < cohort.takes_every


def _is_applying(member: Member, cohort: _Cohort) -> bool:
    waits = member.failure is None and not member.evaluating
    return waits and cohort.version is not None and member.version < cohort.version
