"""What the trainer does when searchers speak, repeat themselves, are silent or never heard what they were told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba_megatron.transport.fleet import Fleet, FleetSettings
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
    Seen,
    Stop,
    Welcome,
)
from tba_megatron.transport.registry import PromptLeases, State
from tba_megatron.types import PolicyVersion

V1 = PolicyVersion(0, 1)
LEASE_S, SILENT_S = 60.0, 15.0


class Trainer:
    """A fleet with the time and the numbers of what searchers say."""

    def __init__(self, *, ahead: int = 100, epochs: int = 0) -> None:
        settings = FleetSettings(
            lease_s=LEASE_S, silent_s=SILENT_S, max_ahead_groups=ahead, shards=("shard",), epochs=epochs
        )
        self.fleet = Fleet(settings, PolicyVersion(0, 0), PromptLeases())
        self.now_s = 0.0
        self.number = 0

    def hello(self, searcher: str, **fields) -> None:
        self.number += 1
        base = {"token": "", "searcher": searcher, "host": "h", "workers": 1, "version": "0.0"}
        self.fleet.hello(self.number, Hello(**(base | fields)), self.now_s)

    def hear(self, searcher: str, message: FromSearcher, number: int | None = None) -> None:
        self.number += number is None
        self.fleet.hear(searcher, self.number if number is None else number, message, self.now_s)

    def beat(self, searcher: str, **fields) -> None:
        base = {"generated": 0, "busy_s": 0, "idle_s": 0, "version": "0.0", "wanted_prompts": 0, "received_prompts": 0}
        self.hear(searcher, Heartbeat(**(base | fields)))

    def told(self, kind: type) -> list:
        """What was said since the last look."""
        found = [(to, message) for to, message in self.fleet.outbox if isinstance(message, kind)]
        self.fleet.outbox.clear()
        return found

    def leased(self) -> dict[str, int]:
        self.fleet.tick(self.now_s)
        counts: dict[str, int] = {}
        for to, lease in self.told(Lease):
            counts[to] = counts.get(to, 0) + lease.count
        return counts


@given(numbers=st.lists(st.integers(0, 3000), max_size=60))
def test_a_number_is_fresh_once(numbers):
    seen, fresh = Seen(), []
    for number in numbers:
        if seen.is_fresh(number):
            fresh.append(number)
    assert len(set(fresh)) == len(fresh)
    recent = [n for n in dict.fromkeys(numbers) if n > max(numbers) - 1024]
    assert set(recent) <= set(fresh)


@given(data=st.data(), n=st.integers(1, 12))
def test_copies_and_another_order_of_what_was_said_change_nothing(data, n):
    said: list[FromSearcher] = [
        Heartbeat(generated=i, busy_s=i, idle_s=0, version=f"0.{i}", wanted_prompts=i % 3, received_prompts=0)
        if i % 3
        else Evaluated(version="0.0", accuracy=0.5, problems=i, seconds=0)
        for i in range(n)
    ]
    order = data.draw(st.permutations([*range(n), *range(n)]))
    plain, mixed = Trainer(), Trainer()
    for trainer in (plain, mixed):
        trainer.hello("a")
    for i in range(n):
        plain.hear("a", said[i], 100 + i)
    for i in order:
        mixed.hear("a", said[i], 100 + i)
    assert mixed.fleet.repeated == n
    assert sorted(e.problems for e in mixed.fleet.evaluations) == [e.problems for e in plain.fleet.evaluations]
    one, other = (t.fleet.registry.members["a"] for t in (plain, mixed))
    for name in ("generated", "busy_s", "version", "wanted_prompts"):
        assert getattr(one, name) == getattr(other, name)


def test_a_heartbeat_that_comes_after_the_goodbye_changes_nothing():
    trainer = Trainer()
    trainer.hello("a")
    trainer.hear("a", Goodbye(generated=9, busy_s=3, idle_s=1), 50)
    trainer.hear(
        "a", Heartbeat(generated=5, busy_s=1, idle_s=0, version="0.0", wanted_prompts=3, received_prompts=0), 49
    )
    member = trainer.fleet.registry.members["a"]
    assert (member.gone, member.generated) == (State.LEFT, 9)
    assert trainer.leased() == {}


def test_versions_that_are_told_in_another_order_do_not_go_back():
    trainer = Trainer()
    trainer.hello("a")
    for version in ("0.7", "0.3"):
        trainer.hear("a", Applied(version=version, pause_s=0))
    assert trainer.fleet.registry.members["a"].version == PolicyVersion(0, 7)


def test_silence_costs_a_version_first_and_the_prompts_later():
    trainer = Trainer()
    trainer.hello("a")
    trainer.beat("a", wanted_prompts=4)
    assert trainer.leased() == {"a": 4}
    trainer.now_s = SILENT_S + 1
    assert trainer.fleet.heard(trainer.now_s) == [] and len(trainer.fleet.registry.living()) == 1
    assert trainer.fleet.leases.outstanding == 4
    trainer.now_s = LEASE_S + 1
    assert trainer.fleet.tick(trainer.now_s) == ["a"]
    assert trainer.fleet.leases.outstanding == 0
    trainer.beat("a")
    assert [m.searcher for m in trainer.fleet.heard(trainer.now_s)] == ["a"]


def test_a_silent_searcher_is_given_no_prompts():
    trainer = Trainer(ahead=4)
    trainer.hello("a")
    trainer.beat("a", wanted_prompts=4)
    trainer.now_s = SILENT_S + 1
    trainer.hello("b")
    trainer.beat("b", wanted_prompts=2)
    assert trainer.leased() == {"b": 2}


def test_prompts_that_never_came_to_a_searcher_go_to_others():
    trainer = Trainer()
    trainer.hello("a")
    trainer.beat("a", wanted_prompts=4)
    assert trainer.leased() == {"a": 4}
    for trainer.now_s in (20.0, 40.0, 60.0):
        trainer.beat("a", wanted_prompts=4)
        assert trainer.leased() == {}
    trainer.now_s = LEASE_S + 1
    trainer.beat("a", wanted_prompts=4)
    assert trainer.leased() == {"a": 4}
    assert trainer.fleet.leases.next_position == 4


def test_prompts_that_never_came_are_missed_although_others_come_all_the_time():
    """Whatever is given last hides how long ago the first of what is missing was."""
    trainer, received, healthy = Trainer(), 0, 0
    for name in "ab":
        trainer.hello(name)
    trainer.beat("a", wanted_prompts=4)
    assert trainer.leased() == {"a": 4}  # and lost with the connection
    for turn in range(1, 200):
        trainer.now_s = turn * LEASE_S / 20
        trainer.beat("a", wanted_prompts=5, received_prompts=received)
        trainer.beat("b", wanted_prompts=1, received_prompts=healthy)
        came = trainer.leased()
        received, healthy = received + came.get("a", 0), healthy + came.get("b", 0)
        if trainer.fleet.registry.members["a"].missing_prompts:
            break
    assert LEASE_S < trainer.now_s < 2 * LEASE_S
    assert trainer.fleet.registry.members["b"].granted_prompts == healthy == turn


@pytest.mark.parametrize("what", ["lost", "hello again"])
def test_a_question_to_who_is_lost_or_begins_again_is_asked_again(what):
    trainer = Trainer()
    trainer.hello("a")
    trainer.fleet.say("a", Evaluate(version="0.0"), trainer.now_s)
    if what == "lost":
        trainer.now_s = LEASE_S + 1
        assert trainer.fleet.tick(trainer.now_s) == ["a"]
        trainer.beat("a")
    else:
        trainer.hello("a")
    member = trainer.fleet.registry.members["a"]
    assert (member.gone, member.evaluating, member.evaluations_lost) == (None, False, 1)


def test_a_question_that_never_came_to_a_searcher_is_given_up():
    trainer = Trainer()
    trainer.hello("a")
    trainer.fleet.say("a", Evaluate(version="0.0"), trainer.now_s)
    trainer.beat("a", evaluates=True)
    trainer.now_s = LEASE_S
    trainer.beat("a", evaluates=True)
    trainer.now_s = LEASE_S + 1
    trainer.beat("a", evaluates=True)
    assert trainer.fleet.registry.members["a"].evaluating
    trainer.beat("a", evaluates=False)
    member = trainer.fleet.registry.members["a"]
    assert (member.evaluating, member.evaluations_lost) == (False, 1)


def test_searchers_share_the_room_that_there_is():
    trainer = Trainer(ahead=4)
    for searcher in "abc":
        trainer.hello(searcher)
    given_: dict[str, int] = dict.fromkeys("abc", 0)
    for trainer.now_s in range(1, 10):
        for searcher in "abc":
            trainer.beat(searcher, wanted_prompts=40, received_prompts=given_[searcher])
        for searcher, count in trainer.leased().items():
            given_[searcher] += count
        for lease in list(trainer.fleet.leases._leases):
            trainer.fleet.leases.arrived(lease, 4)
    assert given_ == {"a": 12, "b": 12, "c": 12}


def test_another_policy_gets_prompts_at_once_and_an_old_one_after_its_first_version():
    trainer = Trainer()
    trainer.fleet.registry.newest = V1
    trainer.hello("fixed", takes_every=0, version="2097152.0")
    trainer.hello("old")
    for searcher in ("fixed", "old"):
        trainer.beat(searcher, wanted_prompts=2, version="2097152.0" if searcher == "fixed" else "0.0")
    assert trainer.leased() == {"fixed": 2}
    trainer.hear("old", Applied(version="0.1", pause_s=0))
    assert trainer.leased() == {"old": 2}


def test_a_searcher_that_says_hello_again_has_dropped_its_prompts():
    trainer = Trainer()
    trainer.hello("a")
    trainer.beat("a", wanted_prompts=4)
    assert trainer.leased() == {"a": 4}
    trainer.hello("a", generated=7)
    assert trainer.fleet.leases.outstanding == 0
    assert trainer.fleet.registry.members["a"].generated == 7
    trainer.beat("a", wanted_prompts=2)
    assert trainer.leased() == {"a": 2}


def test_prompts_that_another_trainer_gave_do_not_count():
    """A searcher that joins tells, for a moment, what it had received of the last trainer."""
    trainer = Trainer(ahead=100)
    trainer.hello("a")
    trainer.beat("a", wanted_prompts=4, received_prompts=40)
    assert trainer.leased() == {"a": 4}
    trainer.beat("a", wanted_prompts=4, received_prompts=40)
    trainer.beat("a", wanted_prompts=4, received_prompts=0)
    assert trainer.leased() == {}  # the four are on their way
    trainer.beat("a", wanted_prompts=0, received_prompts=4)
    trainer.beat("a", wanted_prompts=3, received_prompts=4)
    assert trainer.leased() == {"a": 3}


def test_counts_from_before_a_hello_that_come_after_it_do_not_count():
    trainer = Trainer()
    trainer.hello("a", generated=7)
    trainer.number = 20
    trainer.hello("a", generated=9)
    old = Heartbeat(generated=8, busy_s=5, idle_s=5, version="0.0", wanted_prompts=4, received_prompts=0)
    trainer.hear("a", old, 19)
    member = trainer.fleet.registry.members["a"]
    assert (member.generated, member.busy_s, member.wanted_prompts) == (9, 0.0, 0)
    assert trainer.leased() == {}
    trainer.beat("a", generated=9, wanted_prompts=2)
    assert trainer.leased() == {"a": 2}


def test_prompts_that_come_after_they_went_to_others_are_no_reason_for_more():
    trainer = Trainer()
    trainer.hello("a")
    trainer.beat("a", wanted_prompts=4)
    assert trainer.leased() == {"a": 4}
    trainer.now_s = LEASE_S + 1
    trainer.beat("a", wanted_prompts=4)
    assert trainer.leased() == {"a": 4}  # again, by another lease
    trainer.beat("a", wanted_prompts=0, received_prompts=8)  # and both came
    trainer.beat("a", wanted_prompts=2, received_prompts=8)
    assert trainer.leased() == {"a": 2}
    trainer.beat("a", wanted_prompts=2, received_prompts=8)
    assert trainer.leased() == {}  # the two are on their way
    member = trainer.fleet.registry.members["a"]
    assert (member.granted_prompts, member.missing_prompts) == (10, 0)


def test_each_prompt_is_leased_for_so_many_epochs(caplog):
    trainer = Trainer(epochs=2)
    trainer.hello("a", prompts=3)
    trainer.hello("b", prompts=4)
    assert "searcher b has 4 prompts in an epoch, others have 3" in caplog.text
    trainer.beat("a", wanted_prompts=50)
    assert trainer.leased() == {"a": 6}
    assert trainer.fleet.epoch == 2.0 and not trainer.fleet.leases.finished
    trainer.fleet.leases.arrived(0, 6)
    assert trainer.fleet.leases.finished


def test_absence_is_counted_from_when_the_last_one_went():
    trainer = Trainer()
    assert trainer.fleet.absent_s(5.0) == 0.0
    assert trainer.fleet.absent_s(8.0) == 3.0
    trainer.hello("a")
    assert trainer.fleet.absent_s(9.0) == 0.0
    trainer.hear("a", Goodbye(generated=0, busy_s=0, idle_s=0))
    assert [trainer.fleet.absent_s(t) for t in (20.0, 30.0)] == [0.0, 10.0]


def test_who_comes_when_all_were_told_to_stop_is_told_too():
    trainer = Trainer()
    trainer.hello("a")
    trainer.fleet.stop("over", final=True)
    trainer.hello("b")
    assert [(to, type(message)) for to, message in trainer.fleet.outbox] == [
        ("a", Welcome),
        ("a", Stop),
        ("b", Welcome),
        ("b", Stop),
    ]


@pytest.mark.parametrize("times", [1, 5])
def test_every_heartbeat_is_answered_with_the_newest_version(times):
    trainer = Trainer()
    trainer.hello("a")
    trainer.fleet.registry.newest = V1
    for _ in range(times):
        trainer.beat("a")
    assert trainer.told(Beat) == [("a", Beat(newest="0.1"))] * times
