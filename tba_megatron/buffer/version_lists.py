"""The rows of each version that a shard holds, so that the recent and the oldest ones are found without looking at all.

A version's list has a number, kept in the column ``version_list``; numbers of versions that are gone are given again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import merge

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.row_lists import RowLists
from tba_megatron.buffer.rows import FIRST_FOREIGN, RowColumns, turns, version_code, version_of
from tba_megatron.ragged import Ints
from tba_megatron.types import PolicyHistory, PolicyVersion


class VersionLists:
    """Indexes ``rows`` by their column ``version``."""

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        self._lists = RowLists()
        self._numbers: dict[int, int] = {}  # version code -> its list
        self._free: list[int] = []
        self._codes: list[int] = []  # of the held versions, ascending

    def append(self, rows: Ints) -> None:
        """Rows that are in no list, in this order."""
        r = self._rows
        starts = runs(r.version[rows])
        numbers = np.array([self._number(code) for code in r.version[rows[starts]].tolist()], np.int32)
        r.version_list[rows] = np.repeat(numbers, np.diff(starts, append=len(rows)))
        self._lists.append(r.version_list[rows], rows)

    def remove(self, rows: Ints) -> None:
        self._lists.remove(self._rows.version_list[rows], rows)
        for code in np.unique(self._rows.version[rows]).tolist():
            if self._lists.size[self._numbers[code]] == 0:
                self._free.append(self._numbers.pop(code))
                self._codes.remove(code)

    def recent(self, history: PolicyHistory, step: int, recent_age_steps: int, *, foreign: bool = False) -> Ints:
        """Rows whose newest policy is on the history and at most ``recent_age_steps`` old, by version and arrival.

        With ``foreign``: the rows of another policy whose era is so. A step that is still to come has no rollouts: what
        says so is never recent.
        """
        found: list[int] = []
        for attempt in range(history.attempt + 1):
            ends = (PolicyVersion(attempt, max(0, step - recent_age_steps)), PolicyVersion(attempt, step))
            oldest, newest = (version_code(end.as_foreign() if foreign else end) for end in ends)
            codes = self._codes[bisect_left(self._codes, oldest) : bisect_right(self._codes, newest)]
            found += [self._numbers[code] for code in codes if history.holds(version_of(code).era)]
        return self._lists.gather(np.array(found, np.int64))[0]

    def oldest(self, n: int) -> Ints:
        """The ``n`` rows that are to leave first, or all, by ``turns`` and then arrival; at least one is held."""
        parts: list[Ints] = []
        own = bisect_left(self._codes, FIRST_FOREIGN)
        for code in merge(self._codes[:own], self._codes[own:], key=turns):
            parts.append(self._lists.first(self._numbers[code], n))
            n -= len(parts[-1])
            if n <= 0:
                break
        return np.concatenate(parts)

    def _number(self, code: int) -> int:
        if code not in self._numbers:
            self._numbers[code] = self._free.pop() if self._free else len(self._numbers)
            insort(self._codes, code)
        return self._numbers[code]


def runs(values: npt.NDArray[np.integer]) -> Ints:
    """Where each run of equal values begins."""
    return np.flatnonzero(np.concatenate([np.ones(min(1, len(values)), np.bool_), values[1:] != values[:-1]]))
