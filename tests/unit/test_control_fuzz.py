"""The control channel under attack: an honest searcher is always answered, and nothing piles up."""

from __future__ import annotations

import time
from collections import Counter
from itertools import count

import psutil
import pytest
from socket_fuzzer import Attack, attack

from tba_megatron.config_search import TransportConfig
from tba_megatron.transport import sockets
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.control_client import ControlClient
from tba_megatron.transport.fleet import FleetSettings
from tba_megatron.transport.messages import (
    Applied,
    Beat,
    Evaluated,
    FromSearcher,
    Heartbeat,
    Hello,
    Probed,
    ReceiveFailed,
    SampleRollout,
    encode,
)
from tba_megatron.transport.registry import PromptLeases
from tba_megatron.transport.sockets import listen_at, remove_sockets
from tba_megatron.types import PolicyVersion

SECRET = "c1" * 32
HONEST_EVERY = 100  # messages of the attacker
GROWTH_BYTES = 24 << 20  # of resident memory between a tenth of the attack and its end


class Valid:
    """What a searcher says, over and over."""

    def __init__(self) -> None:
        beat = Heartbeat(generated=3, busy_s=1, idle_s=1, version="0.0", wanted_prompts=9, received_prompts=0)
        self._said: list[FromSearcher] = [
            Hello(token=SECRET, searcher="fuzz", host="h", workers=1, version="0.0", prompts=10),
            beat,
            Applied(version="0.0", pause_s=0.1),
            Probed(version="0.0", logprobs_nats=(-1.0, -2.0)),
            ReceiveFailed(version="0.0", round=3, reason="none"),
            Evaluated(version="0.0", accuracy=0.5, problems=9, seconds=1.0),
            SampleRollout(prompt="1+1=", completion="2", reward=1.0, version="0.0"),
        ]
        self._numbers = count()

    def __call__(self) -> list[bytes]:
        number = next(self._numbers)
        return [encode(self._said[number % len(self._said)], number)]


def withstand(kind: str, run_folder, seed: int, messages: int) -> None:
    server = ControlServer(
        listen_at(TransportConfig(sockets=kind), run_folder, SECRET),
        SECRET,
        FleetSettings(lease_s=600, silent_s=600, max_ahead_groups=8, shards=("s",), epochs=1),
        newest=PolicyVersion(0, 0),
        leases=PromptLeases(),
    )
    honest = ControlClient(server.address, SECRET, "honest")
    try:
        honest.send(Hello(token=SECRET, searcher="honest", host="h", workers=1, version="0.0", prompts=10))
        acts, beats, heard, resident_bytes = Counter[Attack](), 0, 0, 0

        def listen() -> int:
            return sum(isinstance(message, Beat) for message in honest.poll(0.0))

        for act, _ in attack(server.address, SECRET, Valid(), seed=seed, messages=messages, most_bytes=4 << 20):
            acts[act] += 1
            n = acts.total()
            if n % HONEST_EVERY == 0:
                beats += 1
                honest.send(
                    Heartbeat(generated=beats, busy_s=0, idle_s=0, version="0.0", wanted_prompts=0, received_prompts=0)
                )
                heard += listen()
                server.take_probes(), server.take_evaluations(), server.take_samples()
            if n == messages // 10:
                resident_bytes = psutil.Process().memory_info().rss
        outsiders = acts[Attack.RAW] + acts[Attack.STRANGER]
        deadline = time.monotonic() + 120
        while heard < beats or server.refused < outsiders + acts[Attack.TOO_LARGE]:
            assert time.monotonic() < deadline, (acts, heard, beats, server.refused)
            heard += listen()
            time.sleep(0.001)
        member = server.member("honest")
        assert member is not None and member.gone is None and member.generated == beats
        assert server.repeated > 0
        assert psutil.Process().memory_info().rss - resident_bytes < GROWTH_BYTES
    finally:
        honest.close(0.0)
        server.close()


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: "/tmp")  # pytest's own are too long for sockets
    yield tmp_path
    remove_sockets(tmp_path)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_trainer_withstands_some_thousand_messages(run_folder, kind):
    withstand(kind, run_folder, 0, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_trainer_withstands_a_hundred_thousand_messages(run_folder, kind):
    withstand(kind, run_folder, 1, 100_000)
