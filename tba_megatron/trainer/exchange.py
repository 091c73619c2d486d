"""How a step's groups reach the ranks that train them, over gloo control groups.

Owners draw, leaders exchange whole groups so that each replica trains the same number of them with balanced tokens,
and each leader sends its packed microbatches to its tensor and pipeline peers. G groups of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tba_megatron.dist import Groups
from tba_megatron.packing import Pack, decode, encode
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.rollout_batch import decode as decode_batch
from tba_megatron.rollout_batch import encode as encode_batch
from tba_megatron.types import RolloutId, TrainGroup

T = TypeVar("T")


def gather_on_all(value: T, groups: Groups) -> list[T]:
    """Every rank's ``value``, by rank, on every rank. For small control values only."""
    if groups.info.world_size == 1:
        return [value]
    values: list[T] = [value] * groups.info.world_size
    dist.all_gather_object(values, value, group=groups.world)
    return values


def gather_on_leaders(value: T, groups: Groups) -> list[T]:
    """Every DP leader's ``value``, by replica, on every leader. For small values only."""
    if groups.dp_size == 1:
        return [value]
    values: list[T] = [value] * groups.dp_size
    dist.all_gather_object(values, value, group=groups.leaders)
    return values


def from_rank_0(value: T | None, groups: Groups) -> T:
    """Rank 0's ``value`` on every rank."""
    box = [value]
    if groups.info.world_size > 1:
        dist.broadcast_object_list(box, src=0, group=groups.world)
    assert box[0] is not None
    return box[0]


def assign_replicas(tokens_G: Sequence[int], n_replicas: int) -> list[int]:
    """The replica that trains each group: equally many groups each, the longest first to the lightest.

    A pure function of the token counts, so every leader computes the same. ``len(tokens_G)`` is a multiple of
    ``n_replicas``.
    """
    room = [len(tokens_G) // n_replicas] * n_replicas
    load = [0] * n_replicas
    replica_G = [0] * len(tokens_G)
    for g in sorted(range(len(tokens_G)), key=lambda g: (-tokens_G[g], g)):
        replica = min((r for r in range(n_replicas) if room[r]), key=lambda r: (load[r], r))
        replica_G[g] = replica
        load[replica] += tokens_G[g]
        room[replica] -= 1
    return replica_G


def exchange_groups(drawn: RolloutBatch, groups: Groups) -> list[TrainGroup]:
    """On DP leaders: give the groups that this shard drew, get those that this replica trains."""
    if groups.dp_size == 1:
        return drawn.train_groups()
    counts: list[list[int]] = gather_on_leaders(drawn.n_tokens_G.tolist(), groups)
    replica_G = assign_replicas([n for shard in counts for n in shard], groups.dp_size)
    first = sum(len(shard) for shard in counts[: groups.dp_rank])
    mine = replica_G[first : first + drawn.n_groups]
    outgoing = [
        encode_batch(drawn.select([g for g, to in enumerate(mine) if to == replica]))
        for replica in range(groups.dp_size)
    ]
    incoming = _all_to_all(outgoing, groups.leaders, groups.dp_rank)
    return [group for data in incoming for group in decode_batch(data).train_groups()]


def _all_to_all(outgoing: list[bytes], group: dist.ProcessGroup, me: int) -> list[bytes]:
    """Messages of different sizes from each rank to each rank of a gloo group."""
    sizes = torch.tensor([len(data) for data in outgoing], dtype=torch.int64)
    table = [torch.empty_like(sizes) for _ in outgoing]
    dist.all_gather(table, sizes, group=group)
    receive = [int(row[me]) for row in table]
    send = torch.from_numpy(np.frombuffer(b"".join(outgoing), np.uint8).copy())
    received = torch.empty(sum(receive), dtype=torch.uint8)
    dist.all_to_all_single(received, send, receive, sizes.tolist(), group=group)
    return [part.numpy().tobytes() for part in received.split(receive)]


def share_packs(packs: list[Pack] | None, groups: Groups) -> list[Pack]:
    """From the DP leader (``packs`` is None elsewhere) to every rank of its replica."""
    if len(groups.replica_ranks) == 1:
        assert packs is not None
        return packs
    source = groups.leader_ranks[groups.dp_rank]
    data = encode(packs) if packs is not None else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=source, group=groups.replica)
    buffer = (
        torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        if packs is not None
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(buffer, src=source, group=groups.replica)
    return packs if packs is not None else decode(buffer.numpy().tobytes())


def return_to_owners(
    values: Mapping[RolloutId, tuple[float, int]], groups: Groups
) -> dict[RolloutId, tuple[float, int]]:
    """On DP leaders: everybody's computed reference log-probs; each shard keeps those of rollouts that it holds."""
    if groups.dp_size == 1:
        return dict(values)
    everyone = gather_on_leaders(dict(values), groups)
    return {rollout_id: value for part in everyone for rollout_id, value in part.items()}
