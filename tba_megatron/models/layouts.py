"""How one Hugging Face parameter becomes one rank's Megatron parameter, and back.

A layout is a pure pair of functions on tensors: ``to_rank`` cuts the shard that tensor-parallel rank ``rank`` of
``size`` keeps, ``from_ranks`` joins the shards into the Hugging Face tensors again. ``from_ranks(to_rank(x)) == x``
for every layout. H hidden, V vocabulary, D head size, N query heads, G key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    def to_rank(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor: ...

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same tensor on every rank: norms, and biases of row-parallel layers."""

    def to_rank(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return tensors[0]

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along ``dim``: 0 for column-parallel layers, 1 for row-parallel ones."""

    dim: int

    def to_rank(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return tensors[0].chunk(size, self.dim)[rank]

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), self.dim),)


@dataclass(frozen=True, slots=True)
class Gated:
    """Gate and up projections, stacked within each rank's shard of ``linear_fc1``."""

    def to_rank(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([t.chunk(size, 0)[rank] for t in tensors])

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2, 0) for shard in shards]
        return tuple(torch.cat([half[i] for half in halves]) for i in range(2))


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v projections, regrouped so that each key-value head follows its own query heads.

    Megatron's ``linear_qkv`` is [G * (N / G + 2) * D, ...]: per key-value head its query heads, its k, its v.
    """

    query_heads: int
    kv_heads: int
    head_size: int

    def to_rank(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        q, k, v = tensors
        rest = q.shape[1:]
        per_group = self.query_heads // self.kv_heads * self.head_size
        joined = torch.cat(
            [
                q.reshape(self.kv_heads, per_group, *rest),
                k.reshape(self.kv_heads, self.head_size, *rest),
                v.reshape(self.kv_heads, self.head_size, *rest),
            ],
            dim=1,
        )
        return joined.chunk(size, 0)[rank].reshape(-1, *rest)

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        joined = torch.cat(list(shards))
        rest = joined.shape[1:]
        per_group = self.query_heads // self.kv_heads * self.head_size
        grouped = joined.reshape(self.kv_heads, per_group + 2 * self.head_size, *rest)
        parts = grouped.split([per_group, self.head_size, self.head_size], dim=1)
        return tuple(part.reshape(-1, *rest) for part in parts)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows of the vocabulary, padded to ``padded`` rows and cut over the ranks.

    Padded rows start at zero, their logits are masked, so they get no gradient and stay zero.
    """

    rows: int
    padded: int

    def to_rank(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        (full,) = tensors
        padding = full.new_zeros(self.padded - self.rows, *full.shape[1:])
        return torch.cat([full, padding]).chunk(size, 0)[rank]

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards))[: self.rows],)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One Megatron parameter (layers counted over the whole model) and the Hugging Face parameters it is made of."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
