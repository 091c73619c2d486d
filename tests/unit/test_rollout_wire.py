"""Rollouts over sockets: each arrives once and safe, and nothing that is not of this run comes through."""

import logging
import os
import select
import signal
import socket as socketlib
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import xxhash
import zmq
from rollout_factory import RolloutFactory

from tba_megatron.errors import TbaError, TransportError
from tba_megatron.rollout_batch import RolloutBatch, encode
from tba_megatron.transport.delivery import Answer
from tba_megatron.transport.memory import MemoryRollouts
from tba_megatron.transport.rollout_sender import RolloutSender
from tba_megatron.transport.rollouts import Arrival, Head, RolloutReceiver, owner_of
from tba_megatron.transport.sockets import Dealer, Listen, Router
from tba_megatron.types import LogPosition, RolloutGroup

TOKEN, OTHER_TOKEN = "of-this-run", "of-another-run"
TCP = Listen(sockets="tcp", host="127.0.0.1", folder=Path("unused"))


class ListLog:
    """An ``ArrivalLog`` in memory that can be made to fail."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, bytes, int]] = []
        self.syncs: list[int] = []  # records at each
        self.fault: Exception | None = None

    def append(self, sender: str, sequence: int, payload: memoryview, checksum: int) -> LogPosition:
        if self.fault is not None:
            raise self.fault
        self.records.append((sender, sequence, bytes(payload), checksum))
        return LogPosition(0, len(self.records))

    def sync(self) -> None:
        self.syncs.append(len(self.records))


@contextmanager
def receiver(**options):
    inbox = RolloutReceiver(TCP, TOKEN, **options)
    try:
        yield inbox
    finally:
        inbox.close()


@contextmanager
def other_receiver(**options):
    """Of the trainer's next attempt."""
    inbox = RolloutReceiver(TCP, OTHER_TOKEN, **options)
    try:
        yield inbox
    finally:
        inbox.close()


@contextmanager
def sender_to(*addresses: str, name: str = "s0", token: str = TOKEN, **options):
    outbox = RolloutSender(addresses, token, name, **options)
    try:
        yield outbox
    finally:
        outbox.close(linger_s=0.0)


@contextmanager
def raw_socket(address: str):
    dealer = Dealer(address, TOKEN)
    try:
        yield dealer.socket
    finally:
        dealer.close(0.0)


