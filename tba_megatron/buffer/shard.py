"""The replay shard: the pools of the prompts that one data-parallel leader owns, in its memory.

A pool holds distinct completions. Whether a rollout is recent is decided when somebody asks, from the
version that wrote it and the history of the run; nothing that ages is stored. Official TBA
(src/buffer_utils.py at c6075e2) stores a count of new items instead, which counts duplicates, outgrows the
pool and follows the trainer's step rather than the policy that sampled.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.columns import Columns
from tba_megatron.buffer.ledger import RolloutState, ShardCounts, ShardLedger
from tba_megatron.buffer.shard_state import HeldRollout, PoolState, ShardState, from_arrays, to_arrays
from tba_megatron.buffer.validity import invalid_reason
from tba_megatron.types import (
    PolicyHistory,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    RolloutId,
    ShardReport,
    TokenIds,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """What a sampler sees of a prompt: some or all of its rollouts, in the order of the pool.

    ``fresh``: the view has rollouts of a visit after which nothing of this prompt was trained on.
    """

    prompt_id: str
    prompt_token_ids: TokenIds
    rollouts: tuple[HeldRollout, ...]
    fresh: bool


@dataclass(slots=True)
class _Pool:
    prompt_token_ids: TokenIds
    trained_visit: int = -1  # the newest visit that was trained on
    held: dict[bytes, HeldRollout] = field(default_factory=dict)  # by the completion's tokens

    def is_fresh(self, held: HeldRollout) -> bool:
        return held.visit > self.trained_visit


class ReplayShard:
    """Pools with exact de-duplication, a cap for each and one over the shard; the oldest leave first.

    The capacity is this shard's share of ``buffer.capacity_rollouts``. ``drop_truncated`` makes completions
    without an end invalid (``objective.truncated: drop``).
    """

    def __init__(self, capacity_rollouts: int, per_prompt_rollouts: int, *, drop_truncated: bool = False) -> None:
        self._capacity_rollouts = capacity_rollouts
        self._per_prompt_rollouts = per_prompt_rollouts
        self._drop_truncated = drop_truncated
        self._clear()

    def _clear(self) -> None:
        self._ledger = ShardLedger()
        self._pools: dict[str, _Pool] = {}
        self._place: dict[RolloutId, tuple[str, bytes]] = {}
        # Prompts by version, each with its number of rollouts of that version: makes ``report`` cheap.
        self._by_version: dict[PolicyVersion, dict[str, int]] = {}
        self._fresh: set[str] = set()
        # The oldest first; an item whose rollout has left is skipped when it comes up.
        self._oldest: list[tuple[int, int, int, RolloutId]] = []
        # What left untrained since the last ``mark_trained``: the step in progress may be training on it.
        self._just_left: dict[RolloutId, RolloutState] = {}
        self._next_arrival = 0
        self._bytes = 0

    # What is in it

    def __len__(self) -> int:
        """Distinct rollouts."""
        return len(self._place)

    @property
    def bytes(self) -> int:
        """Bytes of the token and log-prob arrays."""
        return self._bytes

    def counts(self) -> ShardCounts:
        return self._ledger.counts()

    def prompt_ids(self) -> list[str]:
        """Prompts with at least one rollout, in the order in which their pools began."""
        return list(self._pools)

    def pool(self, prompt_id: str) -> PoolView:
        pool = self._pools[prompt_id]
        return self._view(prompt_id, pool, tuple(pool.held.values()))

    def fresh_pools(self) -> Iterator[PoolView]:
        """Whole pools in which a visit waits after which nothing was trained on, by prompt id."""
        return (self.pool(prompt_id) for prompt_id in sorted(self._fresh))

    def recent_pools(self, history: PolicyHistory, step: int, recent_age_steps: int) -> Iterator[PoolView]:
        """The recent part of each pool that has one, by prompt id."""
        versions = self._recent_versions(history, step, recent_age_steps)
        for prompt_id in sorted(self._prompts_of(versions)):
            pool = self._pools[prompt_id]
            yield self._view(prompt_id, pool, tuple(h for h in pool.held.values() if h.version in versions))

    def report(self, history: PolicyHistory, step: int, recent_age_steps: int) -> ShardReport:
        """Counts as of optimizer step ``step``. Costs the recent prompts, not the shard."""
        versions = self._recent_versions(history, step, recent_age_steps)
        recent = self._prompts_of(versions)
        fresh_pools = [self._pools[prompt_id] for prompt_id in recent & self._fresh]
        return ShardReport(
            n_prompts=len(self._pools),
            n_recent=len(recent),
            n_fresh=sum(
                any(pool.is_fresh(h) and h.version in versions for h in pool.held.values()) for pool in fresh_pools
            ),
            n_rollouts=len(self),
            bytes=self._bytes,
        )

    def report_fresh(self) -> ShardReport:
        """The same counts where age does not matter: a prompt with a visit that waits is recent and fresh."""
        return ShardReport(
            n_prompts=len(self._pools),
            n_recent=len(self._fresh),
            n_fresh=len(self._fresh),
            n_rollouts=len(self),
            bytes=self._bytes,
        )

    @staticmethod
    def _view(prompt_id: str, pool: _Pool, rollouts: tuple[HeldRollout, ...]) -> PoolView:
        return PoolView(
            prompt_id=prompt_id,
            prompt_token_ids=pool.prompt_token_ids,
            rollouts=rollouts,
            fresh=any(map(pool.is_fresh, rollouts)),
        )

    def _recent_versions(self, history: PolicyHistory, step: int, recent_age_steps: int) -> set[PolicyVersion]:
        ages = ((version, history.age_steps(version, step)) for version in self._by_version)
        return {version for version, age in ages if age is not None and age <= recent_age_steps}

    def _prompts_of(self, versions: Iterable[PolicyVersion]) -> set[str]:
        return set().union(*(self._by_version[version] for version in versions))

    # What goes in and out

    def add(self, group: RolloutGroup) -> None:
        """Takes each rollout of ``group`` in, or counts why not."""
        visit = self._next_arrival
        for rollout in group.rollouts:
            self._receive(group, rollout, visit)
        pool = self._pools.get(group.prompt_id)
        while pool is not None and len(pool.held) > self._per_prompt_rollouts:
            oldest = min(pool.held.values(), key=lambda held: held.age_key)
            self._remove(oldest.rollout.rollout_id, RolloutState.EVICTED_UNTRAINED)
        self._evict_beyond_capacity()

    def mark_trained(self, rollout_ids: Iterable[RolloutId]) -> None:
        """These were part of an optimizer step. Call it once after each step, before the next draw."""
        for rollout_id in rollout_ids:
            if rollout_id in self._place:
                self._mark_held_trained(rollout_id)
            elif (left_as := self._just_left.pop(rollout_id, None)) is not None:
                self._ledger.move(left_as, RolloutState.TRAINED)
        self._just_left.clear()

    def set_reference(self, values: Mapping[RolloutId, tuple[float, int]]) -> None:
        """Stores (log-prob sum in nats, reference version) with each rollout that is still held."""
        for rollout_id, (logprob, version) in values.items():
            if rollout_id in self._place:
                prompt_id, key = self._place[rollout_id]
                held = self._pools[prompt_id].held
                rollout = replace(held[key].rollout, reference_logprob=logprob, reference_version=version)
                held[key] = replace(held[key], rollout=rollout)

    def _receive(self, group: RolloutGroup, rollout: Rollout, visit: int) -> None:
        searcher = rollout.rollout_id.searcher
        if rollout.rollout_id in self._place:
            self._ledger.receive_again()
            return
        reason = self._prompt_problem(group) or invalid_reason(rollout, drop_truncated=self._drop_truncated)
        if reason is not None:
            self._ledger.receive_invalid(searcher, reason)
            return
        key = np.ascontiguousarray(rollout.token_ids, np.int32).tobytes()
        pool = self._pools.get(group.prompt_id)
        old = pool.held.get(key) if pool else None
        if pool is None or old is None or old.version < rollout.version:
            if old is not None:
                rollout = _with_reference_of(rollout, old.rollout)
                self._remove(old.rollout.rollout_id, RolloutState.DUPLICATE)
            self._ledger.receive(searcher, RolloutState.HELD_UNTRAINED)
            self._insert(group.prompt_id, group.prompt_token_ids, key, self._new(rollout, key, visit))
            return
        if old.version == rollout.version:
            pool.held[key] = replace(old, copies=old.copies + 1)
        self._ledger.receive(searcher, RolloutState.DUPLICATE)

    def _prompt_problem(self, group: RolloutGroup) -> str | None:
        if len(group.prompt_token_ids) == 0:
            return "prompt_empty"  # nothing would predict the first token of the completion
        pool = self._pools.get(group.prompt_id)
        if pool is not None and not np.array_equal(pool.prompt_token_ids, group.prompt_token_ids):
            return "prompt_differs"  # the sender has another tokenizer or template
        return None

    def _new(self, rollout: Rollout, key: bytes, visit: int) -> HeldRollout:
        arrival = self._next_arrival
        self._next_arrival += 1
        # The array shares the key's memory, and no longer that of the message.
        return HeldRollout(
            rollout=replace(rollout, token_ids=np.frombuffer(key, np.int32)),
            version=rollout.version,
            copies=1,
            trained=False,
            arrival=arrival,
            visit=visit,
        )

    def _insert(self, prompt_id: str, prompt_token_ids: TokenIds, key: bytes, held: HeldRollout) -> None:
        pool = self._pools.get(prompt_id)
        if pool is None:
            pool = self._pools[prompt_id] = _Pool(np.array(prompt_token_ids, np.int32))
            self._bytes += pool.prompt_token_ids.nbytes
        pool.held[key] = held
        self._place[held.rollout.rollout_id] = (prompt_id, key)
        prompts = self._by_version.setdefault(held.version, {})
        prompts[prompt_id] = prompts.get(prompt_id, 0) + 1
        if pool.is_fresh(held):
            self._fresh.add(prompt_id)
        heapq.heappush(self._oldest, _heap_item(held))
        self._bytes += _rollout_bytes(held.rollout)

    def _remove(self, rollout_id: RolloutId, left_as: RolloutState) -> None:
        prompt_id, key = self._place.pop(rollout_id)
        pool = self._pools[prompt_id]
        held = pool.held.pop(key)
        self._bytes -= _rollout_bytes(held.rollout)
        prompts = self._by_version[held.version]
        prompts[prompt_id] -= 1
        if prompts[prompt_id] == 0:
            del prompts[prompt_id]
        if not prompts:
            del self._by_version[held.version]
        if not held.trained:
            self._ledger.move(RolloutState.HELD_UNTRAINED, left_as)
            self._just_left[rollout_id] = left_as
        self._update_fresh(prompt_id)
        if not pool.held:
            del self._pools[prompt_id]
            self._bytes -= pool.prompt_token_ids.nbytes

    def _mark_held_trained(self, rollout_id: RolloutId) -> None:
        prompt_id, key = self._place[rollout_id]
        pool = self._pools[prompt_id]
        held = pool.held[key]
        if not held.trained:
            self._ledger.move(RolloutState.HELD_UNTRAINED, RolloutState.TRAINED)
            pool.held[key] = replace(held, trained=True)
        if held.visit > pool.trained_visit:
            pool.trained_visit = held.visit
            self._update_fresh(prompt_id)

    def _update_fresh(self, prompt_id: str) -> None:
        pool = self._pools[prompt_id]
        if not any(map(pool.is_fresh, pool.held.values())):
            self._fresh.discard(prompt_id)

    def _evict_beyond_capacity(self) -> None:
        while len(self) > self._capacity_rollouts:
            rollout_id = heapq.heappop(self._oldest)[-1]
            if rollout_id in self._place:
                self._remove(rollout_id, RolloutState.EVICTED_UNTRAINED)
        # Rollouts that leave in other ways leave their items behind: rebuild before those are the majority.
        if len(self._oldest) > 2 * len(self) + 1024:
            self._oldest = [_heap_item(held) for pool in self._pools.values() for held in pool.held.values()]
            heapq.heapify(self._oldest)

    # Save and restore

    def state_arrays(self) -> Columns:
        """The whole shard, ledger included, as plain arrays for ``np.savez``. Save between steps."""
        return to_arrays(
            ShardState(
                next_arrival=self._next_arrival,
                ledger=self._ledger,
                pools=tuple(
                    PoolState(
                        prompt_id=prompt_id,
                        prompt_token_ids=pool.prompt_token_ids,
                        trained_visit=pool.trained_visit,
                        held=tuple(pool.held.values()),
                    )
                    for prompt_id, pool in self._pools.items()
                ),
            )
        )

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Becomes the shard that ``state_arrays`` described; a smaller capacity evicts. ValueError: another format."""
        self.restore_state(from_arrays(arrays))

    def restore_state(self, state: ShardState) -> None:
        """Becomes the shard of ``state``; a smaller capacity evicts."""
        self._clear()
        self._next_arrival = state.next_arrival
        self._ledger = state.ledger
        # Arrays of its own: those of ``state`` may be parts of one that would live as long as the last rollout.
        for pool in state.pools:
            self._pools[pool.prompt_id] = _Pool(np.array(pool.prompt_token_ids, np.int32), pool.trained_visit)
            self._bytes += pool.prompt_token_ids.nbytes
            for held in pool.held:
                key = held.rollout.token_ids.tobytes()
                behaviour = held.rollout.behaviour_logprobs
                rollout = replace(
                    held.rollout,
                    token_ids=np.frombuffer(key, np.int32),
                    behaviour_logprobs=None if behaviour is None else behaviour.copy(),
                )
                self._insert(pool.prompt_id, pool.prompt_token_ids, key, replace(held, rollout=rollout))
        self._evict_beyond_capacity()


def _with_reference_of(rollout: Rollout, old: Rollout) -> Rollout:
    """The reference's log-prob belongs to the tokens, so a newer copy need not compute it again."""
    if rollout.reference_logprob is not None or old.reference_logprob is None:
        return rollout
    return replace(rollout, reference_logprob=old.reference_logprob, reference_version=old.reference_version)


def _heap_item(held: HeldRollout) -> tuple[int, int, int, RolloutId]:
    return held.version.attempt, held.version.step, held.arrival, held.rollout.rollout_id


def _rollout_bytes(rollout: Rollout) -> int:
    behaviour = rollout.behaviour_logprobs
    return rollout.token_ids.nbytes + (0 if behaviour is None else behaviour.nbytes)
