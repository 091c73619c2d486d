"""The control channel over real sockets: who is let in, who gets prompts, who is lost."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tba_megatron.errors import TransportError
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.control_client import ControlClient
from tba_megatron.transport.fleet import FleetSettings
from tba_megatron.transport.messages import (
    Applied,
    Beat,
    Evaluate,
    Evaluated,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Offer,
    ReceiveFailed,
    Refused,
    SampleRollout,
    Stop,
    ToSearcher,
    Unknown,
    Welcome,
    encode,
)
from tba_megatron.transport.registry import PromptLeases, State
from tba_megatron.transport.sockets import Listen
from tba_megatron.types import PolicyVersion

TOKEN = "of-this-run-é"
V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
LEASE_S, SILENT_S = 100.0, 30.0
SHARDS = ("tcp://shard-0", "tcp://shard-1")
WELCOME = Welcome(shards=SHARDS, newest="0.0")


class Clock:
    """Time that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def serving(*, max_ahead_groups: int = 8, port: int | None = None, clock: Callable[[], float] | None = None):
    """Over ipc, or over tcp where a ``port`` is given."""
    with tempfile.TemporaryDirectory() as folder:
        sockets = "ipc" if port is None else "tcp"
        server = ControlServer(
            Listen(sockets=sockets, host="127.0.0.1", folder=Path(folder) / "sockets"),
            TOKEN,
            FleetSettings(lease_s=LEASE_S, silent_s=SILENT_S, max_ahead_groups=max_ahead_groups, shards=SHARDS),
            port=port or 0,
            newest=V0,
            leases=PromptLeases(),
            clock=clock or Clock(),
        )
        try:
            yield server
        finally:
            server.close()


class Peer:
    """A searcher reduced to its voice. ``leases`` are all it was ever given."""

    def __init__(self, server: ControlServer, name: str) -> None:
        self.client = ControlClient(server.address, TOKEN)
        self.name = name
        self.inbox: list[ToSearcher] = []
        self.received = 0
        self.leases: list[Lease] = []

    def hello(self, token: str = TOKEN) -> ToSearcher:
        self.client.send(Hello(token=token, searcher=self.name, host="h", workers=1, version="0.0"))
        return self.hear(Welcome, Refused)

    def beat(self, wanted: int = 0, generated: int = 0) -> None:
        """Say something and wait until it was heard; leases that came with the answer are kept."""
        self.client.send(
            Heartbeat(
                generated=generated,
                busy_s=1.0,
                idle_s=2.0,
                version="0.0",
                wanted_prompts=wanted,
                received_prompts=self.received,
            )
        )
        self.hear(Beat)

    def hear(self, *kinds: type) -> ToSearcher:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for message in self.inbox:
                if isinstance(message, kinds):
                    self.inbox.remove(message)
                    return message
            for message in self.client.poll(0.1):
                self.inbox.append(message)
                if isinstance(message, Lease):
                    self.leases.append(message)
                    self.received += message.count
        raise AssertionError(f"{self.name} never heard {[kind.__name__ for kind in kinds]}")

    def positions(self) -> list[int]:
        return [p for lease in self.leases for p in range(lease.start, lease.start + lease.count)]


@contextmanager
def peers(server: ControlServer, *names: str) -> Iterator[list[Peer]]:
    made = [Peer(server, name) for name in names]
    try:
        for peer in made:
            assert peer.hello() == WELCOME
        yield made
    finally:
        for peer in made:
            peer.client.close(linger_s=0.0)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.002)


def joined_and_lost(server: ControlServer) -> tuple[int, int]:
    totals = server.totals()
    return totals["joined"], totals["lost"]


