"""Many growing lists of row numbers in one array: the indices of a shard.

A list keeps the order in which rows were appended. Each list has a region of a power of two of slots; a removed row
leaves a hole, and a list is written anew when it is full. A row is in at most one list of a ``RowLists``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tba_megatron.ragged import Ints, ranges

_HOLE = -1
_SMALLEST = 4  # slots
_SPARSE = 8  # a list that fills so small a part of its region gets a smaller one


class RowLists:
    """Lists are numbered from 0 and empty at first. ``size`` counts the rows of those that were ever used, and of the
    first ``n_lists``.
    """

    def __init__(self, n_lists: int = 64) -> None:
        self._slots = np.full(1024, _HOLE, np.int32)
        self._tail = 0  # slots from here on were never part of a region
        self._free: dict[int, list[int]] = {}  # starts of free regions, by capacity
        self._slot_of_row = np.zeros(1024, np.int64)
        self._start, self._filled, self._head = (np.zeros(n_lists, np.int64) for _ in range(3))
        self._capacity, self.size = (np.zeros(n_lists, np.int64) for _ in range(2))

    def append(self, lists: npt.NDArray[np.integer], rows: npt.NDArray[np.integer]) -> None:
        """``rows[i]`` to the list ``lists[i]``, in this order."""
        if not len(rows):
            return
        self._reach(int(lists.max()), int(rows.max()))
        first = np.flatnonzero(np.diff(lists, prepend=-1))
        numbers, counts = lists[first], np.diff(first, append=len(lists))
        if len(set(numbers.tolist())) < len(numbers):  # rows of one list do not lie together
            numbers, counts = np.unique(lists, return_counts=True)
            rows = rows[np.argsort(lists, kind="stable")]
        full = self._filled[numbers] + counts > self._capacity[numbers]
        self._make_room(numbers[full], counts[full])
        slots = ranges(self._start[numbers] + self._filled[numbers], counts)
        self._slots[slots] = rows
        self._slot_of_row[rows] = slots
        self._filled[numbers] += counts
        self.size[numbers] += counts

    def remove(self, lists: npt.NDArray[np.integer], rows: npt.NDArray[np.integer]) -> None:
        """``rows[i]`` from the list ``lists[i]``, which holds it. An empty list gives its region back."""
        self._slots[self._slot_of_row[rows]] = _HOLE
        np.subtract.at(self.size, lists, 1)
        touched = np.unique(lists)
        empty = touched[self.size[touched] == 0]
        for capacity in np.unique(self._capacity[empty]).tolist():
            starts = self._start[empty[self._capacity[empty] == capacity]]
            self._free.setdefault(capacity, []).extend(starts.tolist())
        for column in (self._start, self._filled, self._head, self._capacity):
            column[empty] = 0
        sparse = _SPARSE * self.size[touched] <= self._capacity[touched]
        for number in touched[sparse & (self._capacity[touched] > _SPARSE * _SMALLEST)].tolist():
            self._rewrite(number, 0)

    def gather(self, lists: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
        """(rows of each list, end to end and in order; how many each has)."""
        if len(lists) and int(np.max(lists)) >= len(self.size):
            self._reach(int(np.max(lists)), 0)
        head = self._head[lists]
        rows = self._slots[ranges(self._start[lists] + head, self._filled[lists] - head)]
        sizes = self.size[lists]
        if len(rows) != sizes.sum():
            rows = rows[rows != _HOLE]
        return rows.astype(np.int64), sizes

    def first(self, number: int, n: int) -> Ints:
        """The first ``n`` rows of a list, or all of them."""
        start, filled, head = int(self._start[number]), int(self._filled[number]), int(self._head[number])
        region = self._slots[start : start + filled]
        while head < filled and region[head] == _HOLE:  # what was removed from the front is passed over once
            step = region[head : head + 4096]
            alive = np.flatnonzero(step != _HOLE)
            head += int(alive[0]) if len(alive) else len(step)
        self._head[number] = head
        wanted, width = min(n, int(self.size[number])), n
        while True:
            part = region[head : head + width]
            rows = part[part != _HOLE]
            if len(rows) >= wanted:
                return rows[:wanted].astype(np.int64)
            width *= 2

    def _reach(self, last_list: int, last_row: int) -> None:
        if last_list >= len(self.size):
            more = max(last_list + 1 - len(self.size), len(self.size))
            for name in ("_start", "_filled", "_head", "_capacity", "size"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, np.int64)]))
        if last_row >= len(self._slot_of_row):
            more = max(last_row + 1 - len(self._slot_of_row), len(self._slot_of_row) // 2)
            self._slot_of_row = np.concatenate([self._slot_of_row, np.zeros(more, np.int64)])

    def _make_room(self, numbers: npt.NDArray[np.integer], counts: Ints) -> None:
        new = self._capacity[numbers] == 0
        self._begin(numbers[new], counts[new])
        for number, count in zip(numbers[~new].tolist(), counts[~new].tolist(), strict=True):
            self._rewrite(number, count)

    def _rewrite(self, number: int, count: int) -> None:
        """Without its holes, and with room for ``count`` more; into another region where its own is too small, or much
        too large.
        """
        start, capacity = int(self._start[number]), int(self._capacity[number])
        rows = self._slots[start : start + self._filled[number]]
        rows = rows[rows != _HOLE]
        needed = len(rows) + count
        if 4 * needed > 3 * capacity or _SPARSE * needed <= capacity:
            room = int(_powers_of_two(np.array([needed + needed // 4]))[0])
            target = self._take(room, 1)[0]
            self._release(start, capacity)
            self._start[number], self._capacity[number] = target, room
        target = int(self._start[number])
        self._slots[target : target + len(rows)] = rows
        self._slot_of_row[rows] = np.arange(target, target + len(rows))
        self._filled[number], self._head[number] = len(rows), 0

    def _begin(self, numbers: npt.NDArray[np.integer], counts: Ints) -> None:
        """Regions for lists that have none."""
        if not len(numbers):
            return
        capacities = _powers_of_two(counts)
        for capacity in np.unique(capacities).tolist():
            chosen = numbers[capacities == capacity]
            self._start[chosen] = self._take(capacity, len(chosen))
            self._capacity[chosen] = capacity

    def _take(self, capacity: int, n: int) -> list[int]:
        """Starts of ``n`` regions."""
        free = self._free.get(capacity, [])
        n_free = min(n, len(free))
        taken = free[len(free) - n_free :]
        del free[len(free) - n_free :]
        fresh = n - n_free
        end = self._tail + fresh * capacity
        if end > len(self._slots):
            more = max(end - len(self._slots), len(self._slots) // 2)
            self._slots = np.concatenate([self._slots, np.full(more, _HOLE, np.int32)])
        taken += range(self._tail, end, capacity)
        self._tail = end
        return taken

    def _release(self, start: int, capacity: int) -> None:
        self._free.setdefault(capacity, []).append(start)


def _powers_of_two(at_least: Ints) -> Ints:
    return 1 << np.ceil(np.log2(np.maximum(at_least, _SMALLEST))).astype(np.int64)
