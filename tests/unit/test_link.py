"""A searcher's way to its trainer: it joins, notices silence, and finds the next attempt."""

from __future__ import annotations

import pytest

from tba_megatron.config_search import TransportConfig
from tba_megatron.errors import TransportError
from tba_megatron.search.link import LinkState, TrainerLink
from tba_megatron.transport.messages import (
    Applied,
    Beat,
    FromSearcher,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Stop,
    ToSearcher,
    Unknown,
    Welcome,
)
from tba_megatron.transport.rendezvous import Rendezvous

LEASE_S, PATIENCE_S, HEARTBEAT_S = 10.0, 100.0, 1.0
WELCOME = Welcome(shards=("s",), newest="0.0")


def place(attempt: int, address: str = "") -> Rendezvous:
    return Rendezvous(
        address=address or f"address-{attempt}", host="h", token=f"token-{attempt}", attempt=attempt, weights="w"
    )


class Channel:
    """To one trainer."""

    def __init__(self) -> None:
        self.said: list[FromSearcher] = []
        self.told: list[ToSearcher] = []
        self.closed = False

    def send(self, message: FromSearcher) -> None:
        self.said.append(message)

    def poll(self, timeout_s: float = 0.0) -> list[ToSearcher]:
        told, self.told = self.told, []
        return told

    def close(self, linger_s: float = 0.0) -> None:
        self.closed = True

    @property
    def tokens(self) -> list[str]:
        return [message.token for message in self.said if isinstance(message, Hello)]


