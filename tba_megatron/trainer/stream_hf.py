"""The policy as Hugging Face tensors, streamed out of the shards of tensor and pipeline ranks, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.models.layouts import Rule
from tba_megatron.trainer.model import named_parameters

BUCKET_BYTES = 64 << 20


def bucket_rules(
    rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]], itemsize: int, bucket_bytes: int
) -> list[list[Rule]]:
    """``rules`` in order, cut into buckets by the bytes of their Hugging Face tensors; a pure function.

    A bucket is closed before it would exceed ``bucket_bytes``; a larger rule has one of its own. The tensors of one
    rule (q, k and v of a layer) stay together.
    """
    buckets: list[list[Rule]] = []
    filled = 0
    for rule in rules:
        nbytes = itemsize * sum(math.prod(shapes[name]) for name in rule.hf)
        if not buckets or filled + nbytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(rule)
        filled += nbytes
    return buckets


def stage_buckets(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    groups: Groups,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> list[list[Rule]]:
    """What each bucket of this pipeline stage holds, from shapes alone; the tied copy of the head is never in one."""
    own = named_parameters(chunks)
    rules = [rule for rule in architecture.rules(shape, groups.tp_size) if rule.megatron in own]
    return bucket_rules(rules, architecture.tensor_shapes(shape), dtype.itemsize, bucket_bytes)


def stream_buckets(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    groups: Groups,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Iterator[list[tuple[str, Tensor]]]:
    """This stage's (Hugging Face name, full tensor), in checkpoint order, a bucket at a time, on the stage leader.

    One gather for each bucket over the tensor-parallel group of replica 0: every rank of it has to drain the
    iterator, and gets empty buckets where it is not the stage leader. Other replicas get nothing at all. The tensors
    are copies; those of one bucket may share memory. Who lets a bucket go before the next needs memory for about four
    of them on the leader (two without tensor parallelism), and for their part of one on its peers.
    """
    if groups.dp_rank != 0:
        return
    own = named_parameters(chunks)
    for rules in stage_buckets(chunks, architecture, shape, groups, dtype, bucket_bytes):
        yield _gather_bucket(rules, [own[rule.megatron].detach() for rule in rules], groups, dtype)


def _gather_bucket(
    rules: Sequence[Rule], parameters: Sequence[Tensor], groups: Groups, dtype: torch.dtype
) -> list[tuple[str, Tensor]]:
    flat = torch.cat([parameter.reshape(-1).to(dtype) for parameter in parameters])
    flats = [flat]
    if groups.tp_size > 1:
        leads = groups.is_stage_leader
        flats = [torch.empty_like(flat) for _ in range(groups.tp_size)] if leads else []
        tp_group = cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
        dist.gather(flat, flats if leads else None, group=tp_group, group_dst=0)
    if not groups.is_stage_leader:
        return []
    sizes = [parameter.numel() for parameter in parameters]
    tensors: list[tuple[str, Tensor]] = []
    for rule, like, *shards in zip(rules, parameters, *(f.split(sizes) for f in flats), strict=True):
        full = rule.layout.from_ranks([shard.view(like.shape) for shard in shards])
        tensors += zip(rule.hf, full, strict=True)
    return tensors


def stream_hf(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, groups: Groups, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """``stream_buckets``, tensor by tensor."""
    for bucket in stream_buckets(chunks, architecture, shape, groups, dtype, BUCKET_BYTES):
        yield from bucket


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or not a number, without a copy of the tensor."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
