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

    def plan(self, version: PolicyVersion, *, everybody: bool = False) -> tuple[CohortPlan, ...]:
        plans = self.cohorts.plan(list(self.members.values()), version, self.now_s, everybody=everybody)
        for plan in plans:
            for name in plan.searchers:
                self.change(name, epoch=plan.epoch, failure=None)
        return plans

    def change(self, *names: str, **fields) -> None:
        for name in names:
            self.members[name] = replace(self.members[name], **fields)

    def publish(self, version: PolicyVersion, *, everybody: bool = False) -> tuple[CohortPlan, ...]:
        plans = self.plan(version, everybody=everybody)
        for plan in plans:
            self.change(*plan.searchers, version=version)
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


def test_one_that_takes_no_weights_is_in_no_cohort_and_changes_none():
    fleet = Fleet("a", "b", size=2)
    fleet.publish(V1)
    fleet.members["fixed"] = member("fixed", takes_every=0)
    assert fleet.plan(V1) == fleet.plan(V1, everybody=True) == ()
    assert [p.searchers for p in fleet.publish(V2)] == [("a", "b")]
    del fleet.members["fixed"]
    assert [p.epoch for p in fleet.publish(V3, everybody=True)] == [0]
    assert [m.searcher for m in fleet.cohorts.late(list(fleet.members.values()), fleet.now_s + 2 * APPLY_S)] == []


def test_one_that_lags_shares_no_cohort_and_takes_a_version_that_is_new_enough():
    fleet = Fleet("a", size=4, replicas=2)
    fleet.members["z"] = member("z", takes_every=3)
    plans = fleet.publish(V1)
    assert [(p.epoch, p.replica, p.searchers) for p in plans] == [(0, 0, ("a",)), (1, 1, ("z",))]
    for step in (2, 3):
        assert [p.searchers for p in fleet.publish(PolicyVersion(0, step))] == [("a",)]
    assert [(p.epoch, p.searchers) for p in fleet.publish(PolicyVersion(0, 4))] == [(0, ("a",)), (1, ("z",))]
    assert [p.searchers for p in fleet.publish(PolicyVersion(0, 6))] == [("a",)]
    assert [p.searchers for p in fleet.publish(PolicyVersion(0, 8))] == [("a",), ("z",)]  # 7 was left out


def test_one_that_lags_takes_the_version_of_another_attempt_and_what_everybody_is_to_have():
    fleet = Fleet()
    fleet.members["z"] = member("z", takes_every=100)
    fleet.publish(V1)
    assert fleet.publish(V2) == ()
    assert [p.epoch for p in fleet.publish(V2, everybody=True)] == [0]
    assert fleet.publish(V2, everybody=True) == ()
    assert [p.epoch for p in fleet.publish(PolicyVersion(1, 1))] == [0]


def test_what_lags_is_formed_anew_at_once_when_one_has_come_or_failed():
    fleet = Fleet()
    fleet.members["y"] = member("y", takes_every=100)
    fleet.publish(V1)
    fleet.members["z"] = member("z", takes_every=100)
    assert [(p.epoch, p.searchers) for p in fleet.publish(V2)] == [(1, ("y", "z"))]
    fleet.change("y", epoch=-1, failure="checksum")
    assert [(p.epoch, p.searchers) for p in fleet.publish(V3)] == [(2, ("y", "z"))]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "fail", "publish", "break", "restart"]), st.integers(0, 11))
)
TAKES_EVERY = (1, 1, 3, 0)


@settings(max_examples=400)
@given(events=EVENTS, size=st.integers(1, 3), replicas=st.integers(1, 2), everybody=st.booleans())
def test_whatever_happens_a_version_reaches_all_who_take_it_once_and_nobody_else(events, size, replicas, everybody):
    """A cohort that stands gets what is new enough for it; a group that is formed anew gets every version."""
    fleet, attempt, step, epochs = Fleet(size=size, replicas=replicas), 0, 0, set()
    sent: dict[int, PolicyVersion] = {}  # by the group's number
    for event, which in [*events, ("publish", 0)]:
        name = f"s{which}"
        if event == "join":
            fleet.members.setdefault(name, member(name, takes_every=TAKES_EVERY[which % len(TAKES_EVERY)]))
        elif event == "leave":
            fleet.members.pop(name, None)
        elif event == "fail" and name in fleet.members:
            fleet.change(name, epoch=-1, failure="reason")
        elif event == "break" and fleet.cohorts.epochs:
            fleet.cohorts.failed(fleet.cohorts.epochs[which % len(fleet.cohorts.epochs)])
        elif event == "restart":
            attempt += 1
        elif event == "publish":
            step += 1 + which % 2
            version, before = PolicyVersion(attempt, step), set(fleet.cohorts.epochs)
            members = dict(fleet.members)
            plans = fleet.publish(version, everybody=everybody)
            served = [searcher for plan in plans for searcher in plan.searchers]
            assert len(served) == len(set(served))
            assert all(0 < len(plan.searchers) <= size and plan.replica < replicas for plan in plans)
            kinds = [{members[searcher].takes_every for searcher in plan.searchers} for plan in plans]
            assert all(len(kind) == 1 for kind in kinds), "two that take versions at different times share a group"
            new = {plan.epoch for plan in plans} - before
            assert not new & epochs, "a group's number was used again"
            epochs |= new
            for name, one in members.items():
                last = sent.get(one.epoch)
                lags = last and last.attempt == attempt and step - last.step < one.takes_every and not everybody
                if one.takes_every == 0:
                    assert name not in served
                elif not lags:
                    assert name in served
                elif name in served:
                    assert fleet.members[name].epoch != one.epoch, "it was sent what is not new enough"
            sent |= {plan.epoch: version for plan in plans}