def test_a_searcher_with_another_token_is_refused_and_counted(caplog):
    with serving() as server, caplog.at_level(logging.ERROR):
        for token in ("of-another-run", "", "é"):
            stranger = Peer(server, "stranger")
            answer = stranger.hello(token)
            stranger.client.send(Applied(version="0.1", pause_s=0.1))
            assert answer == Refused(reason="the token is not this run's")
            assert stranger.hear(Unknown) == Unknown()
            stranger.client.close()
        wait_for(lambda: server.refused == 3)
        assert server.members() == []
        assert joined_and_lost(server) == (0, 0)


def test_noise_is_refused_and_the_server_goes_on(caplog):
    noise = [
        [b"noise"],
        [b""],
        [b"two", b"frames"],
        [b"\x81\xa4type\xa5Hello"],
        [b"\x92\x00\x82\xa4type\xa7Applied\xa7version\xa1x"],
        [b"\x92\x00\x82\xa5token" + b"\x91" * 100_000 + b"\xa4type\xa5Hello"],
    ]
    with serving() as server, caplog.at_level(logging.ERROR):
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(f"{server.address}")
            for frames in noise:
                socket.send_multipart(frames)
            wait_for(lambda: server.refused == len(noise))
        bad = Hello(token=TOKEN, searcher="a", host="h", workers=1, version="newest")
        stranger = ControlClient(server.address, TOKEN)
        stranger.send(bad)
        wait_for(lambda: server.refused == len(noise) + 1)
        stranger.close()
        with peers(server, "a") as (a,):
            a.beat()


def test_a_member_is_known_by_what_it_said():
    with serving() as server, peers(server, "a") as (a,):
        a.beat(wanted=0, generated=5)
        (member,) = server.members()
        assert (member.searcher, member.workers, member.version, member.generated) == ("a", 1, V0, 5)
        assert server.generated() == ({"a": 5}, frozenset())
        assert server.times() == (1.0, 2.0)
        assert member.state(server.newest(), 0.0, SILENT_S) is State.JOINING
        server.set_epoch(("a", "unknown"), 3)
        server.published(V1)
        assert server.members()[0].state(server.newest(), 0.0, SILENT_S) is State.BEHIND
        a.client.send(Applied(version="0.1", pause_s=0.1))
        assert server.wait_until(lambda members: members[0].version == V1, 10)
        assert server.members()[0].state(server.newest(), 0.0, SILENT_S) is State.CURRENT


def test_a_failed_receive_takes_the_searcher_out_of_the_group_and_a_new_epoch_clears_it():
    with serving() as server, peers(server, "a") as (a,):
        server.set_epoch(("a",), 3)
        server.send("a", Offer(version="0.1", manifest=b"", round=7))
        a.client.send(ReceiveFailed(version="0.1", round=7, reason="checksum"))
        assert server.wait_until(lambda members: members[0].failure == "checksum", 10)
        assert server.members()[0].epoch == -1
        server.set_epoch(("a",), 4)
        assert (server.members()[0].failure, server.members()[0].epoch) == (None, 4)


def test_waiting_ends_at_its_deadline():
    with serving() as server:
        assert not server.wait_until(lambda members: False, 0.01)


def test_what_searchers_tell_is_taken_once():
    evaluated = Evaluated(version="0.0", accuracy=0.5, problems=4, seconds=1.0)
    sample = SampleRollout(prompt="1+1=", completion="2", reward=1.0, version="0.0")
    with serving() as server, peers(server, "a") as (a,):
        a.client.send(evaluated)
        a.client.send(sample)
        a.beat()
        assert server.take_evaluations() == [evaluated]
        assert server.take_samples() == [sample]
        assert server.take_evaluations() == server.take_samples() == []


def test_leases_never_exceed_what_searchers_may_be_ahead():
    with serving(max_ahead_groups=8) as server, peers(server, "a", "b") as (a, b):
        a.beat(wanted=6)
        b.beat(wanted=6)
        wait_for(lambda: server.outstanding_prompts() == 8)
        for peer in (a, b):
            peer.beat(wanted=6)
            peer.beat(wanted=6)
        assert server.outstanding_prompts() == 8
        assert sorted(a.positions() + b.positions()) == list(range(8))


