"""Weights in and out of Megatron's shards: load a Hugging Face folder, stream Hugging Face tensors out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.errors import ModelError
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.models.hf_folder import open_tensors, write_folder
from tba_megatron.models.layouts import Rule
from tba_megatron.models.random_weights import RandomTensors
from tba_megatron.trainer.model import named_parameters

TIED_COPY = "output_layer.weight"  # with tied embeddings the last of several stages owns a copy under this name
EMBEDDING = "embedding.word_embeddings.weight"


def load_hf(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, folder: Path, groups: Groups
) -> None:
    """Copy this rank's shards out of ``folder``; ModelError names anything missing, unexpected or of another shape."""
    with open_tensors(folder) as tensors:
        _fill(chunks, architecture, shape, tensors, str(folder), groups)


def load_random(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, seed: int, groups: Groups
) -> None:
    """This rank's shards of seeded random weights, the same model for every parallel layout."""
    _fill(chunks, architecture, shape, RandomTensors(architecture, shape, seed), "random weights", groups)


class _Tensors(Protocol):
    @property
    def names(self) -> frozenset[str]: ...

    def __getitem__(self, name: str) -> Tensor: ...


def _fill(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    tensors: _Tensors,
    source: str,
    groups: Groups,
) -> None:
    own = dict(named_parameters(chunks))
    rules = {rule.megatron: rule for rule in architecture.rules(shape, groups.tp_size)}
    if TIED_COPY in own and TIED_COPY not in rules:
        rules[TIED_COPY] = rules[EMBEDDING]
    used = {name for rule in rules.values() for name in rule.hf}
    missing = sorted(used - tensors.names)
    unexpected = sorted(n for n in tensors.names - used if not _harmless(n, shape))
    if missing or unexpected:
        raise ModelError(f"{source}: weights missing: {missing or 'none'}; unexpected: {unexpected or 'none'}")
    for name, parameter in own.items():
        if name not in rules:
            raise ModelError(f"{architecture.name} has no rule for Megatron's parameter {name}")
        _copy(parameter, rules[name], [tensors[n] for n in rules[name].hf], source, groups)


def _harmless(name: str, shape: ModelShape) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (shape.tied and name == "lm_head.weight")


def _copy(parameter: torch.nn.Parameter, rule: Rule, tensors: list[Tensor], source: str, groups: Groups) -> None:
    shard = rule.layout.to_rank(tensors, groups.tp_rank, groups.tp_size)
    if shard.shape != parameter.shape:
        raise ModelError(
            f"{source}: {', '.join(rule.hf)} give {rule.megatron} the shape {tuple(shard.shape)}, but config.json "
            f"says {tuple(parameter.shape)}"
        )
    with torch.no_grad():
        parameter.copy_(shard)


def stage_rules(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, groups: Groups
) -> list[tuple[Rule, torch.nn.Parameter]]:
    """The rules that this pipeline stage supplies, in checkpoint order; the tied copy is never among them."""
    own = named_parameters(chunks)
    rules = architecture.rules(shape, groups.tp_size)
    return [(rule, own[rule.megatron]) for rule in rules if rule.megatron in own]


def stream_hf(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, groups: Groups, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """This stage's (Hugging Face name, full tensor), one at a time, joined over the tensor-parallel ranks.

    A collective over the tensor-parallel group: every rank of it has to drain the iterator. Every rank gets the
    tensors; they are copies.
    """
    tp_group = parallel_state.get_tensor_model_parallel_group()
    for rule, parameter in stage_rules(chunks, architecture, shape, groups):
        local = parameter.detach().to(dtype).contiguous()
        if groups.tp_size > 1:
            shards = [torch.empty_like(local) for _ in range(groups.tp_size)]
            dist.all_gather(shards, local, group=tp_group)
        else:
            shards = [local.clone() if local.data_ptr() == parameter.data_ptr() else local]
        yield from zip(rule.hf, rule.layout.from_ranks(shards), strict=True)


def export_hf(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    groups: Groups,
    *,
    folder: Path,
    template: Path,
    dtype: str,
) -> None:
    """Write the whole policy as a Hugging Face folder from rank 0; a collective over all ranks.

    Stages send their tensors to rank 0 in order. The folder appears when it is complete.
    """
    tensors = [(n, t.cpu()) for n, t in stream_hf(chunks, architecture, shape, groups, getattr(torch, dtype))]
    mine = tensors if groups.is_stage_leader else []
    gathered: list[list[tuple[str, Tensor]]] | None = (
        [[] for _ in range(groups.info.world_size)] if groups.rank == 0 else None
    )
    dist.gather_object(mine, gathered, dst=0, group=groups.world)
    if gathered is not None:
        write_folder(folder, template, (pair for part in gathered for pair in part), dtype)
    dist.barrier(group=groups.world)
