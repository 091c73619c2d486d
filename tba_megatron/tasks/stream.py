"""What sources of prompts share: an endless order, a split by hash, a demonstration in tokens."""

from __future__ import annotations

import hashlib

import numpy as np

from tba_megatron.tasks.base import Demonstration
from tba_megatron.types import Tokenizer


class EpochOrder:
    """Item ``i`` of 0, 1, ... of an endless order in which each epoch of ``n`` holds every one of 0..n-1 once.

    A pure function of the seed and ``i``, so a run that resumes needs nothing but its position.
    """

    def __init__(self, n: int, seed: int) -> None:
        self._n, self._seed = n, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __getitem__(self, i: int) -> int:
        epoch, place = divmod(i, self._n)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._n)
        return int(self._order[place])


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def demonstrate(tokenizer: Tokenizer, prompt: str, completion: str) -> Demonstration:
    """Both texts in tokens, the completion with EOS at its end."""
    eos = np.array(tokenizer.eos_ids[:1], np.int32)
    return tokenizer.encode(prompt), np.concatenate([tokenizer.encode(completion), eos])