def until(condition: Callable[[], object], act: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        act()
        time.sleep(0.001)


def groups_of(arrivals: list[Arrival]) -> list[RolloutGroup]:
    return [group for arrival in arrivals for group in arrival.batch.groups()]


def prompts_of(arrivals: list[Arrival]) -> list[str]:
    return [group.prompt_id for group in groups_of(arrivals)]


def take_all(inbox: RolloutReceiver, outbox: RolloutSender, n_groups: int) -> list[Arrival]:
    got: list[Arrival] = []

    def turn() -> None:
        outbox.flush()
        got.extend(inbox.drain())

    until(lambda: sum(a.batch.n_groups for a in got) >= n_groups, turn)
    return got


def some_groups(n: int, name: str = "s0", tokens: int = 2) -> list[RolloutGroup]:
    factory = RolloutFactory(name)
    return [factory.group(f"{name}-p{i}", [list(range(tokens)), []]) for i in range(n)]


def payload_of(groups: list[RolloutGroup]) -> bytes:
    return encode(RolloutBatch.of_groups(groups))


def message(
    sequence: int, payload: bytes, *, token: str = TOKEN, checksum: int | None = None, oldest: int = 0
) -> list[bytes]:
    checksum = xxhash.xxh3_64_intdigest(payload) if checksum is None else checksum
    return [token.encode(), msgspec.msgpack.encode(Head("raw", sequence, checksum, oldest)), payload]


def answer_on(socket: zmq.Socket) -> Answer:
    assert socket.poll(60_000), "no answer"
    return msgspec.msgpack.decode(socket.recv(), type=Answer)


def assert_same(got: list[RolloutGroup], sent: list[RolloutGroup]) -> None:
    assert payload_of(got) == payload_of(sent)


# ---- what arrives


def test_a_shard_is_the_same_in_every_process():
    # CRC-32 and its published check value: it must never change, so that a restored run finds its prompts.
    assert owner_of("123456789", 2**32) == 0xCBF43926
    assert owner_of("anything", 1) == 0


def test_shards_share_prompts_about_equally():
    counts = np.bincount([owner_of(f"p{i}", 3) for i in range(3000)], minlength=3)
    assert counts.min() > 900


def test_every_group_arrives_at_its_owner_once_and_in_order():
    with receiver() as first, receiver() as second:
        inboxes = [first, second]
        sent = [some_groups(100, name) for name in ("s0", "s1")]
        outboxes = [RolloutSender([i.address for i in inboxes], TOKEN, name, batch_bytes=2000) for name in ("s0", "s1")]
        for pair in zip(*sent, strict=True):
            for outbox, group in zip(outboxes, pair, strict=True):
                outbox.send(group)
        assert [outbox.close(linger_s=60.0) for outbox in outboxes] == [0, 0]
        for shard, inbox in enumerate(inboxes):
            arrivals = list(inbox.drain())
            for name, groups in zip(("s0", "s1"), sent, strict=True):
                mine = [a for a in arrivals if a.sender == name]
                assert [a.sequence for a in mine] == list(range(len(mine)))
                assert len(mine) > 3
                assert_same(groups_of(mine), [g for g in groups if owner_of(g.prompt_id, 2) == shard])
            assert (inbox.refused, inbox.corrupt, inbox.gaps, inbox.waiting_bytes) == (0, 0, 0, 0)


def test_many_groups_travel_in_one_message_and_each_holds_about_batch_bytes():
    groups = some_groups(30, tokens=100)
    size = len(payload_of(groups[:1]))
    with receiver() as inbox, sender_to(inbox.address, batch_bytes=10 * size) as outbox:
        outbox.send(groups[0])
        until(lambda: not outbox.unacknowledged, outbox.flush)  # from here on there is credit for all
        for group in groups[1:]:
            outbox.send(group)
        arrivals = take_all(inbox, outbox, 30)
    assert_same(groups_of(arrivals), groups)
    assert len(arrivals) <= 4
    assert max(a.n_bytes for a in arrivals) < 12 * size


def test_a_message_that_is_full_leaves_without_a_flush():
    with receiver() as inbox, sender_to(inbox.address, batch_bytes=1) as outbox:
        outbox.send(some_groups(1)[0])
        until(lambda: inbox.waiting_bytes)


def test_groups_come_back_as_they_were_from_memory():
    pair = MemoryRollouts()
    sent = some_groups(3)
    pair.send(sent[0])
    assert list(pair.drain()) == []
    pair.send(sent[1])
    pair.flush()
    pair.send(sent[2])
    assert pair.close() == 0
    assert pair.room
    assert pair.reconnect(["anywhere"], "secret") == pair.unacknowledged == pair.forgotten == 0
    waiting_bytes = pair.waiting_bytes
    arrivals = list(pair.drain())
    assert [a.batch.n_groups for a in arrivals] == [2, 1]
    assert [(a.sender, a.sequence, a.end) for a in arrivals] == [("memory", 0, None), ("memory", 1, None)]
    assert waiting_bytes == sum(a.n_bytes for a in arrivals) > pair.waiting_bytes == 0
    assert_same(groups_of(arrivals), sent)
    assert list(pair.drain()) == []


# ---- draining


def waiting_inbox(inbox: RolloutReceiver, messages: int) -> None:
    with raw_socket(inbox.address) as socket:
        for sequence in range(messages):
            socket.send_multipart(message(sequence, payload_of(some_groups(1))))
            while answer_on(socket).acknowledged <= sequence:
                pass


def test_drain_gives_at_least_one_and_stops_when_the_callers_time_is_over():
    with receiver() as inbox:
        assert list(inbox.drain(0.0)) == []
        waiting_inbox(inbox, 3)
        assert [a.sequence for a in inbox.drain(0.0)] == [0]
        assert [a.sequence for a in inbox.drain(60.0)] == [1, 2]


def test_drain_gives_as_many_groups_as_are_needed_however_long_it_takes():
    with receiver() as inbox:
        waiting_inbox(inbox, 4)
        assert [a.sequence for a in inbox.drain(0.0, 3)] == [0, 1, 2]
        assert [a.sequence for a in inbox.drain(0.0, 3)] == [3]


def test_what_arrives_during_a_drain_is_left_for_the_next():
    with receiver() as inbox:
        waiting_inbox(inbox, 1)
        taking = inbox.drain()
        assert next(taking).sequence == 0
        with raw_socket(inbox.address) as socket:
            socket.send_multipart(message(1, payload_of(some_groups(1))))
            assert answer_on(socket).acknowledged == 2
        assert list(taking) == []
        assert [a.sequence for a in inbox.drain()] == [1]


def test_an_arrival_is_taken_in_when_the_next_is_asked_for_or_the_drain_is_left():
    with receiver() as inbox:
        waiting_inbox(inbox, 3)
        of_one = inbox.waiting_bytes // 3
        taking = inbox.drain()
        next(taking)
        assert inbox.waiting_bytes == 3 * of_one
        next(taking)
        assert inbox.waiting_bytes == 2 * of_one
        taking.close()
        assert inbox.waiting_bytes == of_one
        assert [a.sequence for a in inbox.drain()] == [2]


# ---- what must not come through


def test_repeated_and_reordered_messages_change_nothing():
    payloads = [payload_of(some_groups(1, f"m{i}")) for i in range(4)]
    log = ListLog()
    with receiver(log=log) as inbox, raw_socket(inbox.address) as socket:
        acknowledged = []
        for sequence in (1, 0, 0, 2, 1, 3, 3, 0, 2, 1, 3):
            socket.send_multipart(message(sequence, payloads[sequence]))
            acknowledged.append(answer_on(socket).acknowledged)
        assert acknowledged == [0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4]
        assert (inbox.duplicates, inbox.gaps) == (3, 4)
        arrivals = list(inbox.drain())
    assert prompts_of(arrivals) == [f"m{i}-p0" for i in range(4)]
    assert [a.end for a in arrivals] == [LogPosition(0, i) for i in range(1, 5)]
    assert log.records == [("raw", i, p, xxhash.xxh3_64_intdigest(p)) for i, p in enumerate(payloads)]


GOOD = payload_of(some_groups(1))
STRANGE = {
    "nothing": [b""],
    "another token": message(0, GOOD, token="of-another-run"),
    "no token": message(0, GOOD)[1:],
    "a token alone": message(0, GOOD)[:1],
    "a frame more": [*message(0, GOOD), b""],
    "a head that is none": [TOKEN.encode(), b"head", GOOD],
    "a negative number": message(-1, GOOD),
    "a number that is too large": message(1 << 62, GOOD),
    "an oldest one that is newer than itself": message(3, GOOD, oldest=4),
    "the same without a payload": message(3, GOOD, oldest=4)[:2],
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_not_of_this_run_is_refused_and_not_answered(what):
    with receiver() as inbox, raw_socket(inbox.address) as socket:
        socket.send_multipart(STRANGE[what])
        until(lambda: inbox.refused == 1)
        socket.send_multipart(message(0, GOOD))
        assert answer_on(socket).acknowledged == 1  # the first answer of all
        assert socket.poll(0) == 0
        assert prompts_of(list(inbox.drain())) == ["s0-p0"]
        assert (inbox.refused, inbox.corrupt) == (1, 0)


def test_a_searcher_of_another_run_is_refused():
    with receiver() as inbox, sender_to(inbox.address, token="of-another-run") as outbox:
        outbox.send(some_groups(1)[0])
        outbox.flush()
        until(lambda: inbox.refused)
        assert list(inbox.drain()) == []
        assert outbox.close(linger_s=0.0) == 2


def test_a_damaged_message_is_not_acknowledged_and_comes_again():
    with receiver() as inbox, raw_socket(inbox.address) as socket:
        damaged = GOOD[:-9] + bytes([GOOD[-9] ^ 1]) + GOOD[-8:]
        socket.send_multipart(message(0, damaged, checksum=xxhash.xxh3_64_intdigest(GOOD)))
        until(lambda: inbox.corrupt == 1)
        socket.send_multipart(message(0, GOOD))
        assert answer_on(socket).acknowledged == 1
        assert socket.poll(0) == 0
        assert (inbox.corrupt, inbox.refused, inbox.gaps) == (1, 0, 0)


def test_a_whole_message_that_is_no_batch_is_refused_and_out_of_the_way():
    log = ListLog()
    with receiver(log=log, window_bytes=8) as inbox, raw_socket(inbox.address) as socket:
        socket.send_multipart(message(0, b"no batch of rollouts"))
        assert answer_on(socket) == Answer(1, 1)  # it holds no credit
        assert (inbox.refused, inbox.waiting_bytes, log.records) == (1, 0, [])
        socket.send_multipart(message(0, b"no batch of rollouts"))
        assert answer_on(socket).acknowledged == 1
        socket.send_multipart(message(1, GOOD))
        assert answer_on(socket).acknowledged == 2
        assert (inbox.refused, inbox.duplicates) == (1, 1)
        assert prompts_of(list(inbox.drain())) == ["s0-p0"]


@pytest.mark.parametrize("tokens", [3, 40_000])
def test_columns_of_arrivals_are_aligned_whatever_zeromq_did(tokens):
    with receiver() as inbox, sender_to(inbox.address, name="s") as outbox:
        for i, group in enumerate(some_groups(9, tokens=tokens)):
            outbox.send(group)
            if i % 3:
                outbox.flush()
        for arrival in take_all(inbox, outbox, 9):
            assert arrival.batch.token_ids_T.flags.aligned
            assert arrival.batch.reward_S.flags.aligned


# ---- credit


def test_a_shard_that_takes_nothing_in_holds_a_window_and_its_senders_have_no_room():
    groups = {name: some_groups(200, name, tokens=50) for name in ("s0", "s1")}
    n_bytes = len(payload_of(groups["s0"][:1]))
    window_bytes = 20 * n_bytes
    options = {"batch_bytes": 3 * n_bytes, "resend_s": 0.02}
    with (
        receiver(window_bytes=window_bytes) as inbox,
        sender_to(inbox.address, name="s0", **options) as first,
        sender_to(inbox.address, name="s1", **options) as second,
    ):
        outboxes = {"s0": first, "s1": second}
        left = {name: list(groups[name]) for name in groups}

        def turn() -> None:
            for name, outbox in outboxes.items():
                outbox.flush()
                if outbox.room and left[name]:
                    outbox.send(left[name].pop(0))

        until(lambda: not (first.room or second.room), turn)
        for _ in range(100):  # some of them resends and questions: none may get through
            turn()
            time.sleep(0.002)
        assert not first.room
        assert not second.room
        assert window_bytes / 2 < inbox.waiting_bytes <= window_bytes + 2 * 4 * n_bytes
        assert min(len(rest) for rest in left.values()) > 100
        got = list(inbox.drain())
        until(lambda: first.room and second.room, turn)

        def go_on() -> None:
            turn()
            got.extend(inbox.drain())

        until(lambda: sum(a.batch.n_groups for a in got) >= 400, go_on)
        for name in groups:
            assert_same(groups_of([a for a in got if a.sender == name]), groups[name])


def answer_as_shard(router: zmq.Socket, answer: Answer | bytes) -> list[bytes]:
    """Receive one message as a shard would, and answer it; its frames after the token."""
    assert router.poll(60_000), "no message"
    peer, token, *frames = router.recv_multipart()
    assert token == TOKEN.encode()
    router.send_multipart([peer, answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)])
    return frames


@contextmanager
def raw_shard():
    router = Router(TCP, "shard-0", TOKEN, most_bytes=1 << 20)
    try:
        yield router.socket, router.address
    finally:
        router.close(0.0)


def flush_until_heard(outbox: RolloutSender, router: zmq.Socket) -> None:
    until(lambda: router.poll(0), outbox.flush)


def test_a_sender_whose_credit_was_lost_on_the_way_asks_for_it():
    now_s = [0.0]
    with raw_shard() as (router, address), sender_to(address, clock=lambda: now_s[0], batch_bytes=1) as outbox:
        for group in some_groups(2):
            outbox.send(group)
        assert len(answer_as_shard(router, Answer(1, 0))) == 2
        until(lambda: outbox._lanes[0].outbound.n_unacknowledged == 0, outbox.flush)
        now_s[0] = 11.0
        outbox.flush()
        (head,) = answer_as_shard(router, Answer(1, 1))  # a question: no payload
        assert msgspec.msgpack.decode(head, type=Head) == Head("s0", 1, 0, oldest=1)
        flush_until_heard(outbox, router)
        assert len(answer_as_shard(router, Answer(2, 1))) == 2


def test_a_question_is_answered_and_changes_nothing():
    with receiver(delivered={"raw": 5}, window_bytes=80) as inbox, raw_socket(inbox.address) as socket:
        socket.send_multipart(message(7, b"")[:2])
        assert answer_on(socket) == Answer(5, 10)
        socket.send_multipart([TOKEN.encode(), msgspec.msgpack.encode(Head("unheard of", 0, 0))])
        assert answer_on(socket) == Answer(0, 10)
        assert (inbox.gaps, inbox.duplicates, inbox.refused) == (0, 0, 0)


def test_an_answer_that_is_none_is_passed_over(caplog):
    now_s = [0.0]
    with raw_shard() as (router, address), sender_to(address, clock=lambda: now_s[0], batch_bytes=1) as outbox:
        outbox.send(some_groups(1)[0])
        first = answer_as_shard(router, b"no answer")
        until(lambda: "an answer to rollouts that is none" in caplog.text, outbox.flush)
        now_s[0] = 11.0
        outbox.flush()
        assert answer_as_shard(router, Answer(1, 1)) == first  # it was sent again
        assert outbox.close(linger_s=60.0) == 0


def test_rollouts_without_acknowledgement_are_told(caplog):
    with raw_shard() as (_, address), sender_to(address, batch_bytes=1) as outbox, caplog.at_level(logging.WARNING):
        for group in some_groups(3):  # one was sent, two wait for credit
            outbox.send(group)
        assert outbox.close(linger_s=0.01) == 6
    assert "6 rollouts were not acknowledged within 0.01 s" in caplog.text


def test_closing_waits_for_credit_too():
    with raw_shard() as (router, address):

        def shard() -> None:
            sequence, payload = 0, []
            while not (sequence == 1 and payload):
                assert router.poll(60_000), "no message"
                peer, _, head, *payload = router.recv_multipart()
                sequence = msgspec.msgpack.decode(head, type=Head).sequence
                answer = Answer(sequence + 1, 0) if payload else Answer(sequence, 1)
                router.send_multipart([peer, msgspec.msgpack.encode(answer)])

        outbox = RolloutSender([address], TOKEN, "s0", resend_s=0.01, batch_bytes=1)
        thread = threading.Thread(target=shard)
        thread.start()
        for group in some_groups(2):
            outbox.send(group)
        assert outbox.close(linger_s=60.0) == 0
        thread.join()


# ---- the log


def test_a_log_that_fails_ends_the_receiving_and_the_sender_keeps_its_messages():
    log = ListLog()
    with receiver(log=log) as inbox, sender_to(inbox.address, batch_bytes=1) as outbox:
        first, second = some_groups(2)
        outbox.send(first)
        until(lambda: inbox.waiting_bytes, outbox.flush)
        log.fault = TbaError("disk full")
        outbox.send(second)
        until(lambda: not inbox._threads[0].is_alive(), outbox.flush)
        for _ in range(2):
            with pytest.raises(TbaError, match="disk full"):
                list(inbox.drain())
        assert outbox.close(linger_s=0.1) == 2
        assert [sequence for _, sequence, _, _ in log.records] == [0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_receiving_thread_reaches_the_trainer():
    log = ListLog()
    log.fault = ZeroDivisionError()
    with receiver(log=log) as inbox, raw_socket(inbox.address) as socket:
        socket.send_multipart(message(0, GOOD))
        until(lambda: not inbox._threads[0].is_alive())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a thread that receives rollouts has ended"):
                list(inbox.drain())


def test_a_log_is_synced_after_something_was_written_and_only_then():
    log = ListLog()
    with receiver(log=log, fsync_every_s=0.005) as inbox, raw_socket(inbox.address) as socket:
        for sequence in range(3):
            socket.send_multipart(message(sequence, GOOD))
            until(lambda n=sequence + 1: log.syncs and log.syncs[-1] == n)
            time.sleep(0.02)
        assert log.syncs == [1, 2, 3]


def test_a_log_is_not_synced_where_nobody_asked_for_it():
    log = ListLog()
    with receiver(log=log) as inbox, raw_socket(inbox.address) as socket:
        socket.send_multipart(message(0, GOOD))
        answer_on(socket)
        socket.send_multipart(message(1, GOOD))
        answer_on(socket)
        assert log.syncs == []


def test_a_failed_sync_reaches_the_trainer_and_ends_the_receiving():
    class Unsyncable(ListLog):
        def sync(self) -> None:
            raise TbaError("disk full")

    log = Unsyncable()
    with receiver(log=log, fsync_every_s=0.001) as inbox, raw_socket(inbox.address) as socket:
        socket.send_multipart(message(0, GOOD))
        answer_on(socket)
        until(lambda: inbox._fault)
        socket.send_multipart(message(1, GOOD))
        until(lambda: not inbox._threads[0].is_alive())
        assert len(log.records) == 1
        with pytest.raises(TbaError, match="disk full"):
            list(inbox.drain())


# ---- what a sender survives


class DiesAfterWriting(ListLog):
    """As a receiver that is killed between writing a message and acknowledging it."""

    def append(self, *record) -> LogPosition:
        end = super().append(*record)
        if len(self.records) == 3:
            raise TbaError("killed")
        return end


def test_a_receiver_that_begins_anew_with_its_log_gets_the_rest_and_nothing_twice():
    groups = some_groups(8)
    log = DiesAfterWriting()
    with receiver(log=log) as inbox, sender_to(inbox.address, batch_bytes=1, resend_s=0.02) as outbox:
        for group in groups[:3]:
            outbox.send(group)
        until(lambda: not inbox._threads[0].is_alive(), outbox.flush)
        port = int(inbox.address.rpartition(":")[2])
        inbox.close()
        for group in groups[3:]:  # into the void
            outbox.send(group)
            outbox.flush()
        after = ListLog()
        delivered = {sender: sequence + 1 for sender, sequence, _, _ in log.records}
        assert delivered == {"s0": 3}
        with receiver(port=port, log=after, delivered=delivered) as again:
            take_all(again, outbox, 5)
            assert outbox.close(linger_s=60.0) == 0
            assert again.duplicates > 0
    written = log.records + after.records
    assert [sequence for _, sequence, _, _ in written] == list(range(8))
    assert [payload for _, _, payload, _ in written] == [payload_of([group]) for group in groups]


class CuttingProxy:
    """Forwards connections to a port, each until so many bytes have passed; what was under way is lost."""

    def __init__(self, port: int, budgets: list[int]) -> None:
        self._port, self._budgets = port, budgets
        self._listener = socketlib.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for budget in self._budgets:
            here, _ = self._listener.accept()
            there = socketlib.create_connection(("127.0.0.1", self._port))
            with here, there:
                self._forward(here, there, budget)
            self.cuts += 1

    def _forward(self, here, there, budget: int) -> None:
        while budget > 0:
            for end in select.select([here, there], [], [])[0]:
                data = end.recv(min(budget, 4096))
                if not data:
                    return
                budget -= len(data)
                (there if end is here else here).sendall(data)

    def close(self) -> None:
        self._thread.join(60)
        self._listener.close()


def test_connections_that_break_lose_and_repeat_nothing():
    groups = some_groups(60, tokens=200)
    with receiver() as inbox:
        proxy = CuttingProxy(int(inbox.address.rpartition(":")[2]), [3000, 10_000, 30_001, 20_002, 1 << 30])
        with sender_to(proxy.address, batch_bytes=3000, resend_s=0.05) as outbox:
            for group in groups:
                outbox.send(group)
            arrivals = take_all(inbox, outbox, 60)
            assert outbox.close(linger_s=60.0) == 0
        proxy.close()
    assert_same(groups_of(arrivals), groups)
    assert proxy.cuts == 5  # the last by the sender that closed
    assert inbox.corrupt == inbox.refused == 0


# ---- another trainer


@pytest.mark.parametrize("kept", [5, 3, 0])
def test_the_next_shard_gets_what_was_not_acknowledged_under_the_same_numbers(kept):
    groups = some_groups(8)
    log = ListLog()
    with receiver(log=log) as inbox, sender_to(inbox.address, batch_bytes=1, resend_s=600.0) as outbox:
        for group in groups[:5]:
            outbox.send(group)
        take_all(inbox, outbox, 5)
        until(lambda: not outbox.unacknowledged, outbox.flush)
        inbox.close()
        for group in groups[5:]:  # into the void
            outbox.send(group)
            outbox.flush()
        assert outbox.unacknowledged == 6
        with other_receiver(delivered={"s0": kept} if kept else {}) as again:
            assert outbox.reconnect([again.address], OTHER_TOKEN) == 0
            arrivals = take_all(again, outbox, 3)
            assert outbox.close(linger_s=60.0) == 0
            assert again.forgotten == 5 - kept
            assert (again.refused, again.gaps, again.duplicates) == (0, 0, 0)
    assert [(a.sender, a.sequence) for a in arrivals] == [("s0", 5), ("s0", 6), ("s0", 7)]
    assert_same(groups_of(arrivals), groups[5:])


def test_what_the_log_has_and_nobody_acknowledged_is_not_taken_twice():
    groups = some_groups(6)
    log = DiesAfterWriting()
    with receiver(log=log) as inbox, sender_to(inbox.address, batch_bytes=1, resend_s=600.0) as outbox:
        for group in groups[:3]:
            outbox.send(group)
        until(lambda: not inbox._threads[0].is_alive(), outbox.flush)
        for group in groups[3:]:
            outbox.send(group)
        with other_receiver(delivered={"s0": 3}) as again:
            outbox.reconnect([again.address], OTHER_TOKEN)
            arrivals = take_all(again, outbox, 3)
            assert outbox.close(linger_s=60.0) == 0
            assert (again.forgotten, again.duplicates > 0) == (0, True)
    assert [a.sequence for a in arrivals] == [3, 4, 5]
    assert_same(groups_of(arrivals), groups[3:])


def test_other_shards_get_what_was_not_sent_under_new_numbers_and_the_rest_is_given_up(caplog):
    groups = some_groups(40)
    with (
        receiver(window_bytes=8 * 4 * len(payload_of(groups[:1]))) as inbox,
        sender_to(inbox.address, batch_bytes=1, resend_s=600.0) as outbox,
        other_receiver() as first,
        other_receiver(delivered={"s0": 30}) as second,  # as it may be in the log of an older attempt
    ):
        outbox.send(groups[0])
        until(lambda: not outbox.unacknowledged, outbox.flush)
        inbox.close()
        for group in groups[1:]:
            outbox.send(group)
        (lane,) = outbox._lanes
        sent, pending = lane.outbound.unacknowledged_rollouts // 2, [group for group, _ in lane.pending]
        assert min(sent, len(pending)) > 0
        assert sent + len(pending) == 39
        with caplog.at_level(logging.WARNING):
            assert outbox.reconnect([first.address, second.address], OTHER_TOKEN) == 2 * sent
        assert f"had 1 shards and has 2: {2 * sent} rollouts" in caplog.text
        assert outbox.unacknowledged == 2 * len(pending)
        arrivals = [[], []]

        def turn() -> None:
            outbox.flush()
            for shard, inbox in enumerate((first, second)):
                arrivals[shard] += inbox.drain()

        until(lambda: len(prompts_of(arrivals[0] + arrivals[1])) == len(pending), turn)
        assert outbox.close(linger_s=60.0) == 0
        for shard in range(2):
            assert_same(groups_of(arrivals[shard]), [g for g in pending if owner_of(g.prompt_id, 2) == shard])
            assert [a.sequence for a in arrivals[shard]] == list(range(len(arrivals[shard])))
            assert {a.sender for a in arrivals[shard]} == {"s0+1"}
        assert (first.forgotten, second.forgotten, first.duplicates, second.duplicates) == (0, 0, 0, 0)


def test_nothing_is_told_where_nothing_is_given_up(caplog):
    with receiver() as inbox, other_receiver() as first, other_receiver() as second, sender_to(inbox.address) as outbox:
        with caplog.at_level(logging.WARNING):
            assert outbox.reconnect([first.address, second.address], OTHER_TOKEN) == 0
        assert caplog.text == ""


def test_an_address_that_is_none_leaves_a_sender_as_it_was():
    with receiver() as inbox, sender_to(inbox.address, batch_bytes=1) as outbox:
        outbox.send(some_groups(1)[0])
        with pytest.raises(TransportError, match="cannot dial tcp://nowhere"):
            outbox.reconnect([inbox.address, "tcp://nowhere"], OTHER_TOKEN)
        outbox.send(some_groups(2)[1])
        assert len(take_all(inbox, outbox, 2)) == 2
        assert outbox.close(linger_s=60.0) == 0
    with pytest.raises(TransportError, match="cannot dial tcp://nowhere"):
        RolloutSender(["tcp://nowhere"], TOKEN, "s0")


@pytest.mark.parametrize("same", [True, False])
def test_fifty_reconnections_leave_no_descriptor(same):
    process = psutil.Process()
    groups = some_groups(56)
    with other_receiver() as first, other_receiver() as second, sender_to(first.address, second.address) as outbox:
        got: list[str] = []

        def once(turn: int) -> None:
            n = 2 if same else 1 + turn % 2
            outbox.reconnect([first.address, second.address][:n], OTHER_TOKEN)
            outbox.send(groups[turn])

            def turn_() -> None:
                outbox.flush()
                got.extend(prompts_of([*first.drain(), *second.drain()]))

            until(lambda: len(got) == turn + 1, turn_)
            until(lambda: not outbox.unacknowledged, outbox.flush)

        for turn in range(6):
            once(turn)
        descriptors = process.num_fds()
        for turn in range(6, 56):
            once(turn)
        until(lambda: process.num_fds() <= descriptors + 2)  # connections that are just ending
        assert got == [group.prompt_id for group in groups]
        assert first.forgotten == second.forgotten == 0


def test_a_message_that_no_shard_would_take_is_told_before_it_is_sent():
    (small,), (large,) = some_groups(1), some_groups(1, tokens=2000)
    with receiver(most_bytes=4000) as inbox, sender_to(inbox.address, batch_bytes=1, most_bytes=4000) as outbox:
        outbox.send(small)
        until(lambda: not outbox.unacknowledged, outbox.flush)
        with pytest.raises(
            TransportError, match=r"2 rollouts of 1 prompts take \d+ bytes, and a shard takes 4000 in a"
        ):
            outbox.send(large)
        assert inbox.refused == 0


def test_the_largest_message_that_a_sender_sends_is_taken():
    (probe,) = some_groups(1, tokens=1000)
    most_bytes = len(payload_of([probe])) + 1024
    with receiver(most_bytes=most_bytes) as inbox, sender_to(inbox.address, most_bytes=most_bytes) as outbox:
        outbox.send(probe)
        assert_same(groups_of(take_all(inbox, outbox, 1)), [probe])


def serve(inbox_made: int, n_groups: int) -> None:
    """Receive in a process of its own: writes the address, then the prompts that arrived."""
    inbox = RolloutReceiver(TCP, TOKEN, window_bytes=20_000)
    os.write(inbox_made, f"{inbox.address}\n".encode())
    got: list[str] = []
    until(lambda: len(got) >= n_groups, lambda: got.extend(prompts_of(list(inbox.drain()))))
    os.write(inbox_made, "".join(f"{prompt_id}\n" for prompt_id in got).encode())
    time.sleep(60)  # the acknowledgements; ended from outside


def test_a_receiver_that_stands_still_for_a_while_gets_all_once():
    groups = some_groups(100, tokens=50)
    out, inbox_made = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            serve(inbox_made, len(groups))
        finally:
            os._exit(1)
    try:
        with os.fdopen(out) as lines:
            address = lines.readline().strip()
            with sender_to(address, batch_bytes=1000, resend_s=0.01) as outbox:
                outbox.send(groups[0])
                until(lambda: not outbox.unacknowledged, outbox.flush)
                os.kill(pid, signal.SIGSTOP)
                for group in groups[1:]:
                    outbox.send(group)
                    outbox.flush()
                    time.sleep(0.001)
                assert not outbox.room
                os.kill(pid, signal.SIGCONT)
                assert outbox.close(linger_s=60.0) == 0
            assert [lines.readline().strip() for _ in groups] == [group.prompt_id for group in groups]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(inbox_made)


def test_a_host_that_is_not_here_is_named():
    with pytest.raises(TransportError, match=r"transport\.host: cannot listen on 203\.0\.113\.1"):
        RolloutReceiver(Listen(sockets="tcp", host="203.0.113.1", folder=Path("unused")), TOKEN)
