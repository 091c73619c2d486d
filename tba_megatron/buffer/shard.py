"""The replay shard: the rollouts of the prompts that one data-parallel leader owns, in its memory, as columns.

Whether a rollout is recent is decided when somebody asks, from the version that wrote it and the history of the run;
nothing that ages is stored. Official TBA (src/buffer_utils.py at c6075e2) stores a count of new items instead, which
counts duplicates, outgrows the pool and follows the trainer's step rather than the policy that sampled.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.arrivals import Incoming, deduplicate
from tba_megatron.buffer.content_index import ContentIndex
from tba_megatron.buffer.ledger import RolloutState, ShardCounts, ShardLedger
from tba_megatron.buffer.payload import Payload
from tba_megatron.buffer.prompts import PromptTable
from tba_megatron.buffer.row_lists import RowLists
from tba_megatron.buffer.rows import NameTable, RowColumns, turns
from tba_megatron.buffer.validity import ANY_TOKEN, REASONS, VALID, invalid_reasons
from tba_megatron.buffer.version_lists import VersionLists, runs
from tba_megatron.ragged import Ints, keep, offsets, owners, take
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.types import PolicyHistory, ShardReport

_S = RolloutState
_TOKEN_BYTES = 4  # of a token id, and of a log-prob
_ANY_USES = np.iinfo(np.int32).max


class ReplayShard:
    """Exact de-duplication, a cap for each prompt, and capacities over the shard; the oldest leave first, rollouts of
    another policy with those that the trainer's own version of their time wrote.

    The capacities are this shard's share of those of ``buffer``; bytes are those of prompts, completions and behaviour
    log-probs. A token from ``vocab_size`` on is unknown to the model; ``drop_truncated`` makes completions without an
    end invalid (``objective.truncated: drop``), ``needs_behaviour`` those without behaviour log-probs,
    ``needs_reference`` those without the reference's. A rollout that was part of ``max_reuse`` optimizer steps (0: no
    limit) is held as before and may be drawn no more. Row numbers and prompt numbers stay as they are until the next
    ``add``.
    """

    def __init__(
        self,
        capacity_rollouts: int,
        per_prompt_rollouts: int,
        *,
        capacity_bytes: int = 1 << 62,
        drop_truncated: bool = False,
        needs_behaviour: bool = False,
        needs_reference: bool = False,
        max_reuse: int = 0,
        vocab_size: int = ANY_TOKEN,
    ) -> None:
        self._capacity_rollouts, self._capacity_bytes = capacity_rollouts, capacity_bytes
        self._per_prompt_rollouts = per_prompt_rollouts
        self._drop_truncated, self._vocab_size = drop_truncated, vocab_size
        self._needs_behaviour, self._needs_reference = needs_behaviour, needs_reference
        self._most_uses = max_reuse or _ANY_USES
        self.clear()

    def clear(self) -> None:
        """Holds nothing and has counted nothing."""
        self.ledger = ShardLedger()
        self.rows, self.prompts = RowColumns(), PromptTable()
        self.names = NameTable()  # of searchers and sources
        self.payload = Payload(self.rows)
        self._of_prompt, self._of_version = RowLists(), VersionLists(self.rows)
        self._index = ContentIndex()
        self._in_segment: Counter[int] = Counter()
        self.next_arrival = 0
        self._held = 0

    # ---- what is in it

    def __len__(self) -> int:
        """Distinct rollouts."""
        return self._held

    @property
    def bytes(self) -> int:
        """Bytes of the prompts, completions and behaviour log-probs that are held."""
        return _TOKEN_BYTES * (self.prompts.n_tokens + self.payload.n_elements)

    def counts(self) -> ShardCounts:
        return self.ledger.counts()

    def segments(self) -> set[int]:
        """Segments of the log that hold a rollout of this shard."""
        return set(self._in_segment) - {-1}

    def rows_of(self, prompt_numbers: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
        """(rows of each prompt, end to end and in order of arrival; how many each has)."""
        return self._of_prompt.gather(prompt_numbers)

    def sizes_of(self, prompt_numbers: npt.NDArray[np.integer]) -> Ints:
        return self._of_prompt.size[prompt_numbers]

    def may_draw(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` were part of fewer than ``max_reuse`` optimizer steps."""
        return self.rows.uses[rows] < self._most_uses

    def drawable_rows_of(self, prompt_numbers: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
        """``rows_of`` without the rows that may be drawn no more."""
        rows, sizes = self.rows_of(prompt_numbers)
        return keep(rows, sizes, self.may_draw(rows))

    def recent_rows(self, history: PolicyHistory, step: int, recent_age_steps: int, *, foreign: bool = False) -> Ints:
        """Rows that may be drawn and whose newest policy is on the history and at most ``recent_age_steps`` old, by
        version and arrival; with ``foreign`` those of another policy whose era is so, which are never recent.
        """
        rows = self._of_version.recent(history, step, recent_age_steps, foreign=foreign)
        return rows[self.may_draw(rows)]

    def fresh_prompts(self) -> Ints:
        """Prompts with a rollout of a visit after which nothing of them was trained on, ascending."""
        return np.flatnonzero(self.prompts.n_fresh_rows > 0)

    def is_fresh(self, rows: Ints) -> npt.NDArray[np.bool_]:
        return self.rows.visit[rows] > self.prompts.trained_visit[self.rows.prompt[rows]]

    def report(self, history: PolicyHistory, step: int, recent_age_steps: int) -> ShardReport:
        """Counts as of optimizer step ``step``. Costs the recent rollouts, not the shard.

        What another policy wrote as recently is fresh as well: nothing else would hold its searchers back.
        """
        recent = self.recent_rows(history, step, recent_age_steps)
        foreign = self.recent_rows(history, step, recent_age_steps, foreign=True)
        young = np.concatenate([recent, foreign])
        fresh = young[self.is_fresh(young)]
        return self._report(len(np.unique(self.rows.prompt[recent])), len(np.unique(self.rows.prompt[fresh])))

    def report_fresh(self) -> ShardReport:
        """The same counts where age does not matter: a prompt with a visit that waits is recent and fresh."""
        n_fresh = int(np.count_nonzero(self.prompts.n_fresh_rows > 0))
        return self._report(n_fresh, n_fresh)

    def _report(self, n_recent: int, n_fresh: int) -> ShardReport:
        return ShardReport(
            n_prompts=self.prompts.n_drawable,
            n_recent=n_recent,
            n_fresh=n_fresh,
            n_exhausted=len(self.prompts) - self.prompts.n_drawable,
            n_rollouts=len(self),
            bytes=self.bytes,
        )

    def batch(
        self, prompt_numbers: Ints, sizes: npt.NDArray[np.integer], rows: Ints, copies: npt.NDArray[np.integer]
    ) -> RolloutBatch:
        """Groups of ``sizes`` rollouts of those prompts, as a batch of its own memory; ``rows`` lie end to end."""
        r = self.rows
        prompt_tokens = self.prompts.tokens(prompt_numbers)
        # Of all searchers that ever sent something, those that are named here.
        used, name_S = np.unique(np.concatenate([r.searcher[rows], r.source[rows]]), return_inverse=True)
        return RolloutBatch(
            prompt_ids=self.prompts.ids(prompt_numbers),
            names=tuple(self.names[number] for number in used.tolist()),
            lease_G=np.full(len(prompt_numbers), -1, np.int64),
            size_G=np.asarray(sizes, np.int32),
            prompt_length_G=self.prompts.length[prompt_numbers],
            prompt_tokens=np.concatenate([np.zeros(0, np.int32), *prompt_tokens]),
            searcher_S=name_S[: len(rows)].astype(np.int32),
            source_S=name_S[len(rows) :].astype(np.int32),
            sequence_S=r.sequence[rows],
            reward_S=r.reward[rows],
            stop_reason_S=r.stop_reason[rows],
            copies_S=np.asarray(copies, np.int32),
            length_S=r.length[rows],
            token_ids_T=self.payload.tokens(rows),
            behaviour_length_S=r.behaviour_length[rows],
            behaviour_B=self.payload.behaviour(rows),
            span_count_S=r.span_count[rows],
            spans_P=self.payload.spans(rows),
            reference_S=r.reference[rows],
            reference_version_S=r.reference_version[rows],
        )

    # ---- what goes in

    def add(self, batch: RolloutBatch, *, segment: int = -1) -> None:
        """Takes a whole batch in, or counts why not: validity, de-duplication, cap of each prompt, capacities.

        ``segment`` is where the shard's log keeps it.
        """
        reasons_S = invalid_reasons(
            batch,
            drop_truncated=self._drop_truncated,
            vocab_size=self._vocab_size,
            needs_behaviour=self._needs_behaviour,
            needs_reference=self._needs_reference,
        )
        prompt_G = self._known_prompts(batch, reasons_S)
        incoming = Incoming(batch, np.flatnonzero(reasons_S == VALID), prompt_G)
        kept = deduplicate(incoming, self._find(incoming), self.rows)
        self._count(batch, reasons_S, len(kept.indices))
        np.add.at(self.rows.copies, kept.repeated, 1)
        if len(kept.indices):
            visit_S = self.next_arrival + np.repeat(offsets(batch.size_G)[:-1], batch.size_G)
            rows = self._insert(incoming, kept.indices, visit_S, segment)
            self.rows.copies[rows] = kept.copies
            self.rows.reference[rows], self.rows.reference_version[rows] = kept.reference, kept.reference_version
            self._remove(kept.replaced, _S.DUPLICATE)  # after what replaces it: its prompt stays
            prompts = self.rows.prompt[rows]
            self.evict(np.unique(prompts[runs(prompts)]))
        self.next_arrival += batch.n_rollouts
        self.payload.compact()

    def _known_prompts(self, batch: RolloutBatch, reasons_S: npt.NDArray[np.int8]) -> Ints:
        """[G] numbers of the prompts that are held, -1 for others. Marks the rollouts whose prompt cannot be."""
        ends = offsets(batch.prompt_length_G).tolist()
        first_S = offsets(batch.size_G).tolist()
        group_S = owners(batch.size_G)
        any_valid_G = np.bincount(group_S, reasons_S == VALID, batch.n_groups)
        prompt_G = np.array([self.prompts.number(prompt_id) for prompt_id in batch.prompt_ids], np.int64)
        held = iter(self.prompts.tokens(prompt_G[prompt_G >= 0]))
        to_check = np.arange(batch.n_groups)
        if len(set(batch.prompt_ids)) == batch.n_groups:  # a prompt that is new contradicts nothing
            to_check = np.flatnonzero((prompt_G >= 0) | (batch.prompt_length_G == 0))
        tokens = batch.prompt_tokens
        begun: dict[str, npt.NDArray[np.int32]] = {}  # of prompts that are not held, by an earlier group
        for g in to_check.tolist():
            prompt_id = batch.prompt_ids[g]
            mine = tokens[ends[g] : ends[g + 1]]
            known = next(held) if prompt_G[g] >= 0 else begun.get(prompt_id)
            if not len(mine):
                reasons_S[first_S[g] : first_S[g + 1]] = REASONS.index("prompt_empty")
            elif known is not None and known.tobytes() != mine.tobytes():
                reasons_S[first_S[g] : first_S[g + 1]] = REASONS.index("prompt_differs")
            elif known is None and any_valid_G[g]:
                begun[prompt_id] = mine
        return prompt_G

    def _find(self, incoming: Incoming) -> Ints:
        """The row that holds the same completion of the same prompt, or -1."""

        def same(i: Ints, rows: Ints) -> npt.NDArray[np.bool_]:
            right = (self.rows.prompt[rows] == incoming.prompt[i]) & (self.rows.length[rows] == incoming.length[i])
            held = self.payload.token_rows(rows[right])
            mine = (incoming.tokens(j) for j in i[right].tolist())
            right[right] = [a.tobytes() == b.tobytes() for a, b in zip(held, mine, strict=True)]
            return right

        return self._index.find(incoming.content, same)

    def _count(self, batch: RolloutBatch, reasons_S: npt.NDArray[np.int8], n_kept: int) -> None:
        n_invalid = int(np.count_nonzero(reasons_S != VALID))
        received = np.bincount(batch.searcher_S, minlength=len(batch.names)).tolist()
        by_reason = np.bincount(reasons_S[reasons_S != VALID], minlength=len(REASONS)).tolist()
        self.ledger.receive(
            {name: n for name, n in zip(batch.names, received, strict=True) if n},
            {
                _S.HELD_UNTRAINED: n_kept,
                _S.DUPLICATE: batch.n_rollouts - n_invalid - n_kept,
                _S.INVALID: n_invalid,
            },
            {reason: n for reason, n in zip(REASONS, by_reason, strict=True) if n},
        )

    def _insert(self, incoming: Incoming, kept: Ints, visit_S: Ints, segment: int) -> Ints:
        """New rows for the rollouts ``kept`` of the valid ones; all columns but copies and reference."""
        batch, s = incoming.batch, incoming.valid[kept]
        rows = self.rows.allocate(len(kept))
        r = self.rows
        r.prompt[rows] = self._begin_prompts(incoming, kept)
        r.version[rows] = incoming.version[kept]
        r.arrival[rows], r.visit[rows] = self.next_arrival + s, visit_S[s]
        names = np.array([self.names.number(name) for name in batch.names], np.int32)
        r.searcher[rows], r.source[rows] = names[batch.searcher_S[s]], names[batch.source_S[s]]
        r.sequence[rows], r.reward[rows], r.stop_reason[rows] = (
            batch.sequence_S[s],
            batch.reward_S[s],
            batch.stop_reason_S[s],
        )
        r.content[rows] = incoming.content[kept]
        r.length[rows], r.behaviour_length[rows] = batch.length_S[s], batch.behaviour_length_S[s]
        r.span_count[rows], r.segment[rows], r.uses[rows] = batch.span_count_S[s], segment, 0
        self.payload.put(rows, batch, s)
        self.index_rows(rows)
        return rows

    def index_rows(self, rows: Ints) -> None:
        """Rows whose columns are set become part of the shard, in the order of ``rows``."""
        r = self.rows
        self._of_version.append(rows)
        self._of_prompt.append(r.prompt[rows], rows)
        self._index.insert(r.content[rows], rows)
        fresh = rows[self.is_fresh(rows)]
        np.add.at(self.prompts.n_fresh_rows, r.prompt[fresh], 1)
        self.prompts.count_drawable(r.prompt[rows[self.may_draw(rows)]], 1)
        self._count_in_segments(rows, 1)
        self._held += len(rows)

    def _count_in_segments(self, rows: Ints, sign: int) -> None:
        segments = self.rows.segment[rows]
        starts = runs(segments)
        for segment, n in zip(segments[starts].tolist(), np.diff(starts, append=len(rows)).tolist(), strict=True):
            self._in_segment[segment] += sign * n
            if self._in_segment[segment] == 0:
                del self._in_segment[segment]

    def _begin_prompts(self, incoming: Incoming, kept: Ints) -> Ints:
        """The prompt number of each kept rollout; prompts that are not held yet begin."""
        batch, group, numbers = incoming.batch, incoming.group[kept], incoming.prompt[kept]
        if (numbers >= 0).all():
            return numbers
        first_of: dict[str, int] = {}
        begin = [first_of.setdefault(batch.prompt_ids[g], g) for g in np.unique(group[numbers < 0]).tolist()]
        new = np.array(list(first_of.values()), np.int64)
        tokens = take(batch.prompt_tokens, batch.prompt_length_G, new)
        number_G = np.full(batch.n_groups, -1, np.int64)
        keys = [incoming.prompt_keys[g] for g in first_of.values()]
        number_G[new] = self.prompts.begin(list(first_of), keys, tokens, batch.prompt_length_G[new])
        number_G[np.unique(group[numbers < 0])] = number_G[begin]
        return np.where(numbers < 0, number_G[group], numbers)

    # ---- what goes out

    def mark_trained(self, rows: Ints) -> None:
        """These were drawn for an optimizer step; a row that was drawn for several groups is used once."""
        rows = np.unique(rows)
        r = self.rows
        self.ledger.move(_S.HELD_UNTRAINED, _S.TRAINED, int(np.count_nonzero(r.uses[rows] == 0)))
        r.uses[rows] += 1
        self.prompts.count_drawable(r.prompt[rows[r.uses[rows] == self._most_uses]], -1)
        np.maximum.at(self.prompts.trained_visit, r.prompt[rows], r.visit[rows])
        prompts = np.unique(r.prompt[rows])
        held, sizes = self.rows_of(prompts)
        owner = owners(sizes)
        fresh = np.bincount(owner, self.is_fresh(held), len(prompts))
        self.prompts.n_fresh_rows[prompts] = fresh.astype(np.int64)

    def set_reference(self, rows: Ints, values: npt.NDArray[np.float64], version: int) -> None:
        """Stores the reference's log-prob sums in nats, as those of ``version``."""
        self.rows.reference[rows], self.rows.reference_version[rows] = values, version

    def set_segment(self, rows: Ints, segment: int) -> None:
        """``segment`` of the log holds these."""
        self._count_in_segments(rows, -1)
        self.rows.segment[rows] = segment
        self._count_in_segments(rows, 1)

    def evict(self, prompts: npt.NDArray[np.integer] | None = None) -> None:
        """What is beyond the caps of ``prompts`` (None: of all) and beyond the capacities leaves, the oldest first."""
        self._evict_beyond_caps(self.prompts.all_numbers() if prompts is None else prompts)
        self._evict_beyond_capacity()

    def _evict_beyond_caps(self, prompts: npt.NDArray[np.integer]) -> None:
        prompts = prompts[self.sizes_of(prompts) > self._per_prompt_rollouts]
        if not len(prompts):
            return
        rows, sizes = self.rows_of(prompts)
        owner = owners(sizes)
        order = np.lexsort((self.rows.arrival[rows], turns(self.rows.version[rows]), owner))
        rank = np.arange(len(rows)) - offsets(sizes)[:-1][owner]
        excess = (sizes - self._per_prompt_rollouts)[owner]
        self._remove(rows[order][rank < excess], _S.EVICTED_UNTRAINED)

    def _evict_beyond_capacity(self) -> None:
        while len(self) > self._capacity_rollouts or self.bytes > self._capacity_bytes:
            too_many = len(self) - self._capacity_rollouts
            rows = self._of_version.oldest(max(too_many, 256))
            n = max(0, too_many)
            if (too_large := self.bytes - self._capacity_bytes) > 0:
                n = max(n, int(np.searchsorted(np.cumsum(self._freed(rows)), too_large)) + 1)
            self._remove(rows[:n], _S.EVICTED_UNTRAINED)

    def _freed(self, rows: Ints) -> Ints:
        """Bytes that each of ``rows`` frees when they leave in this order: the last of a prompt frees the prompt."""
        r = self.rows
        prompts = r.prompt[rows]
        order = np.argsort(prompts, kind="stable")
        _, starts, counts = np.unique(prompts[order], return_index=True, return_counts=True)
        nth = np.empty(len(rows), np.int64)
        nth[order] = np.arange(1, len(rows) + 1) - np.repeat(starts, counts)
        last = nth == self.sizes_of(prompts)
        elements = r.length[rows].astype(np.int64) + np.maximum(r.behaviour_length[rows], 0)
        return _TOKEN_BYTES * (elements + np.where(last, self.prompts.length[prompts], 0))

    def _remove(self, rows: Ints, left_as: RolloutState) -> None:
        if not len(rows):
            return
        r = self.rows
        self.ledger.move(_S.HELD_UNTRAINED, left_as, int(np.count_nonzero(r.uses[rows] == 0)))
        prompts = r.prompt[rows]
        fresh = self.is_fresh(rows)
        np.subtract.at(self.prompts.n_fresh_rows, prompts[fresh], 1)
        self.prompts.count_drawable(prompts[self.may_draw(rows)], -1)
        self._of_prompt.remove(prompts, rows)
        self._of_version.remove(rows)
        self._index.remove(r.content[rows], rows)
        self.payload.free(rows)
        self._count_in_segments(rows, -1)
        touched = np.unique(prompts)
        self.prompts.forget(touched[self.sizes_of(touched) == 0].astype(np.int64))
        r.release(rows)
        self._held -= len(rows)
