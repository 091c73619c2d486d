"""Which row holds a completion: a hash table over row numbers, asked for a whole batch at a time.

Open addressing with double hashing. A hash only says where to look: two completions are the same when the caller's
``same`` says so, whatever their hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from tba_megatron.ragged import Ints

Hashes = npt.NDArray[np.uint64]
Same = Callable[[Ints, Ints], npt.NDArray[np.bool_]]

_EMPTY, _REMOVED = -1, -2
_FULLEST = 0.6  # of the slots, removed ones included


# (bytes of the tokens, prompt key) -> 64 bits that completions of one prompt share only when equal, but for collisions.
content_hash: Callable[[memoryview, int], int] = xxhash.xxh3_64_intdigest


def content_hashes(tokens: memoryview, starts: Iterable[int], ends: Iterable[int], keys: Iterable[int]) -> Hashes:
    """The hash of each completion, which are the bytes ``starts`` to ``ends`` of ``tokens``."""
    completions = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
    return np.array(list(map(content_hash, completions, keys)), np.uint64)


class ContentIndex:
    """Rows by the hash of their content. A row is inserted once and removed before it is inserted again."""

    def __init__(self) -> None:
        self._clear(1024)

    def _clear(self, slots: int) -> None:
        self._rows = np.full(slots, _EMPTY, np.int32)
        self._hashes = np.zeros(slots, np.uint64)
        self._mask = np.uint64(slots - 1)
        self._taken = 0  # slots that are not empty
        self._held = 0

    def find(self, hashes: Hashes, same: Same) -> Ints:
        """The row of each content, or -1. ``same(i, rows)`` tells whether content i[j] is that of rows[j]."""
        found = np.full(len(hashes), -1, np.int64)
        pending = np.arange(len(hashes))
        slots, strides = self._home(hashes)
        while len(pending):
            rows = self._rows[slots]
            candidates = np.flatnonzero((rows >= 0) & (self._hashes[slots] == hashes[pending]))
            ends = rows == _EMPTY
            if len(candidates):
                right = candidates[same(pending[candidates], rows[candidates].astype(np.int64))]
                found[pending[right]] = rows[right]
                ends[right] = True
            pending, strides = pending[~ends], strides[~ends]
            slots = self._next(slots[~ends], strides)
        return found

    def insert(self, hashes: Hashes, rows: Ints) -> None:
        if self._taken + len(rows) > _FULLEST * len(self._rows):
            self._rebuild(len(rows))
        self._held += len(rows)
        slots, strides = self._home(hashes)
        while len(rows):
            free = self._rows[slots] == _EMPTY
            self._rows[slots[free]] = rows[free]
            # Where two wanted one slot, the last has it.
            placed = free & (self._rows[slots] == rows)
            self._hashes[slots[placed]] = hashes[placed]
            self._taken += int(np.count_nonzero(placed))
            rows, hashes, strides = rows[~placed], hashes[~placed], strides[~placed]
            slots = self._next(slots[~placed], strides)

    def remove(self, hashes: Hashes, rows: Ints) -> None:
        """KeyError when one of them is not there."""
        self._held -= len(rows)
        slots, strides = self._home(hashes)
        while len(rows):
            here = self._rows[slots]
            if (here == _EMPTY).any():
                raise KeyError(f"row {int(rows[here == _EMPTY][0])} is not in the index")
            hit = here == rows
            self._rows[slots[hit]] = _REMOVED
            rows, strides = rows[~hit], strides[~hit]
            slots = self._next(slots[~hit], strides)

    def _home(self, hashes: Hashes) -> tuple[Ints, Ints]:
        """(the first slot to look at, how far it is to the next: odd, so that all slots are reached)."""
        return (hashes & self._mask).astype(np.int64), (hashes >> np.uint64(40)).astype(np.int64) | 1

    def _next(self, slots: Ints, strides: Ints) -> Ints:
        return (slots + strides) & int(self._mask)

    def _rebuild(self, more: int) -> None:
        """Without the removed ones, and at most half full."""
        alive = self._rows >= 0
        rows, hashes = self._rows[alive].astype(np.int64), self._hashes[alive]
        self._clear(1 << max(10, (2 * (len(rows) + more) - 1).bit_length()))
        self.insert(hashes, rows)
