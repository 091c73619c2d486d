"""How one Hugging Face parameter becomes one rank's Megatron parameter, and back.

A layout is pure functions: ``to_rank`` cuts the shard that tensor-parallel rank ``rank`` of ``size`` keeps,
``from_ranks`` joins the shards into the Hugging Face tensors again. ``from_ranks(to_rank(x)) == x`` for every layout.
``placement`` is ``from_ranks`` without new memory, for one shard at a time: which views are to be copied where.
``to_rank`` takes sources, which are tensors or files: it reads the rows and columns that the rank keeps, and no others.
H hidden, V vocabulary, D head size, N query heads, G key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """Something of the shape of a tensor, of which parts can be had. Every torch tensor is one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


Placement = list[tuple[Tensor, Tensor]]
"""(target, source) pairs of views, of one shape each."""


class Layout(Protocol):
    def to_rank(self, sources: Sequence[Source], rank: int, size: int) -> Tensor: ...

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]: ...

    def placement(self, shard: Tensor, targets: Sequence[Tensor], rank: int, size: int) -> Placement:
        """Where the parts of rank's ``shard`` belong in ``targets``, which have Hugging Face's shapes.

        Once those of all ranks are copied, ``targets`` are what ``from_ranks`` gives, and each element was written
        once.
        """
        ...


def _rows(source: Source, start: int, stop: int) -> Tensor:
    return source[(slice(start, stop),)]


def _share(length: int, rank: int, size: int) -> tuple[int, int]:
    """(start, stop) of rank's equal part of ``length``."""
    part = length // size
    return rank * part, (rank + 1) * part


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same tensor on every rank: norms, positions, and biases of row-parallel layers."""

    def to_rank(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        return sources[0][(slice(None),)]

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)

    def placement(self, shard: Tensor, targets: Sequence[Tensor], rank: int, size: int) -> Placement:
        return [(targets[0], shard)] if rank == 0 else []


@dataclass(frozen=True, slots=True)
class Split:
    """Cut along ``dim``: 0 for column-parallel layers, 1 for row-parallel ones.

    ``transposed``: Hugging Face stores the transpose (GPT-2's Conv1D).
    """

    dim: int
    transposed: bool = False

    def to_rank(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        (source,) = sources
        stored_dim = 1 - self.dim if self.transposed else self.dim
        part = slice(*_share(source.shape[stored_dim], rank, size))
        shard = source[(slice(None), part) if stored_dim else (part,)]
        return shard.t() if self.transposed else shard

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        full = torch.cat(list(shards), self.dim)
        return (full.t().contiguous() if self.transposed else full,)

    def placement(self, shard: Tensor, targets: Sequence[Tensor], rank: int, size: int) -> Placement:
        (target,) = targets
        dim = 1 - self.dim if self.transposed else self.dim
        part = shard.shape[self.dim]
        return [(target.narrow(dim, rank * part, part), shard.t() if self.transposed else shard)]


@dataclass(frozen=True, slots=True)
class Gated:
    """Gate and up projections, stacked within each rank's shard of ``linear_fc1``."""

    def to_rank(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        return torch.cat([_rows(s, *_share(s.shape[0], rank, size)) for s in sources])

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2, 0) for shard in shards]
        return tuple(torch.cat([half[i] for half in halves]) for i in range(2))

    def placement(self, shard: Tensor, targets: Sequence[Tensor], rank: int, size: int) -> Placement:
        halves = shard.chunk(2, 0)
        return [
            (_rows(target, *_share(target.shape[0], rank, size)), half)
            for target, half in zip(targets, halves, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v projections, regrouped so that each key-value head follows its own query heads.

    Megatron's ``linear_qkv`` is [G * (N / G + 2) * D, ...]: per key-value head its query heads, its k, its v.
    """

    query_heads: int
    kv_heads: int
    head_size: int

    @property
    def _rows_per_group(self) -> tuple[int, int, int]:
        """Rows of q, k and v that belong to one key-value head."""
        return self.query_heads // self.kv_heads * self.head_size, self.head_size, self.head_size

    def to_rank(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        first, last = _share(self.kv_heads, rank, size)
        parts = [
            _rows(source, first * rows, last * rows).unflatten(0, (last - first, rows))
            for source, rows in zip(sources, self._rows_per_group, strict=True)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        joined = torch.cat(list(shards))
        grouped = joined.unflatten(0, (self.kv_heads, sum(self._rows_per_group)))
        return tuple(part.flatten(0, 1) for part in grouped.split(self._rows_per_group, dim=1))

    def placement(self, shard: Tensor, targets: Sequence[Tensor], rank: int, size: int) -> Placement:
        first, last = _share(self.kv_heads, rank, size)
        grouped = shard.unflatten(0, (last - first, sum(self._rows_per_group)))
        parts = grouped.split(self._rows_per_group, dim=1)
        return [
            (_rows(target, first * rows, last * rows).unflatten(0, (last - first, rows)), part)
            for target, part, rows in zip(targets, parts, self._rows_per_group, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class StackedQkv:
    """q, k and v in one Hugging Face tensor, all of q before all of k before all of v: GPT-2's ``c_attn``.

    ``transposed``: Hugging Face stores [H, 3H] (the Conv1D weight); its bias is not.
    """

    heads: int
    head_size: int
    transposed: bool

    def to_rank(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        (source,) = sources
        width = self.heads * self.head_size
        start, stop = _share(width, rank, size)
        parts = []
        for third in range(3):
            part = slice(third * width + start, third * width + stop)
            parts.append(source[(slice(None), part)].t() if self.transposed else source[(part,)])
        by_head = [part.unflatten(0, (-1, self.head_size)) for part in parts]
        return torch.cat(by_head, dim=1).flatten(0, 1)

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        by_head = torch.cat(list(shards)).unflatten(0, (self.heads, 3 * self.head_size))
        full = torch.cat([part.flatten(0, 1) for part in by_head.chunk(3, dim=1)])
        return (full.t().contiguous() if self.transposed else full,)

    def placement(self, shard: Tensor, targets: Sequence[Tensor], rank: int, size: int) -> Placement:
        (target,) = targets
        first, last = _share(self.heads, rank, size)
        thirds = (target.t() if self.transposed else target).unflatten(0, (3, self.heads, self.head_size))
        by_head = shard.unflatten(0, (last - first, 3, self.head_size))
        return [(thirds[third, first:last], by_head[:, third]) for third in range(3)]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows of the vocabulary, padded to ``padded`` rows and cut over the ranks.

    Padded rows start at zero, their logits are masked, so they get no gradient and stay zero.
    """

    rows: int
    padded: int

    def to_rank(self, sources: Sequence[Source], rank: int, size: int) -> Tensor:
        (source,) = sources
        start, stop = _share(self.padded, rank, size)
        real = _rows(source, min(start, self.rows), min(stop, self.rows))
        padding = real.new_zeros(stop - start - len(real), *real.shape[1:])
        return torch.cat([real, padding])

    def from_ranks(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards))[: self.rows],)

    def placement(self, shard: Tensor, targets: Sequence[Tensor], rank: int, size: int) -> Placement:
        start, stop = (min(row, self.rows) for row in _share(self.padded, rank, size))
        return [(_rows(targets[0], start, stop), shard[: stop - start])] if stop > start else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One Megatron parameter (layers counted over the whole model) and the Hugging Face parameters it is made of."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
