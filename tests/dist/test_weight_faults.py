"""Faults on the way of a version: each ends within the deadline with the old or the right weights, and names a culprit.

Who has to die or to be stopped is a forked process; all others are threads.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tba_megatron.errors import WeightTransferError
from tba_megatron.search.engine import ReceiveState, ReceiveStatus
from tba_megatron.search.receiver import Receiver
from tba_megatron.transport.manifest import Manifest, build_buckets, encode_manifest
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.round import Round, connect, host_store
from tba_megatron.transport.weights import Group, join_group, send_version
from tba_megatron.types import PolicyVersion

HOST = "127.0.0.1"
DEADLINE_S = 6.0  # of a round that fails; longer than a name server is waited for when a store is dialled
LIMIT_S = 60.0  # only against a hang
NAMES = "abcd"
N_ELEMENTS = 2 << 20
BUCKET = 4 * N_ELEMENTS  # 8 MiB: more than sockets hold without a reader
EXPECTED = dict.fromkeys(NAMES, ((N_ELEMENTS,), "float32"))
V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


def tensors(version: PolicyVersion) -> list[tuple[str, Tensor]]:
    return [(name, torch.full((N_ELEMENTS,), float(10 * version.step + i))) for i, name in enumerate(NAMES)]


def cut(version: PolicyVersion) -> tuple[Manifest, list[Tensor]]:
    return build_buckets(version, tensors(version), BUCKET, owner=0)


class Place:
    """Where one sender and ``receivers`` receivers meet, round by round."""

    def __init__(self, receivers: int = 1) -> None:
        self._store, self.port = host_store(HOST, LIMIT_S)
        self.world_size = 1 + receivers

    def offer(self, manifest: Manifest, epoch: int, rank: int = 1) -> Offer:
        Round(self._store, epoch, epoch, LIMIT_S).open()
        return Offer(
            version=manifest.version,
            manifest=encode_manifest(manifest),
            round=epoch,
            epoch=epoch,
            host=HOST,
            port=self.port,
            rank=rank,
            world_size=self.world_size,
            backend="gloo",
        )

    def join(self, epoch: int, timeout_s: float = LIMIT_S) -> Group:
        return join_group(
            host=HOST,
            port=self.port,
            epoch=epoch,
            rank=0,
            world_size=self.world_size,
            backend="gloo",
            timeout_s=timeout_s,
        )

    def send(self, manifest: Manifest, buckets: list[Tensor], epoch: int, timeout_s: float = LIMIT_S) -> None:
        group = self.join(epoch, timeout_s)
        try:
            send_version(group, manifest, buckets)
        finally:
            group.close()

    def round(self, epoch: int) -> Round:
        return Round(connect(HOST, self.port, LIMIT_S), epoch, epoch, LIMIT_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def end_of(receiver: Receiver) -> ReceiveStatus:
    until(lambda: receiver.poll().state in (ReceiveState.STAGED, ReceiveState.FAILED))
    return receiver.poll()


def has(receiver: Receiver, version: PolicyVersion) -> bool:
    if end_of(receiver).state is not ReceiveState.STAGED:
        return False
    manifest, found = receiver.take()
    expected = tensors(version)
    same = all(
        name == wanted and torch.equal(got, tensor)
        for (name, got), (wanted, tensor) in zip(found, expected, strict=True)
    )
    return same and manifest.version == str(version)


@contextmanager
def forked(act: Callable[[], None]) -> Iterator[int]:
    """The id of a child that runs ``act``, to be killed, stopped or waited for; it is gone at the end of the block."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)  # does nothing to one that has ended and was not waited for
        os.waitpid(pid, 0)


def exit_code(pid: int) -> int:
    """Waits for it to end, and leaves it to be waited for."""
    until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver(torch.device("cpu"), EXPECTED)
    yield receiver
    receiver.close()


