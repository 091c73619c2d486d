"""The searcher's member of a broadcast group: a whole, fitting, finite version in staging, or a reason."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tba_megatron.search.engine import ReceiveState, ReceiveStatus
from tba_megatron.search.receiver import Receiver
from tba_megatron.transport.manifest import Manifest, build_buckets, encode_manifest
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.weights import Group, host_store, join_group, send_version
from tba_megatron.types import PolicyVersion

TIMEOUT_S = 20.0
LIMIT_S = 60.0  # only against a hang
V1 = PolicyVersion(0, 1)
NAMES = "abcde"


def named(names: str = NAMES) -> list[tuple[str, Tensor]]:
    return [(name, torch.arange(35.0).reshape(5, 7) + i) for i, name in enumerate(names)]


class Cohort:
    """Two receivers and the one sender, which hosts a store."""

    def __init__(self) -> None:
        self.receivers = [Receiver(torch.device("cpu"), frozenset(NAMES)) for _ in range(2)]
        self.meet()

    def meet(self) -> None:
        """At a new store, whose epochs start anew, as a new trainer's do."""
        self.store, self.port = host_store("127.0.0.1", TIMEOUT_S)

    def offer(self, manifest: Manifest, epoch: int = 0, data: bytes = b"") -> None:
        for i, receiver in enumerate(self.receivers):
            offer = Offer(
                version=manifest.version,
                manifest=data or encode_manifest(manifest),
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
            store=self.store,
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
        assert receiver.poll().state is ReceiveState.STAGED, receiver.poll().reason
        for (name, got), (sent_name, sent) in zip(receiver.take()[1], named(), strict=True):
            assert name == sent_name and torch.equal(got, sent)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [("abde", "missing ['c'], unexpected []"), ("abcdef", "missing [], unexpected ['f']")],
)
def test_a_version_with_other_tensors_is_refused_before_anything_is_received(names, complaint):
    cohort = Cohort()
    cohort.offer(build_buckets(V1, named(names), 100, owner=0)[0])  # no sender ever joins
    assert_failed(cohort.ends(), complaint)


def test_a_manifest_that_is_none_is_refused():
    cohort = Cohort()
    cohort.offer(build_buckets(V1, named(), 100, owner=0)[0], data=b"noise")
    assert_failed(cohort.ends(), "")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_version_that_is_not_finite_is_refused_by_name(poison):
    tensors = named()
    tensors[3][1][0, 0] = poison
    assert_failed(Cohort().publish(*build_buckets(V1, tensors, 100, owner=0)), "version 0.1: d is not finite")


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


def test_forming_groups_again_and_again_leaks_nothing():
    cohort, used = Cohort(), []
    for epoch in range(20):
        cohort.publish(*build_buckets(V1, named(), 100, owner=0), epoch)
        assert_staged(cohort)
        used.append(np.array([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]))
    assert (used[-1] <= used[3]).all(), f"descriptors and threads: {used[3].tolist()} became {used[-1].tolist()}"
