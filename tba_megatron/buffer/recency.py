"""The recent part of a shard: its rollouts by policies that are young enough, and the prompts they answer.

Whether a rollout is recent follows from the version that wrote it and the history of the run; nothing that ages is
stored, so duplicates, evictions and late messages cannot make it wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.choice import Offer, first_n, tie_breaks
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.ragged import Ints
from tba_megatron.types import PolicyHistory

_NOT_FRESH = np.iinfo(np.int64).max  # behind every version


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentPart:
    """N recent rows of P prompts, all of which may be drawn."""

    rows: Ints  # [N]
    prompt_of_row: Ints  # [N] index into ``prompts``
    prompts: Ints  # [P] numbers, ascending
    urgency: Ints  # [P] of fresh prompts the smallest version of an untrained recent rollout; the sooner too old

    def offer(self, shard: ReplayShard, n: int, seed: int) -> tuple[Ints, Offer]:
        """(indices into ``prompts``, the offer) of the ``n`` most urgent: fresh ones by version, then others."""
        keys = shard.prompts.key[self.prompts]
        ties = tie_breaks(seed, keys)
        best = first_n(n, self.urgency, ties)
        return best, Offer(first=self.urgency[best], tie=ties[best], key=keys[best])

    def pools(self, shard: ReplayShard, prompts: Ints) -> tuple[Ints, Ints]:
        """(rows, sizes) of the recent rows of prompts given by distinct indices, in order of arrival."""
        position = np.full(len(self.prompts), -1, np.int64)
        position[prompts] = np.arange(len(prompts))
        position_of_row = position[self.prompt_of_row]
        wanted = position_of_row >= 0
        rows, group = self.rows[wanted], position_of_row[wanted]
        return rows[np.lexsort((shard.rows.arrival[rows], group))], np.bincount(group, minlength=len(prompts))


def recent_part(shard: ReplayShard, history: PolicyHistory, step: int, recent_age_steps: int) -> RecentPart:
    rows = shard.recent_rows(history, step, recent_age_steps)
    columns, table = shard.rows, shard.prompts
    number = columns.prompt[rows]
    prompts, prompt_of_row = _distinct(number, len(table.key))
    urgency = np.full(len(prompts), _NOT_FRESH)
    untrained = columns.uses[rows] == 0
    np.minimum.at(urgency, prompt_of_row[untrained], columns.version[rows[untrained]])
    fresh = np.zeros(len(prompts), np.bool_)
    fresh[prompt_of_row[shard.is_fresh(rows)]] = True
    urgency[~fresh] = _NOT_FRESH
    return RecentPart(rows=rows, prompt_of_row=prompt_of_row, prompts=prompts, urgency=urgency)


def nothing_recent() -> RecentPart:
    """For a step that wants nothing recent, so that nobody looks for it."""
    none = np.zeros(0, np.int64)
    return RecentPart(rows=none, prompt_of_row=none, prompts=none, urgency=none)


def _distinct(numbers: npt.NDArray[np.integer], n_numbers: int) -> tuple[Ints, Ints]:
    """(the distinct numbers, ascending; where each number is among them). All are below ``n_numbers``."""
    if 8 * len(numbers) < n_numbers:  # a sort of few is cheaper than a table of all
        distinct, where = np.unique(numbers, return_inverse=True)
        return distinct.astype(np.int64), where
    present = np.zeros(n_numbers, np.bool_)
    present[numbers] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[numbers]