def test_a_sender_that_is_killed_in_mid_bucket_is_named_and_the_next_group_brings_the_version(receiver):
    place, (manifest, buckets) = Place(), cut(V1)

    def die_while_sending() -> None:
        group = place.join(0)
        group.broadcast(buckets[0], 0)
        for bucket in buckets[1:]:
            group.start_broadcast(bucket, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    with forked(die_while_sending):
        receiver.begin(place.offer(manifest, 0), 0, DEADLINE_S)
        status = end_of(receiver)
    assert status.state is ReceiveState.FAILED
    assert re.match(r"version 0\.1: bucket [123] of 4 from rank 0 did not arrive: ", status.reason)
    receiver.begin(place.offer(manifest, 1), 0, LIMIT_S)
    place.send(manifest, buckets, 1)
    assert has(receiver, V1)


def test_a_sender_that_stalls_is_named_at_the_deadline(receiver):
    place, (manifest, buckets) = Place(), cut(V1)
    receiver.begin(place.offer(manifest, 0), 0, DEADLINE_S)
    group = place.join(0)
    group.broadcast(buckets[0], 0)
    status = end_of(receiver)
    group.close()
    assert status.state is ReceiveState.FAILED
    assert status.reason.startswith("version 0.1: bucket 1 of 4 from rank 0 did not arrive: ")
    with pytest.raises(WeightTransferError, match="no version is staged"):
        receiver.take()


def test_a_sender_that_never_comes_is_waited_for_until_the_deadline(receiver):
    place, (manifest, _) = Place(), cut(V1)
    receiver.begin(place.offer(manifest, 0), 0, 1.0)
    status = end_of(receiver)
    assert status.state is ReceiveState.FAILED
    assert status.reason.startswith(f"rank 1 of 2 could not join broadcast group 0 at {HOST}:{place.port} within 1 s")


def test_a_store_that_is_gone_is_named(receiver):
    place, (manifest, _) = Place(), cut(V1)
    offer = place.offer(manifest, 0)
    del place
    receiver.begin(offer, 0, 1.0)
    status = end_of(receiver)
    assert status.state is ReceiveState.FAILED
    assert f"no store answers at {HOST}:{offer.port} within 1 s" in status.reason


def test_a_receiver_that_is_stopped_costs_the_others_one_deadline_and_is_seen_behind(receiver):
    place, versions = Place(receivers=2), [cut(V1), cut(V2)]

    def receive_twice() -> None:
        own = Receiver(torch.device("cpu"), EXPECTED)
        own.begin(place.offer(versions[0][0], 0, rank=2), 0, DEADLINE_S)
        assert end_of(own).state is ReceiveState.FAILED
        own.begin(place.offer(versions[1][0], 1, rank=2), 0, LIMIT_S)
        assert has(own, V2)

    with forked(receive_twice) as stopped:
        receiver.begin(place.offer(versions[0][0], 0), 0, DEADLINE_S)
        group, round_ = place.join(0, DEADLINE_S), place.round(0)
        until(lambda: round_.has_posted(1) and round_.has_posted(2))
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(WeightTransferError, match=r"version 0\.1: bucket \d of 4 did not leave rank 0"):
            send_version(group, *versions[0])
        group.close()
        status = end_of(receiver)
        assert status.state is ReceiveState.FAILED and "version 0.1: bucket" in status.reason
        assert round_.reached(2) < 4
        os.kill(stopped, signal.SIGCONT)
        receiver.begin(place.offer(versions[1][0], 1), 0, LIMIT_S)
        group = place.join(1)
        send_version(group, *versions[1])
        assert has(receiver, V2)
        group.close()
        assert exit_code(stopped) == 0


def test_a_receiver_that_dies_costs_the_others_this_version_alone(receiver):
    place, (manifest, buckets) = Place(receivers=2), cut(V1)

    def die_in_the_middle() -> None:
        own = Receiver(torch.device("cpu"), EXPECTED)
        own.begin(place.offer(manifest, 0, rank=2), 0, DEADLINE_S)
        until(lambda: own.poll().state is not ReceiveState.JOINING)
        os.kill(os.getpid(), signal.SIGKILL)

    with forked(die_in_the_middle), ThreadPoolExecutor() as pool:
        receiver.begin(place.offer(manifest, 0), 0, DEADLINE_S)
        sent = pool.submit(place.send, manifest, buckets, 0, DEADLINE_S)
        error = sent.exception(LIMIT_S)
        assert isinstance(error, WeightTransferError) and "did not leave rank 0" in str(error)
        end_of(receiver)
    alone = Place()
    receiver.begin(alone.offer(manifest, 1), 0, LIMIT_S)
    alone.send(manifest, buckets, 1)
    assert has(receiver, V1)


def test_a_byte_that_flips_on_the_way_is_refused_and_what_is_staged_next_is_right(receiver):
    place, (manifest, buckets) = Place(), cut(V1)
    buckets[2][BUCKET // 2] ^= 0x10
    receiver.begin(place.offer(manifest, 0), 0, LIMIT_S)
    place.send(manifest, buckets, 0)
    status = end_of(receiver)
    assert status.state is ReceiveState.FAILED
    assert status.reason == "version 0.1: bucket 2 of 4 from rank 0 has another checksum than its manifest"
    receiver.begin(place.offer(cut(V2)[0], 1), 0, LIMIT_S)
    place.send(*cut(V2), 1)
    assert has(receiver, V2)


def test_a_version_that_comes_twice_is_staged_twice(receiver):
    place, (manifest, buckets) = Place(), cut(V1)
    receiver.begin(place.offer(manifest, 0), 0, LIMIT_S)
    group = place.join(0)
    send_version(group, manifest, buckets)
    assert has(receiver, V1)
    receiver.begin(place.offer(manifest, 0), 0, LIMIT_S)
    send_version(group, manifest, buckets)
    assert has(receiver, V1)
    group.close()


def test_a_new_offer_replaces_one_that_is_being_received(receiver):
    place, (first, buckets) = Place(), cut(V1)
    receiver.begin(place.offer(first, 0), 0, DEADLINE_S)
    stalled = place.join(0)
    stalled.broadcast(buckets[0], 0)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(place.send, *cut(V2), 1)
        receiver.begin(place.offer(cut(V2)[0], 1), 0, LIMIT_S)
        sent.result(LIMIT_S)
    assert has(receiver, V2)
    stalled.close()


def test_a_new_offer_replaces_a_version_that_was_not_taken(receiver):
    place, (first, _) = Place(), cut(V1)
    receiver.begin(place.offer(first, 0), 0, LIMIT_S)
    group = place.join(0)
    send_version(group, *cut(V1))
    assert end_of(receiver).state is ReceiveState.STAGED
    receiver.begin(place.offer(cut(V2)[0], 0), 0, LIMIT_S)
    send_version(group, *cut(V2))
    assert has(receiver, V2)
    group.close()