class Side:
    """A link with the time and all trainers that it ever dialled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.channels: dict[str, Channel] = {}
        self.place: Rendezvous | None = place(0)
        self.trouble = False
        settings = TransportConfig(lease_s=LEASE_S, patience_s=PATIENCE_S, heartbeat_s=HEARTBEAT_S)
        self.link = TrainerLink(
            settings,
            place(0),
            find=self.find,
            dial=self.dial,
            hello=lambda: Hello(token="", searcher="me", host="h", workers=1, version="0.0"),
            clock=lambda: self.now_s,
        )

    def find(self) -> Rendezvous | None:
        if self.trouble:
            raise TransportError("stale")
        return self.place

    def dial(self, found: Rendezvous) -> Channel:
        return self.channels.setdefault(found.address, Channel())

    def tell(self, *messages: ToSearcher, to: str = "address-0") -> list[ToSearcher]:
        self.channels[to].told += messages
        return self.link.poll()

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.link.tend()

    def joined(self) -> Side:
        assert self.tell(WELCOME) == [WELCOME]
        assert self.link.joined
        return self


def test_the_first_word_is_a_hello_with_the_token():
    side = Side()
    assert side.channels["address-0"].tokens == ["token-0"]
    assert side.link.state is LinkState.ASKING
    side.joined()


def test_messages_reach_the_searcher_in_their_order_and_the_links_own_do_not():
    side = Side()
    beat = Beat(newest="0.0")
    assert side.tell(WELCOME, beat, Stop(reason="x")) == [WELCOME, beat, Stop(reason="x")]
    assert side.tell(Unknown()) == []


def test_another_token_in_the_rendezvous_file_is_another_trainer():
    side = Side().joined()
    side.place = place(1)
    assert side.wait(HEARTBEAT_S)
    assert side.channels["address-0"].closed
    assert side.channels["address-1"].tokens == ["token-1"]
    assert not side.link.joined
    assert side.tell(WELCOME, to="address-1") == [WELCOME]
    assert side.link.joined and side.link.token == "token-1"


def test_a_rendezvous_file_that_is_gone_ends_nothing():
    side = Side().joined()
    side.place = None
    assert side.wait(HEARTBEAT_S)
    assert side.link.joined


def test_a_rendezvous_file_that_cannot_be_read_is_told_once_and_ends_nothing(caplog):
    side = Side().joined()
    side.trouble = True
    for _ in range(3):
        assert side.wait(HEARTBEAT_S)
    assert caplog.text.count("cannot look for another trainer: stale") == 1
    side.trouble, side.place = False, place(1)
    assert side.wait(HEARTBEAT_S)
    assert side.tell(WELCOME, to="address-1") == [WELCOME]


def test_a_trainer_that_is_silent_is_waited_for_and_may_speak_again():
    side = Side().joined()
    assert side.wait(LEASE_S + 1)
    assert side.link.state is LinkState.ALONE
    assert side.tell(Beat(newest="0.0")) == [Beat(newest="0.0")]
    assert side.link.joined
    assert side.channels["address-0"].tokens == ["token-0"]  # it never forgot the searcher


def test_patience_has_an_end():
    side = Side().joined()
    assert side.wait(PATIENCE_S)
    assert not side.wait(1.0)


def test_patience_begins_anew_with_each_word():
    side = Side().joined()
    for _ in range(5):
        assert side.wait(PATIENCE_S - 1)
        side.tell(Beat(newest="0.0"))


@pytest.mark.parametrize("away_s", [PATIENCE_S, 5 * PATIENCE_S])
def test_a_trainer_that_is_found_late_has_all_the_patience_to_answer(away_s):
    """The searcher may have been away for longer than that itself: suspended, or in one long step."""
    side = Side().joined()
    side.place = place(1)
    assert side.wait(away_s + 1)
    assert side.wait(PATIENCE_S)
    assert side.channels["address-1"].tokens[0] == "token-1"
    assert not side.wait(1.0)  # a hello that is said again is no new trainer


def test_a_trainer_that_does_not_know_the_searcher_has_all_the_patience_to_answer():
    side = Side().joined()
    assert side.wait(PATIENCE_S)
    side.now_s += 1.0
    side.tell(Unknown())
    assert side.link.tend()
    side.now_s += PATIENCE_S
    side.tell(Unknown())  # the same one again, which answers what was said before the hello
    assert side.link.tend()
    assert not side.wait(1.0)


def test_between_a_hello_and_its_welcome_nothing_but_a_goodbye_is_said():
    """It would be about prompts and versions of another trainer."""
    beat = Heartbeat(generated=1, busy_s=0, idle_s=0, version="0.0", wanted_prompts=1, received_prompts=40)
    others = [beat, Applied(version="0.1", pause_s=0.0)]
    side = Side()
    at_first = side.channels["address-0"]
    for message in others:
        side.link.send(message)
    assert [type(message) for message in at_first.said] == [Hello]
    side.joined()
    for message in others:
        side.link.send(message)
    assert at_first.said[1:] == others
    side.place = place(1)
    side.wait(HEARTBEAT_S)
    goodbye = Goodbye(generated=1, busy_s=0, idle_s=0)
    for message in (*others, goodbye):
        side.link.send(message)
    assert [type(message) for message in side.channels["address-1"].said] == [Hello, Goodbye]


def test_a_trainer_that_is_silent_is_spoken_to_all_the_same():
    """It answers heartbeats, so it would never speak again to who says none."""
    side = Side().joined()
    side.wait(LEASE_S + 1)
    beat = Heartbeat(generated=0, busy_s=0, idle_s=0, version="0.0", wanted_prompts=0, received_prompts=0)
    side.link.send(beat)
    assert side.channels["address-0"].said[-1] == beat


def test_a_trainer_that_does_not_know_the_searcher_hears_one_hello():
    side = Side().joined()
    side.tell(Unknown(), Unknown(), Unknown())
    assert side.channels["address-0"].tokens == ["token-0"] * 2
    assert side.tell(Unknown(), WELCOME) == [WELCOME]
    assert side.channels["address-0"].tokens == ["token-0"] * 2


def test_a_hello_without_an_answer_is_said_again():
    side = Side()
    for _ in range(3):
        assert side.wait(LEASE_S + 1)
    assert side.channels["address-0"].tokens == ["token-0"] * 4


def test_what_a_trainer_that_has_ended_still_says_counts_for_nothing():
    side = Side().joined()
    side.link.wait_for_next()
    assert side.tell(Beat(newest="0.9")) == []
    assert side.link.state is LinkState.ALONE
    assert side.wait(PATIENCE_S) and not side.wait(1.0)


@pytest.mark.parametrize("address", ["address-1", "address-0"])
def test_after_a_trainer_that_has_ended_the_next_is_joined(address):
    side = Side().joined()
    side.link.wait_for_next()
    side.place = place(1, address)
    side.wait(HEARTBEAT_S)
    assert side.tell(WELCOME, to=address) == [WELCOME]
    assert side.link.joined


def test_at_a_fixed_address_the_next_trainer_says_that_it_does_not_know_the_searcher():
    side = Side().joined()
    side.link.wait_for_next()
    assert side.tell(Unknown()) == []
    assert side.tell(WELCOME, Beat(newest="1.0")) == [WELCOME, Beat(newest="1.0")]


def test_a_refusal_of_the_current_trainer_is_an_error_with_its_reason():
    with pytest.raises(TransportError, match="the trainer refused this searcher: because"):
        Side().tell(Refused(reason="because"))


@pytest.mark.parametrize("now_at", [None, place(1)])
def test_a_refusal_of_a_trainer_that_is_no_longer_current_is_not_the_end(now_at):
    side = Side()
    side.place = now_at
    assert side.tell(Refused(reason="old")) == []
    side.place = place(1)
    side.wait(HEARTBEAT_S)
    assert side.tell(WELCOME, to="address-1") == [WELCOME]
