"""Weights on the wire: broadcast groups between the trainer's stage leaders and the engines' workers.

A group stands apart from torch.distributed's world: both sides form it with ``join_group`` from a store that the
trainer hosts. Ranks 0..P-1 are the stage leaders, the workers follow. Buckets go in manifest order, one after
another, each from its owner; every member takes part in every broadcast. The same code serves gloo and nccl; nccl has
not been run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.manifest import Manifest, check_layout, checksum


def host_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on a free port of ``host``, and the port: nobody can take it in between."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, store.port


class Group:
    """One member's end of a broadcast group. ``close`` once it is no longer used or after its first error."""

    def __init__(self, store: Store, process_group: Any, rank: int, timeout_s: float) -> None:
        self.store = store
        self.rank = rank
        self._process_group: Any = process_group
        self._timeout = timedelta(seconds=timeout_s)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """RuntimeError when a peer is gone or the deadline passes."""
        if self._process_group is None:
            raise RuntimeError("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = self._timeout
        self._process_group.broadcast([tensor], options).wait(self._timeout)

    def close(self) -> None:
        self._process_group = None


def join_group(
    *,
    host: str,
    port: int,
    epoch: int,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    store: Store | None = None,
) -> Group:
    """Form the group ``epoch`` with its other members; waits for them up to ``timeout_s``.

    ``store`` is given by the member that hosts it. WeightTransferError when the others do not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        base = store or TCPStore(host, port, is_master=False, timeout=timeout)
        prefix = PrefixStore(f"weights-{epoch}", base)
        return Group(prefix, _process_group(prefix, rank, world_size, backend, timeout), rank, timeout_s)
    except (RuntimeError, dist.DistError) as error:
        raise WeightTransferError(
            f"rank {rank} of {world_size} could not join broadcast group {epoch} at {host}:{port} within "
            f"{timeout_s:g} s: {_first_line(error)}"
        ) from None


def _process_group(store: Store, rank: int, world_size: int, backend: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, world_size, timeout)
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, world_size, options)


def send_version(group: Group, manifest: Manifest, buckets: Sequence[Tensor]) -> None:
    """Take part in the broadcast of every bucket of ``manifest``; ``buckets`` are this rank's own, in order."""
    own = iter(buckets)
    for index, bucket in enumerate(manifest.buckets):
        mine = bucket.owner == group.rank
        tensor = next(own) if mine else torch.empty(bucket.nbytes, dtype=torch.uint8, device=_device(buckets))
        try:
            group.broadcast(tensor, bucket.owner)
        except RuntimeError as error:
            raise WeightTransferError(
                f"version {manifest.version}: bucket {index} of {len(manifest.buckets)} did not leave rank "
                f"{bucket.owner}: {_first_line(error)}"
            ) from None


def receive_version(group: Group, manifest: Manifest, device: torch.device) -> list[Tensor]:
    """All buckets of ``manifest``, verified; WeightTransferError names version, bucket, sender and reason."""
    check_layout(manifest)
    buckets: list[Tensor] = []
    for index, bucket in enumerate(manifest.buckets):
        where = f"version {manifest.version}: bucket {index} of {len(manifest.buckets)} from rank {bucket.owner}"
        tensor = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        try:
            group.broadcast(tensor, bucket.owner)
        except RuntimeError as error:
            raise WeightTransferError(f"{where} did not arrive: {_first_line(error)}") from None
        buckets.append(tensor)
    # Verified after the last bucket: a member that stopped in the middle would hold up all others.
    for index, (bucket, tensor) in enumerate(zip(manifest.buckets, buckets, strict=True)):
        if checksum(tensor) != bucket.checksum:
            raise WeightTransferError(
                f"version {manifest.version}: bucket {index} of {len(manifest.buckets)} from rank {bucket.owner} has "
                f"another checksum than its manifest"
            )
    return buckets


def _device(buckets: Sequence[Tensor]) -> torch.device:
    return buckets[0].device if buckets else torch.device("cpu")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
