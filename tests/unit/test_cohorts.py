"""Cohorts: who is served through which group, from the members alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.transport.cohorts import Cohorts
from tba_megatron.transport.registry import Member
from tba_megatron.types import CohortPlan, PolicyVersion

V0, V1, V2, V3 = (PolicyVersion(0, step) for step in range(4))
APPLY_S = 5.0


def member(name: str, version: PolicyVersion = V0, workers: int = 1, **fields) -> Member:
    return Member(searcher=name, host="h", workers=workers, version=version, joined_s=0.0, heard_s=0.0, **fields)


class Fleet:
    """Members that do as they are told, and the cohorts that are made of them."""

    def __init__(self, *names: str, size: int = 2, replicas: int = 1) -> None:
        self.members = {name: member(name) for name in names}
        self.cohorts = Cohorts(size, replicas, APPLY_S)
        self.now_s = 0.0

    def plan(self, version: PolicyVersion) -> tuple[CohortPlan, ...]:
        plans = self.cohorts.plan(list(self.members.values()), version, self.now_s)
        for plan in plans:
            for name in plan.searchers:
                self.change(name, epoch=plan.epoch, failure=None)
        return plans

    def change(self, *names: str, **fields) -> None:
        for name in names:
            self.members[name] = replace(self.members[name], **fields)

    def apply(self, version: PolicyVersion) -> None:
        self.change(*self.members, version=version)

    def publish(self, version: PolicyVersion) -> tuple[CohortPlan, ...]:
        plans = self.plan(version)
        self.apply(version)
        return plans


def test_searchers_are_dealt_to_cohorts_of_the_given_size_and_replicas_share_them():
    fleet = Fleet("a", "b", "c", "d", "e", size=2, replicas=2)
    fleet.change("c", workers=2)
    plans = fleet.publish(V1)
    assert [(p.epoch, p.replica, p.searchers, p.workers) for p in plans] == [
        (0, 0, ("a", "b"), (1, 1)),
        (1, 1, ("c", "d"), (2, 1)),
        (2, 0, ("e",), (1,)),
    ]
    assert fleet.cohorts.epochs == (0, 1, 2)


def test_a_version_goes_to_each_cohort_once_through_the_group_that_stands():
    fleet = Fleet("a", "b")
    assert [p.epoch for p in fleet.publish(V1)] == [0]
    assert fleet.plan(V1) == ()
    assert [p.epoch for p in fleet.publish(V2)] == [0]


def test_one_that_is_gone_changes_its_own_cohort_alone():
    fleet = Fleet("a", "b", "c", "d")
    fleet.publish(V1)
    del fleet.members["c"]
    assert [(p.epoch, p.searchers) for p in fleet.publish(V2)] == [(0, ("a", "b")), (2, ("d",))]


def test_one_that_comes_joins_where_there_is_room_and_is_served_at_once():
    fleet = Fleet("a", "b", "c")
    fleet.publish(V1)
    fleet.members["d"] = member("d")
    assert [(p.epoch, p.searchers) for p in fleet.publish(V1)] == [(2, ("c", "d"))]


def test_a_member_that_left_its_group_after_a_failure_gets_the_same_version_through_another():
    fleet = Fleet("a", "b", "c")
    fleet.publish(V1)
    fleet.change("b", epoch=-1, failure="checksum")
    assert [(p.epoch, p.searchers) for p in fleet.plan(V1)] == [(2, ("a", "b"))]


def test_a_group_that_failed_is_formed_anew():
    fleet = Fleet("a", "b", "c")
    fleet.publish(V1)
    fleet.cohorts.failed(1)
    assert [(p.epoch, p.searchers) for p in fleet.publish(V1)] == [(2, ("c",))]


def test_a_cohort_that_still_applies_a_version_is_passed_over_until_the_deadline_and_named():
    fleet = Fleet("a", "b", "c")
    fleet.plan(V1)
    fleet.change("a", "c", version=V1)  # b is slow
    assert [p.searchers for p in fleet.plan(V2)] == [("c",)]
    assert fleet.cohorts.late(list(fleet.members.values()), fleet.now_s) == []
    fleet.change("c", version=V2)
    fleet.now_s = APPLY_S + 0.1
    assert [m.searcher for m in fleet.cohorts.late(list(fleet.members.values()), fleet.now_s)] == ["b"]
    assert [p.searchers for p in fleet.plan(V3)] == [("a", "b"), ("c",)]


def test_one_that_evaluates_or_has_failed_holds_nobody_up():
    fleet = Fleet("a", "b")
    fleet.plan(V1)
    fleet.change("a", version=V1)
    fleet.change("b", evaluating=True)
    assert [p.epoch for p in fleet.plan(V2)] == [0]
    fleet.change("a", version=V2)
    fleet.change("b", evaluating=False, failure="no room", epoch=-1)
    assert [p.searchers for p in fleet.plan(V3)] == [("a", "b")]


EVENTS = st.lists(st.tuples(st.sampled_from(["join", "leave", "fail", "publish", "break"]), st.integers(0, 5)))


@settings(max_examples=200, deadline=None)
@given(events=EVENTS, size=st.integers(1, 3), replicas=st.integers(1, 2))
def test_whatever_happens_the_next_version_reaches_every_living_searcher_once(events, size, replicas):
    fleet, step, epochs = Fleet(size=size, replicas=replicas), 0, set()
    for event, which in [*events, ("publish", 0)]:
        name = f"s{which}"
        if event == "join":
            fleet.members.setdefault(name, member(name))
        elif event == "leave":
            fleet.members.pop(name, None)
        elif event == "fail" and name in fleet.members:
            fleet.change(name, epoch=-1, failure="reason")
        elif event == "break" and fleet.cohorts.epochs:
            fleet.cohorts.failed(fleet.cohorts.epochs[which % len(fleet.cohorts.epochs)])
        elif event == "publish":
            step += 1
            before = set(fleet.cohorts.epochs)
            plans = fleet.publish(PolicyVersion(0, step))
            served = [searcher for plan in plans for searcher in plan.searchers]
            assert sorted(served) == sorted(fleet.members)
            assert all(0 < len(plan.searchers) <= size and plan.replica < replicas for plan in plans)
            new = {plan.epoch for plan in plans} - before
            assert not new & epochs, "a group's number was used again"
            epochs |= new