def test_groups_that_were_never_trained_on_take_room():
    with serving(max_ahead_groups=8) as server, peers(server, "a") as (a,):
        server.note(arrived={}, fresh_prompts=5)
        a.beat(wanted=6)
        a.beat(wanted=6 - a.received)
        assert server.outstanding_prompts() == 3
        server.note(arrived={a.leases[0].lease: 3}, fresh_prompts=8)
        a.beat(wanted=6)
        a.beat(wanted=6)
        assert server.outstanding_prompts() == 0
        server.note(arrived={}, fresh_prompts=0)  # a step took them
        wait_for(lambda: server.outstanding_prompts() == 6)


def test_the_emptiest_searcher_is_served_first():
    with serving(max_ahead_groups=5) as server, peers(server, "a", "b") as (a, b):
        server.note(arrived={}, fresh_prompts=5)
        a.beat(wanted=2)
        b.beat(wanted=4)
        server.note(arrived={}, fresh_prompts=0)
        wait_for(lambda: server.outstanding_prompts() == 5)
        a.beat()
        b.beat()
        assert (a.received, b.received) == (1, 4)


def test_a_prompt_on_its_way_is_not_granted_again():
    with serving(max_ahead_groups=100) as server, peers(server, "a") as (a,):
        for _ in range(5):  # as if five heartbeats were under way before the first lease arrived
            a.client.send(
                Heartbeat(generated=0, busy_s=0, idle_s=0, version="0.0", wanted_prompts=4, received_prompts=0)
            )
        for _ in range(5):
            a.hear(Beat)
        a.beat()
        assert a.positions() == [0, 1, 2, 3]


def test_a_searcher_that_evaluates_gets_no_prompts_until_it_is_done():
    with serving() as server, peers(server, "a") as (a,):
        server.send("a", Evaluate(version="0.0"))
        assert a.hear(Evaluate) == Evaluate(version="0.0")
        a.beat(wanted=4)
        a.beat(wanted=4)
        assert server.outstanding_prompts() == 0
        a.client.send(Evaluated(version="0.0", accuracy=1.0, problems=1, seconds=0.1))
        wait_for(lambda: server.outstanding_prompts() == 4)


def test_silence_makes_a_searcher_lost_and_its_prompts_go_to_another(caplog):
    clock = Clock()
    with serving(clock=clock) as server, peers(server, "a", "b") as (a, b), caplog.at_level(logging.ERROR):
        a.beat(wanted=4, generated=3)
        a.hear(Lease)
        clock.now_s = LEASE_S
        b.beat()
        clock.now_s = LEASE_S + 1
        wait_for(lambda: joined_and_lost(server) == (2, 1))
        assert [m.searcher for m in server.members()] == ["b"]
        assert server.generated() == ({"a": 3, "b": 0}, frozenset({"a"}))
        b.beat(wanted=4)
        b.hear(Lease)
        assert b.positions() == a.positions() == [0, 1, 2, 3]


def test_a_searcher_that_was_only_slow_comes_back(caplog):
    clock = Clock()
    with serving(clock=clock) as server, peers(server, "a") as (a,), caplog.at_level(logging.ERROR):
        a.beat(wanted=2)
        a.hear(Lease)
        clock.now_s = LEASE_S + 1
        wait_for(lambda: joined_and_lost(server) == (1, 1))
        assert server.members() == []
        a.beat(wanted=0, generated=7)
        assert [m.searcher for m in server.members()] == ["a"]
        assert server.generated() == ({"a": 7}, frozenset())
        server.note(arrived={a.leases[0].lease: 2}, fresh_prompts=0)  # of a lease that was taken back
        a.beat(wanted=2)
        wait_for(lambda: server.outstanding_prompts() == 2)
        assert server.unfinished_prompts() == (2, [(0, 2)])


