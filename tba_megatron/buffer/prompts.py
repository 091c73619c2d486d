"""The prompts of which a shard holds rollouts: numbers for their ids, their tokens, and an order that all shards share.

The order is by ``key``, a hash of the prompt id, so that the prompts of all shards can be counted off as if they lay in
one: by the histogram of the keys' top bits, and then by the keys of one bin. Prompts of which nothing may be drawn are
in no bin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from tba_megatron.buffer.arena import Arena
from tba_megatron.buffer.row_lists import RowLists
from tba_megatron.ragged import Ints
from tba_megatron.types import TokenIds

_BIN_BITS = 12
BINS = 1 << _BIN_BITS
_SHIFT = np.uint64(64 - _BIN_BITS)


class PromptTable:
    """A prompt has a number while the shard holds a rollout of it; arrays are by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids: list[str] = []
        self._free: list[int] = []
        self._tokens = Arena(np.int32)
        self._bins = RowLists(BINS)
        self._capacity = 0
        self.key = np.zeros(0, np.uint64)
        self.trained_visit = np.zeros(0, np.int64)  # the newest visit of which something was trained, -1: none
        self.n_fresh_rows = np.zeros(0, np.int64)  # rollouts of visits after that one
        self.n_drawable_rows = np.zeros(0, np.int64)  # rollouts that a step may draw
        self.length = np.zeros(0, np.int32)  # tokens
        self._address = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Prompts that have a number."""
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        """Prompt ids in the order in which they got their numbers."""
        return iter(self._numbers)

    @property
    def n_drawable(self) -> int:
        """Prompts with a rollout that may be drawn."""
        return int(self._bins.size[:BINS].sum())

    @property
    def n_tokens(self) -> int:
        return self._tokens.live_elements

    def number(self, prompt_id: str) -> int:
        """-1 where the shard holds nothing of it."""
        return self._numbers.get(prompt_id, -1)

    def ids(self, numbers: npt.NDArray[np.integer]) -> tuple[str, ...]:
        return tuple(self._ids[number] for number in numbers.tolist())

    def all_numbers(self) -> Ints:
        """Ascending."""
        return np.array(sorted(self._numbers.values()), np.int64)

    def drawable_numbers(self) -> Ints:
        """Of the prompts with a rollout that may be drawn, ascending."""
        return np.flatnonzero(self.n_drawable_rows > 0)

    def tokens(self, numbers: npt.NDArray[np.integer]) -> list[TokenIds]:
        """Views, valid until the next ``begin``."""
        return self._tokens.rows(self._address[numbers], self.length[numbers])

    def begin(
        self,
        prompt_ids: Sequence[str],
        keys: Sequence[int],
        tokens: TokenIds,
        lengths: npt.NDArray[np.integer],
        trained_visits: npt.NDArray[np.integer] | int = -1,
    ) -> Ints:
        """Numbers for prompts that have none; ``keys`` are of ``prompt_key``, ``tokens`` those of all, end to end.

        Nothing of them may be drawn until ``count_drawable`` says so.
        """
        numbers = np.empty(len(prompt_ids), np.int64)
        for i, prompt_id in enumerate(prompt_ids):
            if not self._free:
                self._free.append(len(self._ids))
                self._ids.append("")
            number = self._free.pop()
            self._ids[number] = prompt_id
            self._numbers[prompt_id] = numbers[i] = number
        self._reach(len(self._ids))
        self.key[numbers] = np.array(keys, np.uint64)
        self.trained_visit[numbers] = trained_visits
        self.n_fresh_rows[numbers], self.n_drawable_rows[numbers] = 0, 0
        self.length[numbers] = lengths
        self._address[numbers] = self._tokens.put(tokens, lengths)
        return numbers

    def count_drawable(self, prompt_of_row: npt.NDArray[np.integer], change: int) -> None:
        """One rollout each of ``prompt_of_row`` may be drawn (``change`` 1), or may be no more (-1)."""
        numbers, n_rows = np.unique(prompt_of_row, return_counts=True)
        before = self.n_drawable_rows[numbers]
        after = before + change * n_rows
        self.n_drawable_rows[numbers] = after
        begun, ended = numbers[before == 0], numbers[after == 0]
        self._bins.append(bins_of(self.key[begun]), begun)
        if len(ended):
            self._bins.remove(bins_of(self.key[ended]), ended)

    def forget(self, numbers: Ints) -> None:
        """Nothing of these is held any more, so nothing of them may be drawn."""
        self._tokens.free(self._address[numbers], self.length[numbers])
        for number in numbers.tolist():
            del self._numbers[self._ids[number]]
            self._ids[number] = ""
        self._free += numbers.tolist()
        self.key[numbers], self.n_fresh_rows[numbers] = 0, 0
        self._compact()

    def histogram(self) -> Ints:
        """[BINS] prompts of which something may be drawn, by the top bits of their key."""
        return self._bins.size[:BINS].copy()

    def in_bins(self, bins: Ints) -> tuple[Ints, npt.NDArray[np.uint64]]:
        """(numbers, keys) of the prompts of those bins of which something may be drawn, by key."""
        numbers, _ = self._bins.gather(bins)
        keys = self.key[numbers]
        order = np.argsort(keys, kind="stable")
        return numbers[order], keys[order]

    def _compact(self) -> None:
        blocks = self._tokens.sparse_blocks()
        if len(blocks):
            numbers = self.all_numbers()
            numbers = numbers[np.isin(Arena.block_of(self._address[numbers]), blocks)]
            self._address[numbers] = self._tokens.move(self._address[numbers], self.length[numbers])

    def _reach(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        more = max(1024, needed - self._capacity, self._capacity // 2)
        for name in ("key", "trained_visit", "n_fresh_rows", "n_drawable_rows", "length", "_address"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        self._capacity += more


def prompt_key(prompt_id: str) -> int:
    """A 64-bit hash that is the same in every process and every run."""
    return xxhash.xxh3_64_intdigest(prompt_id.encode())


def bins_of(keys: npt.NDArray[np.uint64]) -> Ints:
    """The bin of each key in ``PromptTable.histogram``."""
    return (keys >> _SHIFT).astype(np.int64)
