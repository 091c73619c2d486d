"""The searcher's member of a broadcast group: a whole, fitting, finite version in staging, or a reason."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tba_megatron.errors import WeightTransferError
from tba_megatron.search.engine import ReceiveState, ReceiveStatus
from tba_megatron.search.receiver import Receiver
from tba_megatron.transport.manifest import Manifest, build_buckets, checksum, encode_manifest, unpack
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.round import Round, connect, host_store
from tba_megatron.transport.weights import Group, join_group, send_version
from tba_megatron.types import PolicyVersion

TIMEOUT_S = 20.0
LIMIT_S = 60.0  # only against a hang
V1 = PolicyVersion(0, 1)
NAMES = "abcde"
EXPECTED = dict.fromkeys(NAMES, ((5, 7), "float32"))


def named(names: str = NAMES) -> list[tuple[str, Tensor]]:
    return [(name, torch.arange(35.0).reshape(5, 7) + i) for i, name in enumerate(names)]


class Cohort:
    """Two receivers and the one sender, which hosts a store."""

    def __init__(self) -> None:
        self.receivers = [Receiver(torch.device("cpu"), EXPECTED) for _ in range(2)]
        self.round = 0
        self.meet()

    def meet(self) -> None:
        """At a new store, whose epochs start anew, as a new trainer's do."""
        self.store, self.port = host_store("127.0.0.1", TIMEOUT_S)

    def offer(self, manifest: Manifest, epoch: int = 0, data: bytes = b"") -> None:
        self.round += 1
        Round(self.store, self.round, epoch, TIMEOUT_S).open()
        for i, receiver in enumerate(self.receivers):
            offer = Offer(
                version=manifest.version,
                manifest=data or encode_manifest(manifest),
                round=self.round,
                epoch=epoch,
                host="127.0.0.1",
                port=self.port,
                rank=1 + i,
                world_size=3,
                backend="gloo",
            )
            receiver.begin(offer, 0, TIMEOUT_S)

    def join(self, epoch: int = 0) -> Group:
        return join_group(
            host="127.0.0.1",
            port=self.port,
            epoch=epoch,
            rank=0,
            world_size=3,
            backend="gloo",
            timeout_s=TIMEOUT_S,
        )

    def ends(self) -> list[ReceiveStatus]:
        deadline = time.monotonic() + LIMIT_S
        ended = (ReceiveState.STAGED, ReceiveState.FAILED)
        while not all(r.poll().state in ended for r in self.receivers):
            assert time.monotonic() < deadline, [r.poll() for r in self.receivers]
            time.sleep(0.001)
        return [r.poll() for r in self.receivers]

    def publish(self, manifest: Manifest, buckets: Sequence[Tensor], epoch: int = 0) -> list[ReceiveStatus]:
        self.offer(manifest, epoch)
        group = self.join(epoch)
        send_version(group, manifest, buckets)
        ended = self.ends()
        group.close()
        return ended


def assert_failed(ended: Sequence[ReceiveStatus], reason: str) -> None:
    for status in ended:
        assert status.state is ReceiveState.FAILED
        assert reason in status.reason and "\n" not in status.reason


def assert_staged(cohort: Cohort) -> None:
    for receiver in cohort.receivers:
        assert_staged_in(receiver)


def assert_staged_in(receiver: Receiver) -> None:
    assert receiver.poll().state is ReceiveState.STAGED, receiver.poll().reason
    for (name, got), (sent_name, sent) in zip(receiver.take()[1], named(), strict=True):
        assert name == sent_name and torch.equal(got, sent)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ("abde", "missing ['c'], unexpected []"),
        ("abcdef", "missing [], unexpected ['f']"),
        ("abxde", "missing ['c'], unexpected ['x']"),
    ],
)
def test_a_version_with_other_tensors_is_refused_before_anything_is_received(names, complaint):
    cohort = Cohort()
    cohort.offer(build_buckets(V1, named(names), 100, owner=0)[0])  # no sender ever joins
    assert_failed(cohort.ends(), complaint)


def test_a_manifest_that_is_none_is_refused():
    cohort = Cohort()
    cohort.offer(build_buckets(V1, named(), 100, owner=0)[0], data=b"noise")
    assert_failed(cohort.ends(), "")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensor: tensor.reshape(7, 5), "c is float32 [7, 5], not float32 [5, 7] (1 such tensors in all)"),
        (lambda tensor: tensor.bfloat16(), "c is bfloat16 [5, 7], not float32 [5, 7]"),
    ],
    ids=["shape", "dtype"],
)
def test_a_version_of_another_shape_or_dtype_is_refused_before_anything_is_received(change, complaint):
    cohort, tensors = Cohort(), named()
    tensors[2] = ("c", change(tensors[2][1]))
    cohort.offer(build_buckets(V1, tensors, 100, owner=0)[0])
    assert_failed(cohort.ends(), complaint)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_version_that_is_not_finite_is_refused_by_name(poison):
    manifest, buckets = build_buckets(V1, named(), 100, owner=0)
    unpack(manifest.entries, buckets)[3][1][0, 0] = poison
    sums = [msgspec.structs.replace(b, checksum=checksum(t)) for b, t in zip(manifest.buckets, buckets, strict=True)]
    manifest = msgspec.structs.replace(manifest, buckets=tuple(sums))
    assert_failed(Cohort().publish(manifest, buckets), "bucket 3 of 5 from rank 0: d is not finite")