def test_a_goodbye_returns_the_prompts_and_is_no_loss():
    with serving() as server, peers(server, "a", "b") as (a, b):
        a.beat(wanted=4)
        wait_for(lambda: server.outstanding_prompts() == 4)
        a.client.send(Goodbye(generated=9, busy_s=3.0, idle_s=4.0))
        assert server.wait_until(lambda members: [m.searcher for m in members] == ["b"], 10)
        assert joined_and_lost(server) == (2, 0)
        assert server.generated() == ({"a": 9, "b": 0}, frozenset({"a"}))
        assert server.outstanding_prompts() == 0
        b.beat(wanted=4)
        wait_for(lambda: server.outstanding_prompts() == 4)
        b.beat()
        assert b.positions() == [0, 1, 2, 3]


def test_a_goodbye_of_a_lost_searcher_does_not_revive_it(caplog):
    clock = Clock()
    with serving(clock=clock) as server, peers(server, "a") as (a,), caplog.at_level(logging.ERROR):
        clock.now_s = LEASE_S + 1
        wait_for(lambda: joined_and_lost(server) == (1, 1))
        a.client.send(Goodbye(generated=9, busy_s=0.0, idle_s=0.0))
        wait_for(lambda: server.generated()[0] == {"a": 9})
        assert server.members() == []


def test_stop_reaches_all_and_ends_the_leases():
    with serving() as server, peers(server, "a", "b", "c") as everyone:
        server.stop_searchers("the run is complete", final=True)
        for peer in everyone:
            assert peer.hear(Stop) == Stop(reason="the run is complete", final=True)
            peer.beat(wanted=4)
            peer.beat(wanted=4)
        assert server.outstanding_prompts() == 0


def test_a_message_to_one_searcher_reaches_no_other():
    with serving() as server, peers(server, "a", "b") as (a, b):
        server.send("b", Evaluate(version="0.7"))
        server.send("nobody", Evaluate(version="0.8"))
        assert b.hear(Evaluate) == Evaluate(version="0.7")
        a.client.send(Heartbeat(generated=0, busy_s=0, idle_s=0, version="0.0", wanted_prompts=0, received_prompts=0))
        assert isinstance(a.hear(Beat, Evaluate), Beat)


def test_a_taken_port_is_one_clear_line():
    with serving(port=0) as server:
        port = int(server.address.rsplit(":", 1)[1])
        with pytest.raises(TransportError) as caught, serving(port=port):
            pass
    message = str(caught.value)
    assert message.startswith(f"transport.control_port: cannot listen on 127.0.0.1:{port} (")
    assert "choose another port, or 0 for a free one" in message
    assert "\n" not in message


def test_a_closed_server_leaves_its_port():
    with serving(port=0) as server:
        port = int(server.address.rsplit(":", 1)[1])
    with serving(port=port) as server, peers(server, "a") as (a,):
        a.beat()


def test_a_message_that_comes_twice_counts_once():
    with serving() as server, peers(server, "a") as (a,):
        evaluated = Evaluated(version="0.0", accuracy=0.5, problems=4, seconds=1.0)
        for number in (70, 70, 69, 70):
            a.client._dealer.socket.send(encode(evaluated, number))
        wait_for(lambda: server.repeated == 2)
        assert server.take_evaluations() == [evaluated, evaluated]


def test_a_searcher_that_this_trainer_does_not_know_is_asked_to_say_hello():
    with serving() as server:
        peer = Peer(server, "a")
        peer.client.send(Applied(version="0.1", pause_s=0.1))
        assert peer.hear(Unknown) == Unknown()
        assert peer.hello() == WELCOME
        peer.beat(wanted=2)
        wait_for(lambda: server.outstanding_prompts() == 2)
        peer.client.close()


def test_who_comes_while_the_trainer_stops_is_told_so():
    with serving() as server:
        server.stop_searchers("the trainer stops", final=False)
        late = Peer(server, "late")
        assert late.hello() == WELCOME
        assert late.hear(Stop) == Stop(reason="the trainer stops", final=False)
        late.client.close()
