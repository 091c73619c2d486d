"""Lists of different lengths that lie end to end in one flat array, beside an array of their lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def offsets(lengths: npt.NDArray[Any]) -> Ints:
    """Where each of consecutive parts begins, and where the last ends: one number more than there are parts."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def owners(lengths: npt.NDArray[Any]) -> Ints:
    """For each element the number of the part that it belongs to."""
    return np.repeat(np.arange(len(lengths)), lengths)


def ranges(starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Ints:
    """starts[0], starts[0] + 1, ... for each length, end to end."""
    ends = offsets(lengths)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(np.asarray(starts, np.int64) - ends[:-1], lengths)


def split(flat: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Consecutive parts of ``flat`` as views."""
    ends = offsets(lengths).tolist()
    return [flat[start:end] for start, end in pairwise(ends)]


def take(flat: npt.NDArray[Any], lengths: npt.NDArray[Any], parts: Ints) -> npt.NDArray[Any]:
    """The parts of ``flat`` with the numbers ``parts``, end to end."""
    return flat[ranges(offsets(lengths)[:-1][parts], lengths[parts])]


def keep(flat: npt.NDArray[Any], lengths: Ints, kept: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[Any], Ints]:
    """(flat, lengths) of the elements ``kept`` alone."""
    return flat[kept], np.bincount(owners(lengths)[kept], minlength=len(lengths))
