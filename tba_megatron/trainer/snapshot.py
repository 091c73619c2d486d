"""A version cut out of the policy at a step boundary, the moment at which training waits for publishing.

So nothing happens here that can happen later: each parameter is copied once, in the searchers' dtype, straight to its
place in a bucket that was allocated long ago. Whether all is finite, and checksums, are the sender thread's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.models.layouts import Rule
from tba_megatron.trainer.model import named_parameters
from tba_megatron.trainer.stream_hf import stage_buckets
from tba_megatron.transport.manifest import Layout, allocate, plan_layout, unpack
from tba_megatron.types import PolicyVersion

_SLOTS = 2  # parts on their way at a time: one arrives while the one before is put in place


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """This stage's tensors of ``version`` under Hugging Face's names; ``layout`` says where in ``buckets`` they lie."""

    version: PolicyVersion
    layout: Layout
    buckets: list[Tensor]  # uint8, on the policy's device


class Snapshotter:
    """One rank's part in cutting snapshots; its memory is allocated at the first and written to by each.

    On tensor rank 0 that is this stage in full, and at a tensor-parallel size of t > 1 also 2 (t - 1) shards of about
    ``bucket_bytes`` / t each; on the other ranks 2 such shards.
    """

    def __init__(
        self,
        *,
        architecture: Architecture,
        shape: ModelShape,
        groups: Groups,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        self._architecture, self._shape, self._groups = architecture, shape, groups
        self._dtype, self._bucket_bytes = dtype, bucket_bytes
        self._memory: _Memory | None = None

    @torch.no_grad()
    def take(self, chunks: Sequence[GPTModel], version: PolicyVersion) -> Snapshot | None:
        """The snapshot on tensor rank 0 of a stage, None elsewhere; a collective over each tensor-parallel group.

        To be called between two steps, when the parameters of ``chunks`` are complete on every rank (which they are
        after the optimizer's step: parameters are gathered within it). It writes to the buckets of the snapshot before:
        the caller makes sure that all of that one has left.
        """
        own = named_parameters(chunks)
        if self._memory is None:
            self._memory = self._allocate(chunks, own)
        if self._groups.tp_rank == 0:
            self._collect(self._memory, own)
        else:
            self._hand_over(self._memory, own)
        if self._groups.device.type == "cuda":
            # Copies are only enqueued so far, and who sends reads from other streams and from the host.
            torch.cuda.current_stream(self._groups.device).synchronize()
        if self._groups.tp_rank:
            return None
        return Snapshot(version=version, layout=self._memory.layout, buckets=self._memory.buckets)

    def _allocate(self, chunks: Sequence[GPTModel], own: Mapping[str, Tensor]) -> _Memory:
        device, leads, peers = self._groups.device, self._groups.tp_rank == 0, self._groups.tp_size - 1
        model = (self._architecture, self._shape, self._groups, self._dtype, self._bucket_bytes)
        parts = [
            _Part(rules, [own[rule.megatron].numel() for rule in rules]) for rules in stage_buckets(chunks, *model)
        ]
        shapes = self._architecture.tensor_shapes(self._shape)
        names = [name for part in parts for rule in part.rules for name in rule.hf]
        layout = plan_layout([(name, self._dtype, shapes[name]) for name in names], self._bucket_bytes)
        buckets = allocate(layout, device) if leads else []
        largest = max((sum(part.sizes) for part in parts), default=0)
        rows = peers if leads else min(peers, 1)
        return _Memory(
            parts=parts,
            layout=layout,
            buckets=buckets,
            targets=dict(unpack(layout.entries, buckets)) if leads else {},
            slots=[torch.zeros(rows, largest, dtype=self._dtype, device=device) for _ in range(_SLOTS)],
        )

    def _collect(self, memory: _Memory, own: Mapping[str, Tensor]) -> None:
        """All shards of this stage to their places."""
        peers = range(1, self._groups.tp_size) if memory.parts else ()
        arriving = [self._exchange(memory, index) for index in range(min(_SLOTS, len(memory.parts)))]
        for index, part in enumerate(memory.parts):
            self._place(memory, part.rules, [own[rule.megatron] for rule in part.rules], 0)
            _wait(arriving[index])
            for peer, flat in zip(peers, memory.of_part(index), strict=True):
                shards = [
                    shard.view(own[rule.megatron].shape)
                    for shard, rule in zip(flat.split(part.sizes), part.rules, strict=True)
                ]
                self._place(memory, part.rules, shards, peer)
            if index + _SLOTS < len(memory.parts):
                arriving.append(self._exchange(memory, index + _SLOTS))

    def _place(self, memory: _Memory, rules: Sequence[Rule], shards: Sequence[Tensor], rank: int) -> None:
        for rule, shard in zip(rules, shards, strict=True):
            targets = [memory.targets[name] for name in rule.hf]
            for target, source in rule.layout.placement(shard, targets, rank, self._groups.tp_size):
                target.copy_(source)

    def _hand_over(self, memory: _Memory, own: Mapping[str, Tensor]) -> None:
        """This rank's shards to tensor rank 0."""
        leaving: list[list[Any]] = []
        for index, part in enumerate(memory.parts):
            if index >= _SLOTS:
                _wait(leaving[index - _SLOTS])
            (flat,) = memory.of_part(index)
            for target, rule in zip(flat.split(part.sizes), part.rules, strict=True):
                target.view(own[rule.megatron].shape).copy_(own[rule.megatron])
            leaving.append(self._exchange(memory, index))
        for works in leaving[-_SLOTS:]:
            _wait(works)

    def _exchange(self, memory: _Memory, index: int) -> list[Any]:
        """Start to receive part ``index`` from all peers, or to send it to tensor rank 0.

        Not dist.gather: gloo's allocates memory for all shards in each call, and copies every one of them twice.
        """
        flats = memory.of_part(index)
        if not len(flats):
            return []
        leads = self._groups.tp_rank == 0
        group = cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
        operations = [
            dist.P2POp(dist.irecv if leads else dist.isend, flat, group=group, group_peer=rank + 1 if leads else 0)
            for rank, flat in enumerate(flats)
        ]
        return dist.batch_isend_irecv(operations)


@dataclass(frozen=True, slots=True)
class _Part:
    """Parameters that cross the tensor-parallel group together: ``sizes[i]`` elements of the shard of ``rules[i]``."""

    rules: list[Rule]
    sizes: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    parts: list[_Part]
    layout: Layout
    buckets: list[Tensor]
    targets: dict[str, Tensor]  # views into the buckets, by Hugging Face's names
    slots: list[Tensor]  # [peers, elements]: shards on their way; on a peer its own

    def of_part(self, index: int) -> Tensor:
        """[peers, elements of the part]"""
        return self.slots[index % _SLOTS][:, : sum(self.parts[index].sizes)]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
