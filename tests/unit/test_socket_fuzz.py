"""A shard's inbox under attack: what is honest comes through, what is not is counted, and nothing piles up."""

import hmac
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import psutil
import pytest
import xxhash
from rollout_factory import RolloutFactory
from socket_fuzzer import Attack, attack

from tba_megatron.config_search import TransportConfig
from tba_megatron.rollout_batch import RolloutBatch, decode, encode
from tba_megatron.transport import sockets
from tba_megatron.transport.delivery import Inbound, Verdict
from tba_megatron.transport.rollout_sender import RolloutSender
from tba_megatron.transport.rollouts import Head, RolloutReceiver
from tba_megatron.transport.sockets import listen_at, remove_sockets

SECRET = "c0" * 32
MOST_BYTES = 20_000
HONEST_EVERY = 100  # messages of the attacker
GROWTH_BYTES = 24 << 20  # of resident memory between a tenth of the attack and its end


class Valid:
    """Messages of some senders, each with its numbers; one in eight only asks."""

    def __init__(self) -> None:
        self._next = Counter[str]()
        self._made = 0
        groups = [RolloutFactory("fuzz").group(f"p{i}", [[1, 2, i], [3]]) for i in range(4)]
        self._payloads = [encode(RolloutBatch.of_groups([group])) for group in groups] + [b"no batch of rollouts"]

    def __call__(self) -> list[bytes]:
        self._made += 1
        name = f"fuzz{self._made % 5}"
        payload = self._payloads[self._made % len(self._payloads)]
        sequence = self._next[name]
        if self._made % 8 == 0:
            return [SECRET.encode(), msgspec.msgpack.encode(Head(name, sequence, 0, max(0, sequence - 3)))]
        self._next[name] += 1
        head = Head(name, sequence, xxhash.xxh3_64_intdigest(payload), max(0, sequence - 3))
        return [SECRET.encode(), msgspec.msgpack.encode(head), payload]


class Expected:
    """What a receiver has to do with messages that come in this order, said once more."""

    def __init__(self) -> None:
        self.refused = self.corrupt = self.accepted = 0
        self.verdicts = Counter[Verdict]()
        self._inbound = Inbound(1 << 30)

    @property
    def forgotten(self) -> int:
        return self._inbound.forgotten

    def see(self, frames: Sequence[bytes]) -> None:
        head = self._head(frames)
        if head is None:
            self.refused += 1
        elif len(frames) == 2:
            self._inbound.judge(head.sender, head.sequence, 0.0, head.oldest)
        elif xxhash.xxh3_64_intdigest(frames[2]) != head.checksum:
            self.corrupt += 1
        else:
            verdict = self._inbound.judge(head.sender, head.sequence, 0.0, head.oldest)
            self.verdicts[verdict] += 1
            if verdict is Verdict.ACCEPT:
                self._inbound.accepted(head.sender, 0)
                try:
                    decode(frames[2])
                    self.accepted += 1
                except ValueError:
                    self.refused += 1

    @staticmethod
    def _head(frames: Sequence[bytes]) -> Head | None:
        if not 2 <= len(frames) <= 3 or sum(map(len, frames)) > MOST_BYTES:
            return None
        try:
            head = msgspec.msgpack.decode(frames[1], type=Head)
        except ValueError:
            return None
        return head if hmac.compare_digest(frames[0], SECRET.encode()) and head.oldest <= head.sequence else None


def withstand(kind: str, run_folder, seed: int, messages: int) -> None:
    listen = listen_at(TransportConfig(sockets=kind), run_folder, SECRET)
    inbox = RolloutReceiver(listen, SECRET, most_bytes=MOST_BYTES, window_bytes=1 << 20)
    outbox = RolloutSender([inbox.address], SECRET, "honest", resend_s=600.0, batch_bytes=1, most_bytes=MOST_BYTES)
    try:
        factory, sent = RolloutFactory("honest"), 0
        expected, acts = Expected(), Counter[Attack]()
        arrived: list[str] = []  # prompts of what is honest
        from_fuzz, resident_bytes = 0, 0
        for act, frames in attack(inbox.address, SECRET, Valid(), seed=seed, messages=messages, most_bytes=MOST_BYTES):
            acts[act] += 1
            if act not in (Attack.RAW, Attack.STRANGER, Attack.CUT_OFF):
                expected.see(frames)
            n = acts.total()
            if n % HONEST_EVERY == 0:
                outbox.send(factory.group(f"h{sent}", [[sent], []]))
                sent += 1
                outbox.flush()
                from_fuzz += _drain(inbox, arrived)
            if n == messages // 10:
                resident_bytes = psutil.Process().memory_info().rss
        deadline = time.monotonic() + 120
        while not _all_is_there(inbox, outbox, acts, expected, len(arrived), sent, from_fuzz):
            assert time.monotonic() < deadline, (acts, vars(expected), _counts(inbox), len(arrived), sent, from_fuzz)
            outbox.flush()
            from_fuzz += _drain(inbox, arrived)
            time.sleep(0.001)
        grown_bytes = psutil.Process().memory_info().rss - resident_bytes
        assert min(acts[act] for act in Attack if act is not Attack.STRANGER) > 0
        assert arrived == [f"h{i}" for i in range(sent)]
        assert outbox.close(60.0) == 0
        assert _counts(inbox) == {
            "corrupt": expected.corrupt,
            "duplicates": expected.verdicts[Verdict.DUPLICATE],
            "gaps": expected.verdicts[Verdict.GAP],
            "forgotten": expected.forgotten,
        }
        assert from_fuzz == expected.accepted
        outsiders = acts[Attack.RAW] + acts[Attack.STRANGER]
        if kind == "tcp":
            assert inbox.refused == expected.refused + outsiders
        else:  # a connection without any greeting is one of ZMTP 1.0 there, and what it says are messages
            assert inbox.refused >= expected.refused + outsiders
        assert grown_bytes < GROWTH_BYTES
    finally:
        outbox.close(0.0)
        inbox.close()


def _drain(inbox: RolloutReceiver, arrived: list[str]) -> int:
    """Takes in what is there; how many messages were the attacker's."""
    n = 0
    for arrival in inbox.drain():
        if arrival.sender == "honest":
            arrived += arrival.batch.prompt_ids
        else:
            n += 1
    return n


def _all_is_there(inbox, outbox, acts, expected: Expected, arrived: int, sent: int, from_fuzz: int) -> bool:
    return (
        not outbox.unacknowledged
        and (arrived, from_fuzz) == (sent, expected.accepted)
        and inbox.refused >= expected.refused + acts[Attack.RAW] + acts[Attack.STRANGER]
        and inbox.corrupt >= expected.corrupt
    )


def _counts(inbox: RolloutReceiver) -> dict[str, int]:
    return {name: getattr(inbox, name) for name in ("corrupt", "duplicates", "gaps", "forgotten")}


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: "/tmp")  # pytest's own are too long for sockets
    yield tmp_path
    remove_sockets(tmp_path)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_an_inbox_withstands_some_thousand_messages(run_folder, kind, seed):
    withstand(kind, run_folder, seed, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_an_inbox_withstands_two_hundred_thousand_messages(run_folder, kind):
    withstand(kind, run_folder, 2, 200_000)
