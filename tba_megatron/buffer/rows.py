"""The columns of a shard: one number a rollout in each, indexed by row number, without a Python object a rollout."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tba_megatron.ragged import Ints
from tba_megatron.types import FOREIGN_ATTEMPT, PolicyVersion

_STEP_BITS = 40
MOST_STEP, MOST_ATTEMPT = 1 << _STEP_BITS, 2 * FOREIGN_ATTEMPT  # beyond them a version has no code
FIRST_FOREIGN = FOREIGN_ATTEMPT << _STEP_BITS  # codes from here on are those of foreign versions
_Codes = TypeVar("_Codes", int, Ints)
_DTYPES: dict[str, npt.DTypeLike] = {
    "prompt": np.int32,
    "version": np.int64,
    "arrival": np.int64,
    "visit": np.int64,
    "searcher": np.int32,
    "sequence": np.int64,
    "source": np.int32,
    "reward": np.float64,
    "stop_reason": np.int8,
    "content": np.uint64,
    "copies": np.int32,
    "uses": np.int32,
    "reference": np.float64,
    "reference_version": np.int64,
    "length": np.int32,
    "tokens_at": np.int64,
    "behaviour_length": np.int32,
    "behaviour_at": np.int64,
    "span_count": np.int32,
    "spans_at": np.int64,
    "segment": np.int32,
    "version_list": np.int32,
}
NAMES = tuple(_DTYPES)


def version_code(version: PolicyVersion) -> int:
    """A version as one number that sorts as versions do."""
    return version.attempt << _STEP_BITS | version.step


def version_of(code: int) -> PolicyVersion:
    return PolicyVersion(code >> _STEP_BITS, code & ((1 << _STEP_BITS) - 1))


def version_codes(attempt_step: npt.NDArray[np.int64]) -> Ints:
    """Of an array [..., 2]."""
    return (attempt_step[..., 0] << _STEP_BITS) | attempt_step[..., 1]


def attempts_and_steps(codes: Ints) -> tuple[Ints, Ints]:
    return codes >> _STEP_BITS, codes & ((1 << _STEP_BITS) - 1)


def turns(codes: _Codes) -> _Codes:
    """Numbers that sort versions as their rollouts leave a shard: by era, the trainer's own before foreign ones."""
    return (codes % FIRST_FOREIGN) << 1 | (codes >= FIRST_FOREIGN)


def precedences(codes: _Codes) -> _Codes:
    """Numbers of which the larger one holds a completion that several versions wrote: own ones before foreign ones,
    which are never recent, and then the newer one.
    """
    return codes ^ FIRST_FOREIGN


class NameTable(list[str]):
    """Names that columns refer to by their number, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Of ``name``, which is put at the end when it is new."""
        number = self._numbers.setdefault(name, len(self))
        if number == len(self):
            self.append(name)
        return number


class RowColumns:
    """Addresses (``*_at``) are those of the arenas that the shard keeps beside; ``length`` is in elements."""

    prompt: npt.NDArray[np.int32]  # number in the prompt table; -1: the row is free
    version: npt.NDArray[np.int64]  # the newest policy that wrote a part of it, as a ``version_code``
    arrival: npt.NDArray[np.int64]  # order of arrival in the shard
    visit: npt.NDArray[np.int64]  # the arrival of the first rollout of its group
    searcher: npt.NDArray[np.int32]  # in the shard's table of names
    sequence: npt.NDArray[np.int64]
    source: npt.NDArray[np.int32]  # in the shard's table of names
    reward: npt.NDArray[np.float64]
    stop_reason: npt.NDArray[np.int8]
    content: npt.NDArray[np.uint64]  # hash of prompt and tokens
    copies: npt.NDArray[np.int32]  # how often ``version`` generated this completion
    uses: npt.NDArray[np.int32]  # optimizer steps that it was part of
    reference: npt.NDArray[np.float64]  # nats, NaN: not known
    reference_version: npt.NDArray[np.int64]
    length: npt.NDArray[np.int32]  # tokens
    tokens_at: npt.NDArray[np.int64]
    behaviour_length: npt.NDArray[np.int32]  # -1: none
    behaviour_at: npt.NDArray[np.int64]
    span_count: npt.NDArray[np.int32]  # 1: the span is the whole completion, and is stored nowhere else
    spans_at: npt.NDArray[np.int64]
    segment: npt.NDArray[np.int32]  # of the log, -1: in none
    version_list: npt.NDArray[np.int32]  # the list of rows of its version

    def __init__(self) -> None:
        self._capacity = 0
        self._next = 0  # rows from here on were never given out
        self._free: list[Ints] = []
        for name, dtype in _DTYPES.items():
            setattr(self, name, np.zeros(0, dtype))

    def allocate(self, n: int) -> Ints:
        """``n`` free rows, whose columns hold anything."""
        parts = []
        while n and self._free:
            free = self._free.pop()
            parts.append(free[:n])
            if len(free) > n:
                self._free.append(free[n:])
            n -= len(parts[-1])
        if n:
            self._reach(self._next + n)
            parts.append(np.arange(self._next, self._next + n))
            self._next += n
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def release(self, rows: Ints) -> None:
        self.prompt[rows] = -1
        self._free.append(rows)

    def living(self) -> Ints:
        """All rows that are in use, ascending."""
        return np.flatnonzero(self.prompt[: self._next] >= 0)

    def _reach(self, needed: int) -> None:
        if needed <= self._capacity:
            return
        capacity = max(1024, needed, self._capacity + self._capacity // 2)
        for name, dtype in _DTYPES.items():
            column = np.zeros(capacity, dtype)
            column[: self._capacity] = getattr(self, name)
            setattr(self, name, column)
        self._capacity = capacity
