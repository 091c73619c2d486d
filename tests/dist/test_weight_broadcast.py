"""Broadcast groups over gloo: whole versions to every member, and a clear end when one of them fails.

Members are threads where all live, forked processes where one has to die.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.manifest import (
    Manifest,
    allocate,
    build_buckets,
    checksum,
    layout_of,
    merge_manifests,
    unpack,
)
from tba_megatron.transport.round import host_store
from tba_megatron.transport.weights import Group, join_group, receive_version, send_version
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
    _store, port = host_store(HOST, timeout_s)

    def member(rank: int) -> Any:
        group = join_group(
            host=HOST,
            port=port,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            backend="gloo",
            timeout_s=timeout_s,
        )
        try:
            return act(group)
        except WeightTransferError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(member, range(world_size)))


def arrive(group: Group, manifest: Manifest) -> list[torch.Tensor]:
    staging = allocate(layout_of(manifest), CPU)
    receive_version(group, manifest, staging)
    return staging


def assert_received(manifest: Manifest, buckets: list[torch.Tensor], expected) -> None:
    for (name, got), (wanted_name, wanted) in zip(unpack(manifest.entries, buckets), expected, strict=True):
        assert name == wanted_name and got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_every_receiver_gets_what_every_stage_sends():
    sent = [tensors(0, "first."), tensors(1, "second."), tensors(2, "third.")]
    parts = [build_buckets(V1, stage, 64, owner=rank) for rank, stage in enumerate(sent)]
    manifest = merge_manifests([part for part, _ in parts])

    def act(group: Group):
        if group.rank < len(sent):
            return send_version(group, manifest, parts[group.rank][1])
        return arrive(group, manifest)

    for buckets in members(len(sent) + 2, act)[len(sent) :]:
        assert_received(manifest, buckets, [pair for stage in sent for pair in stage])


def test_both_ends_hear_of_every_bucket_in_order():
    parts = [build_buckets(V1, tensors(rank, f"{rank}."), 64, owner=rank) for rank in range(2)]
    manifest = merge_manifests([part for part, _ in parts])

    def act(group: Group) -> list[int]:
        heard: list[int] = []
        if group.rank < 2:
            send_version(group, manifest, parts[group.rank][1], heard.append)
        else:
            receive_version(group, manifest, allocate(layout_of(manifest), CPU), heard.append)
        return heard

    assert members(4, act) == [list(range(len(manifest.buckets)))] * 4


def test_what_a_receiver_raises_about_its_progress_ends_the_receive():
    manifest, buckets = build_buckets(V1, tensors(0), 64, owner=0)

    def refuse(bucket: int) -> None:
        raise WeightTransferError(f"no store at bucket {bucket}")

    def act(group: Group):
        if group.rank == 0:
            return send_version(group, manifest, buckets)
        return receive_version(group, manifest, allocate(layout_of(manifest), CPU), refuse)

    assert str(members(2, act)[1]) == "no store at bucket 0"


def test_one_group_carries_one_version_after_another():
    versions = [(V1, tensors(0)), (V2, tensors(5)), (PolicyVersion(1, 0), tensors(6))]
    cut = [
        build_buckets(version, named, bytes_, owner=0)
        for (version, named), bytes_ in zip(versions, (16, 64, 9999), strict=True)
    ]

    def act(group: Group):
        if group.rank == 0:
            return [send_version(group, manifest, buckets) for manifest, buckets in cut]
        return [arrive(group, manifest) for manifest, _ in cut]

    for received in members(3, act)[1:]:
        for buckets, (manifest, _), (_, named) in zip(received, cut, versions, strict=True):
            assert_received(manifest, buckets, named)


def test_epochs_on_one_store_are_groups_of_their_own():
    _store, port = host_store(HOST, TIMEOUT_S)

    def member(epoch: int, rank: int) -> int:
        group = join_group(
            host=HOST,
            port=port,
            epoch=epoch,
            rank=rank,
            world_size=2,
            backend="gloo",
            timeout_s=TIMEOUT_S,
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
        return arrive(group, manifest)

    outcomes = members(4, act)
    assert outcomes[:2] == [None, None]
    for error in outcomes[2:]:
        assert str(error) == (
            f"version 0.1: bucket {damaged} of {len(manifest.buckets)} from rank 1 has another checksum than its "
            f"manifest"
        )


def test_a_bucket_that_is_not_finite_is_refused_by_version_bucket_sender_and_name():
    manifest, buckets = build_buckets(V1, tensors(0), 9999, owner=0)
    unpack(manifest.entries, buckets)[1][1][0] = float("inf")
    altered = msgspec.structs.replace(
        manifest, buckets=(msgspec.structs.replace(manifest.buckets[0], checksum=checksum(buckets[0])),)
    )

    def act(group: Group):
        if group.rank == 0:
            return send_version(group, altered, buckets)
        return arrive(group, altered)

    assert str(members(2, act)[1]) == "version 0.1: bucket 0 of 1 from rank 0: w1 is not finite"


def test_a_damaged_manifest_is_refused_before_the_wire_is_touched():
    manifest, _ = build_buckets(V1, tensors(0), 64, owner=0)
    cut_off = Manifest(version=manifest.version, entries=manifest.entries, buckets=manifest.buckets[:1])
    never_used = Group(host_store(HOST, SHORT_S)[0], None, 1, SHORT_S)
    with pytest.raises(WeightTransferError, match=r"version 0\.1: the manifest's entry for w\S+ is damaged"):
        arrive(never_used, cut_off)


def test_a_member_that_never_comes_is_waited_for_no_longer_than_the_deadline():
    _store, port = host_store(HOST, SHORT_S)
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
        )


def test_a_store_that_is_gone_is_named():
    _store, port = host_store(HOST, SHORT_S)
    del _store
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
            return arrive(group, manifest)
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


@contextmanager
def joined_with_one_who_dies(rank: int, broadcasts: list[tuple[torch.Tensor, int]]) -> Iterator[Group]:
    """This process as the other member of a group of two, whose rank ``rank`` is a child."""
    _store, port = host_store(HOST, TIMEOUT_S)
    fields = {"host": HOST, "port": port, "epoch": 0, "world_size": 2, "backend": "gloo", "timeout_s": TIMEOUT_S}
    pid = fork(lambda: die_in_group({**fields, "rank": rank}, broadcasts))
    group = join_group(**fields, rank=1 - rank)
    yield group
    group.close()
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_a_sender_that_dies_is_named_with_the_bucket_that_is_missing():
    manifest, buckets = build_buckets(V1, tensors(0), 64, owner=0)
    with (
        joined_with_one_who_dies(0, [(bucket, 0) for bucket in buckets[:2]]) as group,
        pytest.raises(
            WeightTransferError, match=rf"version 0\.1: bucket 2 of {len(buckets)} from rank 0 did not arrive"
        ),
    ):
        arrive(group, manifest)


def test_a_receiver_that_dies_ends_the_send():
    # Larger than what a socket takes without a reader.
    named = [(f"w{i}", torch.zeros(4 << 20, dtype=torch.uint8)) for i in range(4)]
    manifest, buckets = build_buckets(V1, named, 4 << 20, owner=0)
    complaint = r"version 0\.1: bucket \d of 4 did not leave rank 0"
    with joined_with_one_who_dies(1, []) as group, pytest.raises(WeightTransferError, match=complaint):
        send_version(group, manifest, buckets)
