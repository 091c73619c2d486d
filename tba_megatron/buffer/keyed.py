"""Random numbers that are named, not drawn in turn: noise is a function of a seed and of what it is for.

A shard that knows the seed and a rollout knows the rollout's noise, so a draw depends neither on the order of rows nor
on how prompts are dealt to shards. The hash is the generator SplitMix64 (Steele, Lea, Flood 2014), stepped by a value
instead of by 1: one stage for each value, so that equal stages of different hashes are unrelated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint64] | npt.NDArray[np.signedinteger] | int

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_WORD = (1 << 64) - 1


def hashed(seed: int, *values: Values) -> Hashes:
    """Hashes of (seed, values), one for each element; values are integers that broadcast, taken modulo 2^64."""
    return absorb(np.zeros(1, np.uint64), seed & _WORD, *values)


def absorb(hashes: Hashes, *values: Values) -> Hashes:
    """``hashed(seed, a, b)`` is ``absorb(hashed(seed, a), b)``."""
    for value in values:
        hashes = _mixed(hashes + _STEP * (np.atleast_1d(np.asarray(value)).astype(np.uint64) + np.uint64(1)))
    return hashes


def uniform(hashes: Hashes) -> npt.NDArray[np.float64]:
    """In the open interval (0, 1): midpoints of 2^52 equal steps, so that neither end comes out of rounding."""
    return ((hashes >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(hashes: Hashes) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise, between -3.7 and 36.8; grows with the hash."""
    return -np.log(-np.log(uniform(hashes)))


def _mixed(words: Hashes) -> Hashes:
    """The finaliser of SplitMix64; overwrites ``words``."""
    words ^= words >> _SHIFTS[0]
    words *= _FACTOR_1
    words ^= words >> _SHIFTS[1]
    words *= _FACTOR_2
    words ^= words >> _SHIFTS[2]
    return words
