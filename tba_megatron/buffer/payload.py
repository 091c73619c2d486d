"""The ragged part of a shard's rows: tokens, behaviour log-probs and policy spans, in arenas beside the columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.arena import Arena
from tba_megatron.buffer.rows import RowColumns, attempts_and_steps
from tba_megatron.ragged import Ints, offsets, ranges, take
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.types import TokenIds


class Payload:
    """Where ``rows.*_at`` point. Lengths and versions are columns of ``rows``, set before ``put``.

    A single span is the whole completion, so it is not stored.
    """

    def __init__(self, rows: RowColumns) -> None:
        self._rows = rows
        self._tokens, self._behaviour, self._spans = Arena(np.int32), Arena(np.float32), Arena(np.int64)

    @property
    def n_elements(self) -> int:
        """Tokens and behaviour log-probs."""
        return self._tokens.live_elements + self._behaviour.live_elements

    def put(self, rows: Ints, batch: RolloutBatch, s: Ints) -> None:
        """Stores that of the rollouts ``s`` of ``batch`` as that of ``rows``."""
        r, everything = self._rows, len(s) == batch.n_rollouts and bool((s[1:] > s[:-1]).all())
        tokens = batch.token_ids_T if everything else take(batch.token_ids_T, batch.length_S, s)
        r.tokens_at[rows] = self._tokens.put(tokens, batch.length_S[s])
        lengths = np.maximum(batch.behaviour_length_S, 0)
        behaviour = batch.behaviour_B if everything else take(batch.behaviour_B, lengths, s)
        r.behaviour_at[rows] = self._behaviour.put(behaviour, lengths[s])
        several = r.span_count[rows] > 1
        if several.any():
            spans = take(batch.spans_P, batch.span_count_S, s[several])
            r.spans_at[rows[several]] = self._spans.put(spans.ravel(), 4 * r.span_count[rows[several]])

    def free(self, rows: Ints) -> None:
        r = self._rows
        self._tokens.free(r.tokens_at[rows], r.length[rows])
        self._behaviour.free(r.behaviour_at[rows], np.maximum(r.behaviour_length[rows], 0))
        several = rows[r.span_count[rows] > 1]
        self._spans.free(r.spans_at[several], 4 * r.span_count[several])

    def token_rows(self, rows: Ints) -> list[TokenIds]:
        """Views, valid until the next ``put``, ``free`` or ``compact``."""
        return self._tokens.rows(self._rows.tokens_at[rows], self._rows.length[rows])

    def tokens(self, rows: Ints) -> TokenIds:
        """Of all ``rows``, end to end."""
        return self._tokens.gather(self._rows.tokens_at[rows], self._rows.length[rows])

    def behaviour(self, rows: Ints) -> npt.NDArray[np.float32]:
        """Of all ``rows`` that have some, end to end."""
        rows = rows[self._rows.behaviour_length[rows] > 0]
        return self._behaviour.gather(self._rows.behaviour_at[rows], self._rows.behaviour_length[rows])

    def spans(self, rows: Ints) -> Ints:
        """[P, 4] of all ``rows``, end to end: attempt, step, start, end."""
        r = self._rows
        counts = r.span_count[rows]
        attempts, steps = attempts_and_steps(r.version[rows])
        whole = np.stack([attempts, steps, np.zeros_like(steps), r.length[rows].astype(np.int64)], axis=1)
        several = counts > 1
        if not several.any():
            return whole
        spans = np.empty((int(counts.sum()), 4), np.int64)
        starts = offsets(counts)[:-1]
        spans[starts[~several]] = whole[~several]
        stored = self._spans.gather(r.spans_at[rows[several]], 4 * counts[several])
        spans[ranges(starts[several], counts[several])] = stored.reshape(-1, 4)
        return spans

    def compact(self) -> None:
        """Moves what lives in blocks that are mostly dead."""
        r = self._rows
        self._empty_blocks(self._tokens, r.tokens_at, r.length, 0, 1)
        self._empty_blocks(self._behaviour, r.behaviour_at, r.behaviour_length, 0, 1)
        self._empty_blocks(self._spans, r.spans_at, r.span_count, 1, 4)

    def _empty_blocks(self, arena: Arena, at: Ints, counts: npt.NDArray[np.int32], above: int, width: int) -> None:
        """Rows whose count is ``above`` that have ``width`` elements for each at ``at``; others have none."""
        blocks = arena.sparse_blocks()
        if len(blocks):
            rows = self._rows.living()
            rows = rows[(counts[rows] > above) & np.isin(Arena.block_of(at[rows]), blocks)]
            at[rows] = arena.move(at[rows], width * counts[rows])
