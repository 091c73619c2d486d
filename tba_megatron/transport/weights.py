"""Weights on the wire: broadcast groups between the trainer's stage leaders and the engines' workers.

A group stands apart from torch.distributed's world: both sides form it with ``join_group`` at a store that the trainer
hosts. Ranks 0..P-1 are the stage leaders, the workers follow. Buckets go in manifest order, one after another, each
from its owner; every member takes part in every broadcast. The same code serves gloo and nccl; nccl has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import ProcessGroupGloo

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.manifest import Manifest, check_layout, verify
from tba_megatron.transport.nccl import nccl_group
from tba_megatron.transport.round import connect, first_line


class Transfer:
    """A broadcast under way."""

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        """Until this member's part is done. RuntimeError when a peer is gone or the deadline passes."""
        # Whether it is completed says nothing: gloo's work is that after a failure too. Only wait() raises.
        if self._work is not None:
            self._work.wait(self._timeout)


class Group:
    """One member's end of a broadcast group. ``close`` once it is no longer used or after its first error."""

    def __init__(self, store: Store, process_group: Any, rank: int, timeout_s: float) -> None:
        self.store = store
        self.rank = rank
        self._process_group: Any = process_group
        self._timeout = timedelta(seconds=timeout_s)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """RuntimeError when a peer is gone or the deadline passes."""
        self.start_broadcast(tensor, root).wait()

    def start_broadcast(self, tensor: Tensor, root: int) -> Transfer:
        """Members must start broadcasts in one order. ``tensor`` belongs to the transfer until that is done."""
        if self._process_group is None:
            raise RuntimeError("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = self._timeout
        return Transfer(self._process_group.broadcast([tensor], options), self._timeout)

    def abort(self) -> None:
        """End what is under way, where the backend can: nccl does, a thread that waits for gloo is not woken."""
        if self._process_group is not None:
            self._process_group.abort()

    def close(self) -> None:
        """Nothing is written to a tensor after this. It takes some tenths of a second, 1 to 2 s after an error."""
        self._process_group = None


def join_group(
    *, host: str, port: int, epoch: int, rank: int, world_size: int, backend: str, timeout_s: float
) -> Group:
    """Form the group ``epoch`` with its other members; waits for them up to ``timeout_s``.

    WeightTransferError when the others do not come in time or, with nccl, do not fit together.
    """
    who = f"rank {rank} of {world_size} could not join broadcast group {epoch} at {host}:{port}"
    try:
        store = PrefixStore(f"weights-{epoch}", connect(host, port, timeout_s))
        if backend == "nccl":
            process_group = nccl_group(store, rank, world_size, timeout_s)
        else:
            process_group = ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
        return Group(store, process_group, rank, timeout_s)
    except WeightTransferError as error:
        raise WeightTransferError(f"{who}: {error}") from None
    except (RuntimeError, dist.DistError) as error:
        raise WeightTransferError(f"{who} within {timeout_s:g} s: {first_line(error)}") from None


def _nothing(index: int) -> None:
    pass


def send_version(
    group: Group, manifest: Manifest, buckets: Sequence[Tensor], on_bucket: Callable[[int], None] = _nothing
) -> None:
    """Take part in the broadcast of every bucket of ``manifest``; ``buckets`` are this rank's own, in order.

    ``on_bucket`` is called with the number of each that has left. WeightTransferError names the one that has not.
    """
    own = iter(buckets)
    scratch = _scratch(group, manifest, buckets)  # what other stages send passes through here, one at a time
    for index, bucket in enumerate(manifest.buckets):
        tensor = next(own) if bucket.owner == group.rank else scratch[: bucket.nbytes]
        try:
            group.broadcast(tensor, bucket.owner)
        except RuntimeError as error:
            raise WeightTransferError(
                f"version {manifest.version}: bucket {index} of {len(manifest.buckets)} did not leave rank "
                f"{bucket.owner}: {first_line(error)}"
            ) from None
        on_bucket(index)


def _scratch(group: Group, manifest: Manifest, buckets: Sequence[Tensor]) -> Tensor:
    device = buckets[0].device if buckets else torch.device("cpu")
    others = [bucket.nbytes for bucket in manifest.buckets if bucket.owner != group.rank]
    return torch.empty(max(others, default=0), dtype=torch.uint8, device=device)


def receive_version(
    group: Group, manifest: Manifest, staging: Sequence[Tensor], on_bucket: Callable[[int], None] = _nothing
) -> None:
    """All buckets of ``manifest`` into ``staging``, verified; ``on_bucket`` is called with each that has arrived.

    WeightTransferError names version, bucket, sender and reason. One that did not arrive ends the receive at once;
    after one that is damaged the others still are received, because they are held up by a member that stops.
    ``staging`` may be written to until the group is closed.
    """
    check_layout(manifest)
    damage: WeightTransferError | None = None
    index = 0
    try:
        transfer = _start(group, manifest, staging, 0)
        for index, tensor in enumerate(staging):
            transfer.wait()
            # One arrives while the one before is verified. Two at once are no faster on gloo, and make it more likely
            # that the death of the sender is noticed at the deadline only.
            transfer = _start(group, manifest, staging, index + 1)
            on_bucket(index)
            try:
                verify(manifest, index, tensor, f"rank {manifest.buckets[index].owner}")
            except WeightTransferError as error:
                damage = damage or error
    except RuntimeError as error:
        bucket = manifest.buckets[index]
        raise WeightTransferError(
            f"version {manifest.version}: bucket {index} of {len(manifest.buckets)} from rank {bucket.owner} did not "
            f"arrive: {first_line(error)}"
        ) from None
    finally:
        transfer = None  # an exception keeps this frame, and a transfer keeps the group
    try:
        if damage is not None:
            raise damage
    finally:
        damage = None  # it holds this frame, which would hold it and the group


def _start(group: Group, manifest: Manifest, staging: Sequence[Tensor], index: int) -> Transfer:
    """The broadcast of bucket ``index``; nothing, done at once, after the last."""
    if index == len(manifest.buckets):
        return Transfer(None, timedelta(0))
    return group.start_broadcast(staging[index], manifest.buckets[index].owner)