def test_receivers_post_and_tell_how_far_they_have_come():
    cohort = Cohort()
    manifest, buckets = build_buckets(V1, named(), 100, owner=0)
    cohort.publish(manifest, buckets)
    told = Round(connect("127.0.0.1", cohort.port, TIMEOUT_S), cohort.round, 0, TIMEOUT_S)
    assert [told.has_posted(rank) for rank in range(3)] == [False, True, True]
    assert [told.reached(rank) for rank in range(3)] == [0, 5, 5]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_thread_does_not_end_in_silence(monkeypatch):
    receiver = Receiver(torch.device("cpu"), EXPECTED)
    monkeypatch.setattr("tba_megatron.search.receiver.check_layout", lambda manifest: 1 // 0)
    manifest, _ = build_buckets(V1, named(), 100, owner=0)
    receiver.begin(Offer(version="0.1", manifest=encode_manifest(manifest), round=0), 0, 1.0)
    receiver.close()
    with pytest.raises(RuntimeError, match="the thread that receives weights has failed"):
        receiver.poll()


def test_staging_is_kept_from_version_to_version_and_is_handed_out_once():
    cohort, places = Cohort(), []
    for epoch in range(2):
        cohort.publish(*build_buckets(V1, named(), 100, owner=0), epoch)
        places.append([tensor.data_ptr() for _, tensor in cohort.receivers[0].take()[1]])
        with pytest.raises(WeightTransferError, match="no version is staged"):
            cohort.receivers[0].take()
    assert places[0] == places[1]
    cohort.publish(*build_buckets(V1, named(), 300, owner=0), 2)
    assert_staged_in(cohort.receivers[0])


def test_a_group_that_a_receiver_has_left_is_refused_at_once_and_the_next_epoch_is_sound():
    cohort = Cohort()
    manifest, buckets = build_buckets(V1, named(), 100, owner=0)
    buckets[2][3] ^= 1
    assert_failed(cohort.publish(manifest, buckets), "bucket 2 of 5 from rank 0 has another checksum")
    cohort.offer(manifest)  # the sender still is in the group: without a refusal this waits for its deadline
    assert_failed(cohort.ends(), "version 0.1: this worker has left broadcast group 0")
    buckets[2][3] ^= 1
    cohort.publish(manifest, buckets, epoch=1)
    assert_staged(cohort)


def test_a_new_store_may_count_its_epochs_anew():
    cohort = Cohort()
    for _ in range(2):
        cohort.meet()
        cohort.publish(*build_buckets(V1, named(), 100, owner=0))
        assert_staged(cohort)


def _open_now(cohort: Cohort) -> tuple[int, int]:
    """(descriptors, threads) of this process once the receivers' threads have ended."""
    for receiver in cohort.receivers:
        if receiver._thread is not None:
            receiver._thread.join(LIMIT_S)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_forming_groups_again_and_again_leaks_nothing(request):
    cohort, used = Cohort(), []
    gc.collect()
    gc.disable()  # what is kept by a cycle would be freed some time, and until then be open
    request.addfinalizer(gc.enable)
    for epoch in range(20):
        manifest, buckets = build_buckets(V1, named(), 100, owner=0)
        buckets[2][3] ^= epoch % 2  # every other group is left after a failure
        ended = cohort.publish(manifest, buckets, epoch)
        assert_failed(ended, "checksum") if epoch % 2 else assert_staged(cohort)
        used.append(_open_now(cohort))
    deadline = time.monotonic() + LIMIT_S
    while not (np.array(_open_now(cohort)) <= used[3]).all() and time.monotonic() < deadline:
        time.sleep(0.05)  # threads and sockets may still be on their way out; what leaks never goes
    last = _open_now(cohort)
    assert (np.array(last) <= used[3]).all(), f"descriptors and threads: {used[3]} became {last}"


def test_an_offer_returns_at_once_while_an_older_receive_waits_and_only_the_newest_counts():
    cohort = Cohort()
    old, _ = build_buckets(V1, named(), 100, owner=0)
    manifest, buckets = build_buckets(PolicyVersion(0, 2), named(), 100, owner=0)
    cohort.offer(old)  # no sender joins this group
    older = [receiver._thread for receiver in cohort.receivers]
    cohort.offer(manifest, epoch=1)
    assert all(thread is not None and thread.is_alive() for thread in older)
    assert all(receiver.poll().state is ReceiveState.JOINING for receiver in cohort.receivers)
    with contextlib.suppress(WeightTransferError):
        cohort.join(epoch=0).close()  # the old group forms and ends: then the newer offer has its turn
    group = cohort.join(epoch=1)
    send_version(group, manifest, buckets)
    cohort.ends()
    for receiver in cohort.receivers:
        assert receiver.poll().state is ReceiveState.STAGED
        assert receiver.take()[0].version == "0.2"
    group.close()
