"""Who searches on which prompts: every position is visited, whoever is lost."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba_megatron.transport.registry import Member, PromptLeases, Registry, State
from tba_megatron.types import PolicyVersion

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


def member(searcher: str = "a", **fields) -> Member:
    base = {"host": "h", "workers": 1, "version": V0, "joined_s": 0.0, "heard_s": 0.0}
    return Member(searcher=searcher, **(base | fields))


def positions(granted: tuple[int, int, int] | None) -> range:
    assert granted is not None
    _, start, count = granted
    return range(start, start + count)


@given(
    moves=st.lists(st.tuples(st.sampled_from(["grant", "arrive", "lose"]), st.integers(0, 2), st.integers(1, 5))),
    start=st.integers(0, 10),
)
def test_every_position_is_visited_at_least_once_whoever_is_lost(moves, start):
    leases = PromptLeases(start)
    held: dict[int, dict[int, list[int]]] = {0: {}, 1: {}, 2: {}}  # searcher -> lease -> positions to do
    visited: set[int] = set()

    def visit(searcher: int, lease: int, n: int) -> None:
        todo = held[searcher][lease]
        visited.update(todo[:n])
        leases.arrived(lease, len(todo[:n]))
        del todo[:n]
        if not todo:
            del held[searcher][lease]

    for move, searcher, n in moves:
        if move == "grant":
            granted = leases.grant(f"s{searcher}", n)
            assert 1 <= granted[2] <= n
            held[searcher][granted[0]] = list(positions(granted))
        elif move == "arrive" and held[searcher]:
            visit(searcher, next(iter(held[searcher])), n)
        elif move == "lose":
            leases.take_back(f"s{searcher}")
            held[searcher].clear()
        assert leases.outstanding == sum(len(todo) for has in held.values() for todo in has.values())

    restored = PromptLeases(leases.next_position, leases.unfinished())
    for survivor in (restored, leases):
        seen, end = set(visited), survivor.next_position
        for searcher in held:
            survivor.take_back(f"s{searcher}")
        while True:
            granted = survivor.grant("last", 3)
            if granted[1] >= end:
                break
            seen.update(positions(granted))
        assert set(range(start, end)) <= seen


def test_prompts_come_in_order_and_returned_ones_first():
    leases = PromptLeases()
    assert leases.grant("a", 4) == (0, 0, 4)
    assert leases.grant("b", 2) == (1, 4, 2)
    assert leases.take_back("a") == 4
    assert leases.grant("b", 3) == (2, 0, 3)
    assert leases.grant("b", 3) == (3, 3, 1)
    assert leases.grant("b", 3) == (4, 6, 3)


def test_a_finished_lease_does_not_come_back():
    leases = PromptLeases()
    leases.grant("a", 2)
    leases.arrived(0, 1)
    assert leases.outstanding == 1
    leases.arrived(0, 1)
    assert (leases.outstanding, leases.take_back("a"), leases.unfinished()) == (0, 0, [])


def test_groups_of_a_lease_that_was_taken_back_or_never_granted_change_nothing():
    leases = PromptLeases()
    leases.grant("a", 2)
    leases.take_back("a")
    for lease in (0, -1, 99):
        leases.arrived(lease, 1)
    assert (leases.outstanding, leases.unfinished()) == (0, [(0, 2)])


def test_a_lost_searcher_takes_only_its_own_prompts_back():
    leases = PromptLeases()
    leases.grant("a", 2)
    leases.grant("b", 2)
    leases.take_back("a")
    assert leases.outstanding == 2
    assert leases.unfinished() == [(0, 2), (2, 2)]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, State.JOINING),
        ({"version": V1}, State.JOINING),
        ({"epoch": 0}, State.BEHIND),
        ({"epoch": 0, "version": V1}, State.CURRENT),
        ({"epoch": 0, "version": V1, "gone": State.LEFT}, State.LEFT),
        ({"gone": State.LOST}, State.LOST),
        ({"heard_s": -1.0}, State.SILENT),
        ({"epoch": 0, "version": V1, "heard_s": -1.0}, State.SILENT),
        ({"heard_s": -1.0, "gone": State.LOST}, State.LOST),
        ({"takes_every": 0}, State.CURRENT),
        ({"takes_every": 9, "epoch": 0}, State.BEHIND),
    ],
)
def test_the_state_of_a_member(fields, state):
    assert member(**fields).state(V1, 10.0, 10.0) is state


@pytest.mark.parametrize(
    ("wanted", "granted", "received", "missing", "wants"),
    [
        *((5, 0, 0, 0, 5), (5, 3, 3, 0, 5), (5, 3, 0, 0, 2), (5, 9, 0, 0, 0), (0, 3, 3, 0, 0)),
        *((5, 3, 0, 3, 5), (5, 6, 0, 3, 2)),
    ],
)
def test_prompts_on_their_way_are_not_granted_twice(wanted, granted, received, missing, wants):
    fields = {"granted_prompts": granted, "received_prompts": received, "missing_prompts": missing}
    assert member(wanted_prompts=wanted, **fields).wants == wants


def test_silence_is_counted_from_the_last_word():
    registry = Registry(newest=V0)
    registry.join(member("a", heard_s=0.0))
    registry.join(member("b", heard_s=5.0))
    assert registry.overdue(now_s=10.0, lease_s=10.0) == []
    assert registry.overdue(now_s=10.1, lease_s=10.0) == ["a"]


def test_the_gone_keep_their_counts_and_are_lost_once():
    registry = Registry(newest=V0)
    registry.join(member("a", generated=7, evaluating=True))
    registry.join(member("b", generated=2))
    registry.leave("a", State.LOST)
    registry.leave("a", State.LEFT)
    assert [m.searcher for m in registry.living()] == ["b"]
    assert registry.gone() == {"a"}
    assert registry.generated() == {"a": 7, "b": 2}
    assert (registry.joined_total, registry.lost_total) == (2, 1)
    assert registry.members["a"].gone is State.LOST
    assert not registry.members["a"].evaluating
    assert registry.overdue(now_s=1e9, lease_s=1.0) == ["b"]


def test_members_are_replaced_and_never_changed():
    registry = Registry(newest=V0)
    registry.join(member("a"))
    before = registry.members["a"]
    registry.change("a", generated=3)
    assert (before.generated, registry.members["a"].generated) == (0, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.generated = 4


def test_who_speaks_again_is_back_and_who_said_goodbye_is_not():
    registry = Registry(newest=V0)
    registry.join(member("slow"))
    registry.join(member("left"))
    registry.leave("slow", State.LOST)
    registry.leave("left", State.LEFT)
    for searcher in ("slow", "left"):
        registry.heard(searcher, 5.0)
    assert [m.searcher for m in registry.living()] == ["slow"]
    assert (registry.lost_total, registry.returned_total) == (1, 1)
    registry.join(member("left", generated=3))
    assert {m.searcher for m in registry.living()} == {"slow", "left"}
    assert (registry.joined_total, registry.returned_total) == (2, 2)


def test_a_searcher_that_says_hello_again_keeps_its_count_and_nothing_else():
    registry = Registry(newest=V0)
    registry.join(member("a", generated=9, granted_prompts=4, epoch=3, evaluating=True))
    registry.join(member("a", generated=7))
    again = registry.members["a"]
    assert (again.generated, again.granted_prompts, again.epoch, again.evaluating) == (9, 0, -1, False)
    assert registry.joined_total == 1


def test_the_states_of_all_are_counted():
    registry = Registry(newest=V1)
    registry.join(member("a", version=V1, epoch=0, heard_s=9.0))
    registry.join(member("b", heard_s=9.0))
    registry.join(member("c", heard_s=0.0))
    assert registry.states(10.0, 5.0) == {State.CURRENT: 1, State.JOINING: 1, State.SILENT: 1}


def test_leases_of_two_attempts_never_have_one_number():
    first, second = PromptLeases(attempt=0), PromptLeases(attempt=1)
    numbers = {leases.grant("a", 1)[0] for leases in (first, second) for _ in range(3)}
    assert len(numbers) == 6
    second.arrived(0, 1)  # of the first
    assert second.outstanding == 3


def test_the_stream_ends_when_every_prompt_before_the_end_has_arrived():
    leases = PromptLeases(end=5)
    assert leases.grant("a", 3) == (0, 0, 3)
    assert leases.grant("b", 3) == (1, 3, 2)
    assert leases.grant("b", 3) is None
    assert leases.exhausted and not leases.finished
    leases.take_back("a")
    assert not leases.exhausted
    assert leases.grant("b", 9) == (2, 0, 3)
    leases.arrived(1, 2)
    leases.arrived(2, 2)
    assert not leases.finished
    leases.arrived(2, 1)
    assert leases.finished


@pytest.mark.parametrize("at", [0, 1, 4, 5, 7])
def test_a_stream_that_is_restored_ends_where_it_would_have(at):
    leases = PromptLeases(end=5)
    if at:
        leases.grant("a", at)
    restored = PromptLeases(leases.next_position, leases.unfinished(), end=5)
    seen: list[int] = []
    while (granted := restored.grant("b", 2)) is not None:
        seen += positions(granted)
        restored.arrived(granted[0], granted[2])
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert restored.finished
