"""Which prompts a step trains on: the same ones however prompts are dealt to shards.

Two ways to choose without moving rollouts: each shard offers its best prompts and all merge the offers (``merge``), or
ranks in the order of all prompts by key are looked up (``by_rank``): from the shards' histograms of keys follows the
bin of each rank, and only the keys of those bins are gathered, so that a choice costs the same from a thousand prompts
and from a million. Prompts of equal keys (a collision of 64-bit hashes) are told apart by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer import keyed
from tba_megatron.buffer.prompts import bins_of
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.ragged import Ints, owners, ranges

Keys = npt.NDArray[np.uint64]
_TIES = 3  # what noise is for


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """All shards of a run as one of them sees them.

    ``gather`` is collective: it takes a small picklable value of each shard, and gives every shard the values of all
    in the order of shards. ``index`` is the place of this shard's own value in it.
    """

    index: int
    gather: Callable[[Any], list[Any]]


def alone() -> Shards:
    """The only shard."""
    return Shards(index=0, gather=lambda value: [value])


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """This shard's part of a choice, G prompts."""

    prompts: Ints  # [G] numbers in its prompt table
    places: Ints  # [G] in the choice over all shards, ascending
    rounds: Ints  # [G] how often all prompts were chosen before, where a step needs more than there are

    @staticmethod
    def in_one_round(prompts: Ints, places: Ints) -> Chosen:
        return Chosen(prompts=prompts, places=places, rounds=np.zeros(len(prompts), np.int64))

    def then(self, other: Chosen) -> Chosen:
        return Chosen(
            prompts=np.concatenate([self.prompts, other.prompts]),
            places=np.concatenate([self.places, other.places]),
            rounds=np.concatenate([self.rounds, other.rounds]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Prompts of one shard, the smallest (first, tie) in front."""

    first: npt.NDArray[Any]
    tie: Keys
    key: Keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The best of all offers, in order: whose they are, which of the offer's prompts, and their keys."""

    owner: Ints
    index: Ints
    keys: Keys

    def of_shard(self, shard_index: int) -> tuple[npt.NDArray[np.intp], Ints]:
        """(places in this order, indices into its offer) of what one shard offered."""
        places = np.flatnonzero(self.owner == shard_index)
        return places, self.index[places]


def tie_breaks(seed: int, keys: Keys) -> Keys:
    """An order of prompts that is another one with each seed."""
    return keyed.hashed(seed, _TIES, keys)


def first_n(n: int, first: npt.NDArray[Any], tie: Keys) -> npt.NDArray[np.intp]:
    """Indices of the ``n`` smallest (first, tie), or of all, in order."""
    indices = np.arange(len(first))
    if n < len(first):
        bound = np.partition(first, n)[n]
        below, equal = np.flatnonzero(first < bound), np.flatnonzero(first == bound)
        n_equal = n - len(below)
        if n_equal < len(equal):
            equal = equal[np.argpartition(tie[equal], n_equal)[:n_equal]]
        indices = np.concatenate([below, equal])
    return indices[np.lexsort((tie[indices], first[indices]))]


def merge(offers: Sequence[Offer], n: int) -> Merged:
    """The ``n`` smallest (first, tie) over all offers."""
    first, tie, key = (np.concatenate([getattr(offer, name) for offer in offers]) for name in ("first", "tie", "key"))
    owner, index = _origins([len(offer.key) for offer in offers])
    order = np.lexsort((index, owner, tie, first))[:n]
    return Merged(owner=owner[order], index=index[order], keys=key[order])


def uniform_rounds(
    shard: ReplayShard,
    shards: Shards,
    *,
    histogram: Ints,
    histogram_of_all: Ints,
    taken: Ints,
    n_taken: int,
    n_prompts: int,
    rng: np.random.Generator,
) -> Chosen:
    """Fills a choice of which ``n_taken`` prompts are made up to ``n_prompts``; collective.

    Distinct prompts that are not taken, each with equal probability; where there are too few, whole rounds over all
    prompts and then a part of one. Histograms [BINS] count the prompts of all shards, the first without those that are
    taken; ``taken`` are this shard's own, by number.
    """
    n_free, total = int(histogram.sum()), int(histogram_of_all.sum())
    n_now = min(n_prompts - n_taken, n_free)
    ranks = np.sort(rng.choice(n_free, n_now, replace=False, shuffle=False))
    repeated = n_prompts - n_taken - n_now
    if repeated == 0 and n_now == 0:
        return Chosen.in_one_round(taken[:0], taken[:0])
    prompts, which = by_rank(shard, shards, histogram, ranks, taken)
    chosen = Chosen.in_one_round(prompts, n_taken + which)
    if repeated:
        whole, part = divmod(repeated, total)
        last = np.sort(rng.choice(total, part, replace=False, shuffle=False))
        ranks = np.concatenate([np.tile(np.arange(total), whole), last])
        prompts, which = by_rank(shard, shards, histogram_of_all, ranks, taken[:0])
        places = n_taken + n_now + which
        chosen = chosen.then(Chosen(prompts=prompts, places=places, rounds=1 + which // total))
    return chosen


def by_rank(
    shard: ReplayShard, shards: Shards, histogram: Ints, ranks: Ints, taken: Ints
) -> tuple[Ints, npt.NDArray[np.intp]]:
    """(numbers, which of ``ranks``) of this shard's prompts among those of these ranks over all shards; collective.

    Ranks count the prompts that are not ``taken``: numbers of this shard's own, while ``histogram`` [BINS] counts what
    is not taken on any shard.
    """
    ends = np.cumsum(histogram)
    bins = np.searchsorted(ends, ranks, side="right")
    numbers, keys = shard.prompts.in_bins(np.unique(bins))
    if len(taken):
        free = ~np.isin(numbers, taken)
        numbers, keys = numbers[free], keys[free]
    keys_of_shards: list[Keys] = shards.gather(keys)
    everyone = np.concatenate(keys_of_shards)
    owner, place = _origins([len(keys) for keys in keys_of_shards])
    order = np.lexsort((place, owner, everyone))
    starts = np.searchsorted(bins_of(everyone[order]), bins)
    found = order[starts + (ranks - (ends - histogram)[bins])]
    mine = np.flatnonzero(owner[found] == shards.index)
    return numbers[place[found[mine]]], mine


def _origins(sizes: Sequence[int]) -> tuple[Ints, Ints]:
    """(part, index in it) of each element of parts that lie end to end."""
    lengths = np.array(sizes, np.int64)
    return owners(lengths), ranges(np.zeros(len(sizes), np.int64), lengths)
