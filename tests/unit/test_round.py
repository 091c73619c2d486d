"""The words of a round: each is heard by the other ends, every wait ends, and nothing stays behind."""

from __future__ import annotations

import threading

import pytest

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.round import Round, connect, host_store

HOST = "127.0.0.1"
LIMIT_S = 30.0
SHORT_S = 0.2


@pytest.fixture
def place():
    store, port = host_store(HOST, LIMIT_S)
    yield store, port
    del store


def end(place, number: int = 0, epoch: int = 0, timeout_s: float = LIMIT_S) -> Round:
    return Round(connect(HOST, place[1], LIMIT_S), number, epoch, timeout_s)


def settled(speaker: Round) -> None:
    """What ``speaker`` has said is in the store: a question is answered after all that came before it."""
    speaker.opened()


def test_rank_0_hears_what_senders_and_receivers_say(place):
    rank_0, other = end(place), end(place)
    assert (rank_0.part(0, 0), rank_0.outcome(0), rank_0.has_posted(2), rank_0.reached(2)) == (None, None, False, 0)
    other.leave_part(0, 0, b"\x00\xff")
    assert not rank_0.is_ready(2) and other.opened() is None
    other.say_ready(2)
    settled(other)
    assert rank_0.is_ready(2)
    rank_0.open()
    settled(rank_0)
    assert other.opened()
    other.post(2)
    other.reach(2, 4)
    other.leave_outcome(0, "")
    other.leave_outcome(1, "no room")
    settled(other)
    assert (rank_0.part(0, 0), rank_0.outcome(0), rank_0.outcome(1)) == (b"\x00\xff", "", "no room")
    assert (rank_0.has_posted(2), rank_0.has_posted(3), rank_0.reached(2)) == (True, False, 5)


def test_rounds_and_groups_do_not_hear_each_other(place):
    first = end(place, number=1, epoch=5)
    first.post(2)
    first.leave_part(0, 0, b"part")
    settled(first)
    assert not end(place, number=2, epoch=5).has_posted(2)
    assert not end(place, number=1, epoch=6).has_posted(2)
    assert end(place, number=1, epoch=6).part(0, 0) == b"part"  # the same for all groups of a round


def test_a_sender_waits_for_the_opening_and_then_for_the_go(place):
    rank_0, said = end(place), []

    def sender() -> None:
        mine = end(place)
        mine.wait_for_opening()
        said.append("opened")
        mine.wait_for_go()
        said.append("gone")

    thread = threading.Thread(target=sender)
    thread.start()
    rank_0.open()
    rank_0.give_go()
    thread.join(LIMIT_S)
    assert said == ["opened", "gone"]


def test_a_round_that_is_called_off_ends_both_waits_at_once(place):
    rank_0 = end(place)
    rank_0.call_off()
    settled(rank_0)
    assert end(place).opened() is False
    for wait in (end(place).wait_for_opening, end(place).wait_for_go):
        with pytest.raises(WeightTransferError, match="rank 0 called it off"):
            wait()


def test_a_wait_ends_at_its_deadline_and_a_store_that_is_gone_is_one_line(place):
    with pytest.raises(WeightTransferError, match=r"did not give the go within 0.2 s"):
        end(place, timeout_s=SHORT_S).wait_for_go()
    with pytest.raises(WeightTransferError, match=r"no store answers at 127.0.0.1:1 "):
        connect(HOST, 1, SHORT_S)


def test_a_round_that_is_forgotten_leaves_nothing_in_the_store(place):
    store, _ = place
    before = store.num_keys()
    rank_0 = end(place)
    rank_0.leave_part(0, 0, b"")
    rank_0.open()
    rank_0.give_go()
    for rank in (1, 2):
        rank_0.say_ready(rank)
        rank_0.post(rank)
        rank_0.reach(rank, 0)
    rank_0.leave_outcome(0, "")
    settled(rank_0)
    assert store.num_keys() > before
    rank_0.forget(0, 1, range(1, 3))
    settled(rank_0)
    assert store.num_keys() == before
