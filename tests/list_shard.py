"""The specification of ``ReplayShard``: one list of entries, and every question looks at all of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tba_megatron.buffer.ledger import RolloutState, ShardCounts
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.types import PolicyHistory, PolicyVersion, Rollout, RolloutGroup, ShardReport, StopReason

Tokens = tuple[int, ...]


@dataclass(kw_only=True, eq=False)
class Entry:
    """A rollout that is held. ``arrival`` is its name: no two entries of a shard ever share it."""

    prompt_id: str
    prompt: Tokens
    rollout: Rollout
    version: PolicyVersion
    tokens: Tokens
    arrival: int
    visit: int
    copies: int = 1
    uses: int = 0

    @property
    def age(self) -> tuple[PolicyVersion, bool, int]:
        """Sorts as entries leave."""
        return self.version.era, self.version.is_foreign, self.arrival

    @property
    def precedence(self) -> tuple[bool, PolicyVersion]:
        """Of equal completions the one with the largest is held."""
        return not self.version.is_foreign, self.version

    @property
    def bytes(self) -> int:
        behaviour = self.rollout.behaviour_logprobs
        return 4 * len(self.tokens) + (0 if behaviour is None else 4 * len(behaviour))

    def plain(self) -> tuple[object, ...]:
        return (*plain_rollout(self.rollout), self.copies, self.uses, self.arrival, self.visit)


class ListShard:
    """What a shard is; a rollout is named by its arrival."""

    def __init__(
        self,
        capacity_rollouts: int,
        per_prompt_rollouts: int,
        *,
        capacity_bytes: int = 1 << 62,
        drop_truncated: bool = False,
        max_reuse: int = 0,
        vocab_size: int = 1 << 31,
    ) -> None:
        self.capacity_rollouts = capacity_rollouts
        self.per_prompt_rollouts = per_prompt_rollouts
        self.capacity_bytes = capacity_bytes
        self.drop_truncated = drop_truncated
        self.max_reuse = max_reuse
        self.vocab_size = vocab_size
        self.entries: list[Entry] = []
        self.trained_visit: dict[str, int] = {}  # of prompts that are held, where it is not -1
        self.next_arrival = 0
        self.received: Counter[str] = Counter()
        self.left: Counter[RolloutState] = Counter()
        self.invalid_reasons: Counter[str] = Counter()

    # What goes in and out

    def add(self, batch: RolloutBatch) -> None:
        for entry in self._valid(batch):
            self._take_in(entry)
        for prompt_id in self.prompt_ids():
            while len(pool := self.pool(prompt_id)) > self.per_prompt_rollouts:
                self._leave(min(pool, key=lambda entry: entry.age), RolloutState.EVICTED_UNTRAINED)
        while len(self.entries) > self.capacity_rollouts or self.bytes > self.capacity_bytes:
            self._leave(min(self.entries, key=lambda entry: entry.age), RolloutState.EVICTED_UNTRAINED)
        held = self.prompt_ids()
        self.trained_visit = {prompt_id: n for prompt_id, n in self.trained_visit.items() if prompt_id in held}

    def _valid(self, batch: RolloutBatch) -> list[Entry]:
        prompts = {entry.prompt_id: entry.prompt for entry in self.entries}
        valid = []
        for group in batch.groups():
            visit = self.next_arrival
            prompt: Tokens = tuple(group.prompt_token_ids.tolist())
            problem = self._prompt_problem(prompt, prompts.get(group.prompt_id, prompt))
            for rollout in group.rollouts:
                self.received[rollout.rollout_id.searcher] += 1
                reason = problem or invalid_reason(
                    rollout, drop_truncated=self.drop_truncated, vocab_size=self.vocab_size
                )
                if reason is None:
                    valid.append(self._entry(group, prompt, rollout, visit))
                    prompts[group.prompt_id] = prompt
                else:
                    self.left[RolloutState.INVALID] += 1
                    self.invalid_reasons[reason] += 1
                self.next_arrival += 1
        return valid

    def _entry(self, group: RolloutGroup, prompt: Tokens, rollout: Rollout, visit: int) -> Entry:
        return Entry(
            prompt_id=group.prompt_id,
            prompt=prompt,
            rollout=rollout,
            version=rollout.version,
            tokens=tuple(rollout.token_ids.tolist()),
            arrival=self.next_arrival,
            visit=visit,
        )

    @staticmethod
    def _prompt_problem(prompt: Tokens, known: Tokens) -> str | None:
        if not prompt:
            return "prompt_empty"
        return None if prompt == known else "prompt_differs"

    def _take_in(self, new: Entry) -> None:
        old = next((entry for entry in self.pool(new.prompt_id) if entry.tokens == new.tokens), None)
        if old is None:
            self.entries.append(new)
        elif old.precedence < new.precedence:
            self._leave(old, RolloutState.DUPLICATE)
            if new.rollout.reference_version is None:
                known = old.rollout.reference_logprob, old.rollout.reference_version
                new.rollout = replace(new.rollout, reference_logprob=known[0], reference_version=known[1])
            self.entries.append(new)
        else:
            old.copies += old.version == new.version
            self.left[RolloutState.DUPLICATE] += 1

    def _leave(self, entry: Entry, state: RolloutState) -> None:
        self.entries.remove(entry)
        self.left[RolloutState.TRAINED if entry.uses else state] += 1

    def mark_trained(self, arrivals: Iterable[int]) -> None:
        for entry in self._named(arrivals):
            entry.uses += 1
            self.trained_visit[entry.prompt_id] = max(entry.visit, self.trained_visit.get(entry.prompt_id, -1))

    def set_reference(self, arrivals: Iterable[int], logprob: Callable[[int], float], version: int) -> None:
        for entry in self._named(arrivals):
            value = logprob(entry.arrival)
            entry.rollout = replace(entry.rollout, reference_logprob=value, reference_version=version)

    def _named(self, arrivals: Iterable[int]) -> list[Entry]:
        names = set(arrivals)
        return [entry for entry in self.entries if entry.arrival in names]

    # What is in it

    @property
    def bytes(self) -> int:
        prompts = {entry.prompt_id: entry.prompt for entry in self.entries}
        return sum(entry.bytes for entry in self.entries) + sum(4 * len(prompt) for prompt in prompts.values())

    def prompt_ids(self) -> list[str]:
        return sorted({entry.prompt_id for entry in self.entries})

    def pool(self, prompt_id: str) -> list[Entry]:
        """The rollouts of a prompt in order of arrival."""
        return sorted((e for e in self.entries if e.prompt_id == prompt_id), key=lambda entry: entry.arrival)

    def may_draw(self, entry: Entry) -> bool:
        return not self.max_reuse or entry.uses < self.max_reuse

    def drawable(self) -> dict[str, list[int]]:
        """Arrivals of what may be drawn, of each prompt that has some."""
        pools = {prompt_id: filter(self.may_draw, self.pool(prompt_id)) for prompt_id in self.prompt_ids()}
        arrivals = {prompt_id: [entry.arrival for entry in pool] for prompt_id, pool in pools.items()}
        return {prompt_id: pool for prompt_id, pool in arrivals.items() if pool}

    def is_fresh(self, entry: Entry) -> bool:
        return entry.visit > self.trained_visit.get(entry.prompt_id, -1)

    def contents(self) -> list[tuple[object, ...]]:
        """(prompt id, prompt tokens, trained visit, rollouts in order of arrival) of each prompt, by prompt id."""
        return [
            (
                prompt_id,
                self.pool(prompt_id)[0].prompt,
                self.trained_visit.get(prompt_id, -1),
                [entry.plain() for entry in self.pool(prompt_id)],
            )
            for prompt_id in self.prompt_ids()
        ]

    def counts(self) -> ShardCounts:
        states = Counter(self.left)
        states.update(RolloutState.TRAINED if entry.uses else RolloutState.HELD_UNTRAINED for entry in self.entries)
        return ShardCounts(
            received=dict(self.received),
            invalid_reasons=dict(self.invalid_reasons),
            **{state.value: states[state] for state in RolloutState},
        )

    def recent(self, history: PolicyHistory, step: int, recent_age_steps: int) -> list[Entry]:
        ages = [(e, history.age_steps(e.version, step)) for e in self.entries if self.may_draw(e)]
        return [entry for entry, age in ages if age is not None and age <= recent_age_steps]

    def fresh_prompt_ids(self) -> list[str]:
        return sorted({entry.prompt_id for entry in self.entries if self.is_fresh(entry)})

    def report(self, history: PolicyHistory, step: int, recent_age_steps: int) -> ShardReport:
        ages = [(e, history.age_steps(e.version.era, step)) for e in self.entries if self.may_draw(e)]
        young = [entry for entry, age in ages if age is not None and age <= recent_age_steps]
        return self._report(
            n_recent=len({entry.prompt_id for entry in self.recent(history, step, recent_age_steps)}),
            n_fresh=len({entry.prompt_id for entry in young if self.is_fresh(entry)}),
        )

    def report_fresh(self) -> ShardReport:
        return self._report(n_recent=len(self.fresh_prompt_ids()), n_fresh=len(self.fresh_prompt_ids()))

    def _report(self, *, n_recent: int, n_fresh: int) -> ShardReport:
        return ShardReport(
            n_prompts=len(self.drawable()),
            n_recent=n_recent,
            n_fresh=n_fresh,
            n_exhausted=len(self.prompt_ids()) - len(self.drawable()),
            n_rollouts=len(self.entries),
            bytes=self.bytes,
        )


def plain_rollout(rollout: Rollout) -> tuple[object, ...]:
    """Every field, comparable."""
    behaviour = rollout.behaviour_logprobs
    return (
        rollout.rollout_id,
        tuple(rollout.token_ids.tolist()),
        rollout.reward,
        rollout.stop_reason,
        rollout.spans,
        rollout.source,
        None if behaviour is None else tuple(behaviour.tolist()),
        rollout.reference_logprob,
        rollout.reference_version,
        rollout.version,
    )


def invalid_reason(rollout: Rollout, *, drop_truncated: bool, vocab_size: int = 1 << 31) -> str | None:
    """The first law that ``rollout`` breaks."""
    n_tokens, behaviour = len(rollout.token_ids), rollout.behaviour_logprobs
    reference, reference_version = rollout.reference_logprob, rollout.reference_version
    written = [position for span in rollout.spans for position in range(span.start, span.end)]
    impossible = any(min(span.version.attempt, span.version.step) < 0 for span in rollout.spans)
    empty = any(span.start >= span.end for span in rollout.spans)
    only = [(span.start, span.end) for span in rollout.spans] == [(0, 0)]
    laws = {
        "reward_not_finite": not math.isfinite(rollout.reward),
        "behaviour_logprobs_length": behaviour is not None and len(behaviour) != n_tokens,
        "behaviour_logprobs_not_finite": behaviour is not None and not all(map(math.isfinite, behaviour.tolist())),
        "reference_logprob_not_finite": reference is not None and not math.isfinite(reference),
        "reference_version_missing": (reference is None) != (reference_version is None),
        "spans": impossible or (not only if n_tokens == 0 else empty or written != list(range(n_tokens))),
        "token_negative": any(token < 0 for token in rollout.token_ids.tolist()),
        "token_unknown": any(token >= vocab_size for token in rollout.token_ids.tolist()),
        "aborted": rollout.stop_reason is StopReason.ABORT,
        "truncated": drop_truncated and rollout.stop_reason is StopReason.LENGTH,
    }
    return next((reason for reason, broken in laws.items() if broken), None)
