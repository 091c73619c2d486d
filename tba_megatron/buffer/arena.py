"""Ragged rows of numbers end to end in blocks of memory: what a shard keeps of tokens and log-probs.

A row lies whole in one block, and its address is (block << 32 | offset). Blocks whose rows have all left are given
back; ``sparse_blocks`` names those that hold so few that their owner should move the rest.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from tba_megatron.ragged import Ints, offsets

BLOCK_BYTES = 4 << 20
_BLOCK_SHIFT = 32
_OFFSET = (1 << _BLOCK_SHIFT) - 1
_MOST_WASTE = 0.2  # of the live elements, beside two blocks
_SPARE_BLOCKS = 2  # kept for the next rows instead of being given back and asked for again


class Arena:
    """Rows of one dtype. The caller keeps addresses and lengths, and frees each row once."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._block_elements = BLOCK_BYTES // self._dtype.itemsize
        self._blocks: list[npt.NDArray[Any]] = []
        self._live = np.zeros(0, np.int64)  # elements of living rows, by block
        self._filled = np.zeros(0, np.int64)  # elements of all rows that were put, by block
        self._free_numbers: list[int] = []
        self._spare: list[npt.NDArray[Any]] = []
        self._current = -1
        self._used = 0  # elements of the current block
        self.live_elements = 0

    def put(self, flat: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Ints:
        """Copies the rows of ``lengths`` that ``flat`` holds end to end; the address of each."""
        ends = offsets(lengths)
        addresses = np.empty(len(lengths), np.int64)
        done = 0
        while done < len(lengths):
            room = len(self._blocks[self._current]) - self._used if self._current >= 0 else -1
            fit = int(np.searchsorted(ends, ends[done] + room, side="right")) - 1
            if fit <= done:
                self._open_block(int(ends[done + 1] - ends[done]))
                continue
            n = int(ends[fit] - ends[done])
            self._blocks[self._current][self._used : self._used + n] = flat[ends[done] : ends[fit]]
            addresses[done:fit] = (self._current << _BLOCK_SHIFT) + self._used + (ends[done:fit] - ends[done])
            self._live[self._current] += n
            self._filled[self._current] += n
            self.live_elements += n
            self._used += n
            done = fit
        return addresses

    def free(self, addresses: Ints, lengths: npt.NDArray[Any]) -> None:
        blocks = addresses >> _BLOCK_SHIFT
        np.subtract.at(self._live, blocks, lengths)
        self.live_elements -= int(lengths.sum())
        for block in np.unique(blocks).tolist():
            # A row without elements may outlive the block that it was put into.
            if self._live[block] == 0 and block != self._current and len(self._blocks[block]):
                self._close_block(block)

    def rows(self, addresses: Ints, lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Views of the rows, valid until the next ``put`` or ``free``."""
        blocks = self._blocks
        starts = addresses & _OFFSET
        parts = zip((addresses >> _BLOCK_SHIFT).tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
        return [blocks[block][start:end] for block, start, end in parts]

    def gather(self, addresses: Ints, lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows end to end; a copy."""
        return np.concatenate([np.zeros(0, self._dtype), *self.rows(addresses, lengths)])

    def sparse_blocks(self) -> Ints:
        """Blocks to empty, the emptiest first, so that little memory holds dead rows; mostly none."""
        waste = int(self._filled.sum()) - self.live_elements - 2 * self._block_elements
        if waste <= _MOST_WASTE * self.live_elements:
            return np.zeros(0, np.int64)
        dead = self._filled - self._live
        dead[self._current] = 0
        order = np.argsort(-dead, kind="stable")
        enough = int(np.searchsorted(np.cumsum(dead[order]), waste / 2)) + 1
        return order[:enough][dead[order[:enough]] > 0]

    def move(self, addresses: Ints, lengths: npt.NDArray[Any]) -> Ints:
        """Copies rows to the current end and frees them where they were; their addresses."""
        flat = self.gather(addresses, lengths)
        self.free(addresses, lengths)
        return self.put(flat, lengths)

    @staticmethod
    def block_of(addresses: Ints) -> Ints:
        return addresses >> _BLOCK_SHIFT

    def _open_block(self, at_least: int) -> None:
        """A new current block; the last one stays as it is, or is given back when nothing in it lives."""
        last = self._current
        if at_least <= self._block_elements:
            block = self._spare.pop() if self._spare else self._new_block(self._block_elements)
        else:
            block = self._new_block(at_least)
        if self._free_numbers:
            self._current = self._free_numbers.pop()
            self._blocks[self._current] = block
        else:
            self._current = len(self._blocks)
            self._blocks.append(block)
        if self._current >= len(self._live):
            more = np.zeros(max(64, len(self._live)), np.int64)
            self._live, self._filled = np.concatenate([self._live, more]), np.concatenate([self._filled, more])
        self._used = 0
        if last >= 0 and self._live[last] == 0:
            self._close_block(last)

    def _new_block(self, elements: int) -> npt.NDArray[Any]:
        """Memory that the kernel has made ready: one call costs less than a page fault for each page."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(-1, elements * self._dtype.itemsize, flags=flags), self._dtype)

    def _close_block(self, number: int) -> None:
        block = self._blocks[number]
        self._filled[number] = 0
        if len(block) == self._block_elements and len(self._spare) < _SPARE_BLOCKS:
            self._spare.append(block)
        self._blocks[number] = np.zeros(0, self._dtype)
        self._free_numbers.append(number)
