"""Broadcast groups over gloo: whole versions to every member, and a clear end when one of them fails.

Members are threads where all live, forked processes where one has to die.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.manifest import Manifest, build_buckets, merge_manifests, unpack
from tba_megatron.transport.weights import Group, host_store, join_group, receive_version, send_version
from tba_megatron.types import PolicyVersion

HOST = "127.0.0.1"
TIMEOUT_S = 20.0
SHORT_S = 1.0
CPU = torch.device("cpu")
V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)


def tensors(seed: int, prefix: str = "w") -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (3,), (1, 2, 9), (), (40,)]
    made = [(f"{prefix}{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]
    return [*made, (f"{prefix}half", torch.randn(11, generator=generator).bfloat16())]


def members(world_size: int, act: Callable[[Group], Any], timeout_s: float = TIMEOUT_S, epoch: int = 0) -> list[Any]:
    """What ``act`` returns or raises on each of ``world_size`` members in threads, by rank."""
    store, port = host_store(HOST, timeout_s)

    def member(rank: int) -> Any:
        group = join_group(
            host=HOST,
            port=port,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            backend="gloo",
            timeout_s=timeout_s,
            store=store if rank == 0 else None,
        )
        try:
            return act(group)
        except WeightTransferError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(member, range(world_size)))


def assert_received(manifest: Manifest, buckets: list[torch.Tensor], expected) -> None:
    for (name, got), (wanted_name, wanted) in zip(unpack(manifest, buckets), expected, strict=True):
        assert name == wanted_name and got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_every_receiver_gets_what_every_stage_sends():
    sent = [tensors(0, "first."), tensors(1, "second."), tensors(2, "third.")]
    parts = [build_buckets(V1, stage, 64, owner=rank) for rank, stage in enumerate(sent)]
    manifest = merge_manifests([part for part, _ in parts])

    def act(group: Group):
        if group.rank < len(sent):
            return send_version(group, manifest, parts[group.rank][1])
        return receive_version(group, manifest, CPU)

    for buckets in members(len(sent) + 2, act)[len(sent) :]:
        assert_received(manifest, buckets, [pair for stage in sent for pair in stage])


def test_one_group_carries_one_version_after_another():
    versions = [(V1, tensors(0)), (V2, tensors(5)), (PolicyVersion(1, 0), tensors(6))]
    cut = [
        build_buckets(version, named, bytes_, owner=0)
        for (version, named), bytes_ in zip(versions, (16, 64, 9999), strict=True)
    ]

    def act(group: Group):
        if group.rank == 0:
            return [send_version(group, manifest, buckets) for manifest, buckets in cut]
        return [receive_version(group, manifest, CPU) for manifest, _ in cut]

    for received in members(3, act)[1:]:
        for buckets, (manifest, _), (_, named) in zip(received, cut, versions, strict=True):
            assert_received(manifest, buckets, named)


def test_epochs_on_one_store_are_groups_of_their_own():
    store, port = host_store(HOST, TIMEOUT_S)

    def member(epoch: int, rank: int) -> int:
        group = join_group(
            host=HOST,
            port=port,
            epoch=epoch,
            rank=rank,
            world_size=2,
            backend="gloo",
            timeout_s=TIMEOUT_S,
            store=store if rank == 0 else None,
        )
        value = torch.tensor([epoch if rank == 0 else -1])
        group.broadcast(value, 0)
        group.close()
        return int(value)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(member, (0, 1, 2, 0, 1, 2), (0, 0, 0, 1, 1, 1))) == [0, 1, 2, 0, 1, 2]


def test_a_group_leaves_the_default_group_of_torch_alone():
    assert members(2, lambda group: dist.is_initialized()) == [False, False]


def test_a_damaged_bucket_is_refused_by_version_bucket_and_sender():
    first, second = build_buckets(V1, tensors(0, "a"), 64, owner=0), build_buckets(V1, tensors(1, "b"), 64, owner=1)
    manifest = merge_manifests([first[0], second[0]])
    damaged = len(first[1]) + 1
    second[1][1][0] ^= 1

    def act(group: Group):
        if group.rank < 2:
            return send_version(group, manifest, (first, second)[group.rank][1])
        return receive_version(group, manifest, CPU)

    outcomes = members(4, act)
    assert outcomes[:2] == [None, None]
    for error in outcomes[2:]:
        assert str(error) == (
            f"version 0.1: bucket {damaged} of {len(manifest.buckets)} from rank 1 has another checksum than its "
            f"manifest"
        )


def test_a_damaged_manifest_is_refused_before_the_wire_is_touched():
    manifest, _ = build_buckets(V1, tensors(0), 64, owner=0)
    cut_off = Manifest(version=manifest.version, entries=manifest.entries, buckets=manifest.buckets[:1])
    never_used = Group(host_store(HOST, SHORT_S)[0], None, 1, SHORT_S)
    with pytest.raises(WeightTransferError, match=r"version 0\.1: the manifest's entry for w\S+ is damaged"):
        receive_version(never_used, cut_off, CPU)


def test_a_member_that_never_comes_is_waited_for_no_longer_than_the_deadline():
    store, port = host_store(HOST, SHORT_S)
    with pytest.raises(
        WeightTransferError, match=rf"rank 0 of 2 could not join broadcast group 7 at {HOST}:{port} within"
    ):
        join_group(
            host=HOST,
            port=port,
            epoch=7,
            rank=0,
            world_size=2,
            backend="gloo",
            timeout_s=SHORT_S,
            store=store,
        )


def test_a_store_that_is_gone_is_named():
    store, port = host_store(HOST, SHORT_S)
    del store
    with pytest.raises(WeightTransferError, match=rf"rank 1 of 2 could not join broadcast group 0 at {HOST}:{port}"):
        join_group(host=HOST, port=port, epoch=0, rank=1, world_size=2, backend="gloo", timeout_s=SHORT_S)


def test_a_sender_that_stalls_costs_a_receiver_no_more_than_the_deadline():
    manifest, buckets = build_buckets(V1, tensors(0), 64, owner=0)
    receiver_is_out = Event()

    def act(group: Group):
        if group.rank == 0:
            group.broadcast(buckets[0], 0)
            assert receiver_is_out.wait(TIMEOUT_S)
            return None  # alive until here, and silent
        try:
            return receive_version(group, manifest, CPU)
        finally:
            receiver_is_out.set()

    error = members(2, act, timeout_s=SHORT_S)[1]
    assert f"version 0.1: bucket 1 of {len(buckets)} from rank 0 did not arrive" in str(error)


def test_a_closed_group_says_so():
    manifest, buckets = build_buckets(V1, tensors(0), 64, owner=0)

    def act(group: Group):
        group.close()
        return send_version(group, manifest, buckets)

    error = members(1, act)[0]
    assert isinstance(error, WeightTransferError) and "the group is closed" in str(error)


def fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(1)
    return pid


def die_in_group(fields: dict, broadcasts: list[tuple[torch.Tensor, int]]) -> None:
    group = join_group(**fields)
    for tensor, root in broadcasts:
        group.broadcast(tensor, root)
    os.kill(os.getpid(), signal.SIGKILL)


def joined_with_one_who_dies(rank: int, broadcasts: list[tuple[torch.Tensor, int]]) -> tuple[Group, int]:
    """This process as the other member of a group of two, and the id of the child that is rank ``rank``."""
    store, port = host_store(HOST, TIMEOUT_S)
    fields = {"host": HOST, "port": port, "epoch": 0, "world_size": 2, "backend": "gloo", "timeout_s": TIMEOUT_S}
    pid = fork(lambda: die_in_group({**fields, "rank": rank}, broadcasts))
    return join_group(**fields, rank=1 - rank, store=store), pid


def assert_killed(pid: int) -> None:
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_a_sender_that_dies_is_named_with_the_bucket_that_is_missing():
    manifest, buckets = build_buckets(V1, tensors(0), 64, owner=0)
    group, pid = joined_with_one_who_dies(0, [(bucket, 0) for bucket in buckets[:2]])
    with pytest.raises(
        WeightTransferError, match=rf"version 0\.1: bucket 2 of {len(buckets)} from rank 0 did not arrive"
    ):
        receive_version(group, manifest, CPU)
    group.close()
    assert_killed(pid)


def test_a_receiver_that_dies_ends_the_send():
    # Larger than what a socket takes without a reader.
    named = [(f"w{i}", torch.zeros(4 << 20, dtype=torch.uint8)) for i in range(4)]
    manifest, buckets = build_buckets(V1, named, 4 << 20, owner=0)
    group, pid = joined_with_one_who_dies(1, [])
    with pytest.raises(WeightTransferError, match=r"version 0\.1: bucket \d of 4 did not leave rank 0"):
        send_version(group, manifest, buckets)
    group.close()
    assert_killed(pid)
