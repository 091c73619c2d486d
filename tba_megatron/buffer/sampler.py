"""What is trained on next: a global plan made of counts, then each prompt's owner draws its K rollouts.

A plan depends on the shards' reports and a seed alone, so every rank makes the same one; a draw depends on
the shard and the generator it is given. TBA (arXiv 2503.18929, section 4.1) switches per query between
recent rollouts, with probability m, and the whole pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tba_megatron import config_sections
from tba_megatron.buffer.shard import HeldRollout, PoolView, ReplayShard
from tba_megatron.types import PolicyHistory, ShardReport, TrainGroup

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePlan:
    """How many prompts each shard draws, [n_shards] each.

    ``short_recent`` prompts were meant to be recent and are not, because there were too few.
    ``repeated_prompts`` are drawn although they are part of the step already, because there are fewer
    prompts than the step needs.
    """

    n_recent: tuple[int, ...]
    n_replay: tuple[int, ...]
    short_recent: int
    repeated_prompts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What one shard gives to a step; how many groups were drawn with replacement, or have equal rewards."""

    groups: tuple[TrainGroup, ...]
    with_replacement: int
    equal_reward_groups: int


class Sampler(Protocol):
    """The seam between the shards and a step."""

    def report(self, shard: ReplayShard, history: PolicyHistory, step: int) -> ShardReport: ...

    def available(self, reports: Sequence[ShardReport]) -> int:
        """How many different prompts could be drawn now; a step waits until they are enough."""
        ...

    def plan(self, reports: Sequence[ShardReport], n_prompts: int, seed: int) -> SamplePlan:
        """A plan for ``n_prompts`` over all shards; ValueError where there is nothing to draw."""
        ...

    def draw(
        self,
        shard: ReplayShard,
        n_recent: int,
        n_replay: int,
        k: int,
        rng: np.random.Generator,
        history: PolicyHistory,
        step: int,
    ) -> Draw:
        """This shard's groups of ``k`` rollouts. The shard must be as it was when it reported."""
        ...


def make_sampler(settings: config_sections.Sampler) -> Sampler:
    """The sampler that ``buffer.sampler`` names."""
    if isinstance(settings, config_sections.FifoSampler):
        return Fifo()
    return RewardRecency(settings)


def shard_rng(seed: int, shard_index: int) -> np.random.Generator:
    """The generator of one shard's draw in the step that ``seed`` belongs to."""
    return np.random.default_rng([seed, shard_index])


class RewardRecency:
    """Recent prompts with probability m, fresh ones first; the others by reward from their whole pools."""

    def __init__(self, settings: config_sections.RewardRecencySampler) -> None:
        self._settings = settings

    def report(self, shard: ReplayShard, history: PolicyHistory, step: int) -> ShardReport:
        return shard.report(history, step, self._settings.recent_age_steps)

    def available(self, reports: Sequence[ShardReport]) -> int:
        return sum(report.n_prompts for report in reports)

    def plan(self, reports: Sequence[ShardReport], n_prompts: int, seed: int) -> SamplePlan:
        prompts = np.array([r.n_prompts for r in reports], np.int64)
        recent = np.array([r.n_recent for r in reports], np.int64)
        fresh = np.array([r.n_fresh for r in reports], np.int64)
        total = int(prompts.sum())
        if total == 0:
            raise ValueError("no shard holds a rollout, so no step can be planned; wait for searchers")
        rng = np.random.default_rng(seed)
        wanted = int(rng.binomial(n_prompts, self._settings.recent_probability))
        n_recent = min(wanted, int(recent.sum()))
        n_fresh = min(n_recent, int(fresh.sum()))
        recent_draws = _split(fresh, n_fresh, rng) + _split(recent - fresh, n_recent - n_fresh, rng)

        # Fewer prompts than the step needs: all of them once, then whole further rounds, then a part of one.
        repeated = max(0, n_prompts - total)
        rounds, rest = divmod(repeated, total)
        replay_draws = _split(prompts - recent_draws, n_prompts - n_recent - repeated, rng)
        replay_draws += rounds * prompts + _split(prompts, rest, rng)
        return SamplePlan(
            n_recent=tuple(recent_draws.tolist()),
            n_replay=tuple(replay_draws.tolist()),
            short_recent=wanted - n_recent,
            repeated_prompts=repeated,
        )

    def draw(
        self,
        shard: ReplayShard,
        n_recent: int,
        n_replay: int,
        k: int,
        rng: np.random.Generator,
        history: PolicyHistory,
        step: int,
    ) -> Draw:
        recent = self._choose_recent(shard, n_recent, rng, history, step)
        draws = [(pool, *_draw_uniform(pool.rollouts, k, rng)) for pool in recent]
        for prompt_id in _choose_replay(shard.prompt_ids(), {p.prompt_id for p in recent}, n_replay, rng):
            pool = shard.pool(prompt_id)
            draws.append((pool, *_draw_by_reward(pool.rollouts, k, self._settings.inverse_temperature, rng)))
        return _as_draw(draws)

    def _choose_recent(
        self, shard: ReplayShard, n_recent: int, rng: np.random.Generator, history: PolicyHistory, step: int
    ) -> list[PoolView]:
        """Fresh pools, the soonest too old first, so that none starves; then others at random."""
        pools = list(shard.recent_pools(history, step, self._settings.recent_age_steps))
        if n_recent > len(pools):
            raise ValueError(f"{n_recent} recent prompts are planned but the shard has {len(pools)}")
        fresh = sorted((p for p in pools if p.fresh), key=_oldest_untrained)
        others = [p for p in pools if not p.fresh]
        n_others = max(0, n_recent - len(fresh))
        chosen = rng.choice(len(others), n_others, replace=False) if n_others else []
        return fresh[:n_recent] + [others[i] for i in chosen]


class Fifo:
    """Each rollout once, the oldest first: the K oldest untrained rollouts of the prompt that waits longest.

    A prompt can be drawn while it has a visit that was not trained on. What a visit leaves over, where it
    brought more than K rollouts, joins the prompt's next visit; where it brought fewer, some are drawn again
    within the group.
    """

    def report(self, shard: ReplayShard, history: PolicyHistory, step: int) -> ShardReport:
        return shard.report_fresh()

    def available(self, reports: Sequence[ShardReport]) -> int:
        return sum(report.n_fresh for report in reports)

    def plan(self, reports: Sequence[ShardReport], n_prompts: int, seed: int) -> SamplePlan:
        available = self.available(reports)
        if available < n_prompts:
            raise ValueError(f"{n_prompts} prompts are planned but only {available} wait; wait for searchers")
        fresh = np.array([report.n_fresh for report in reports], np.int64)
        draws = _split(fresh, n_prompts, np.random.default_rng(seed))
        return SamplePlan(
            n_recent=tuple(draws.tolist()),
            n_replay=(0,) * len(reports),
            short_recent=0,
            repeated_prompts=0,
        )

    def draw(
        self,
        shard: ReplayShard,
        n_recent: int,
        n_replay: int,
        k: int,
        rng: np.random.Generator,
        history: PolicyHistory,
        step: int,
    ) -> Draw:
        pools = sorted(shard.fresh_pools(), key=lambda pool: min(h.arrival for h in _untrained(pool)))
        if n_replay or n_recent > len(pools):
            raise ValueError(f"{n_recent} + {n_replay} prompts are planned but {len(pools)} wait in the shard")
        draws = []
        for pool in pools[:n_recent]:
            waiting = tuple(sorted(_untrained(pool), key=lambda h: h.arrival))
            if sum(h.copies for h in waiting) < k:
                draws.append((_with_rollouts(pool, waiting), *_draw_uniform(waiting, k, rng)))
            else:
                before = np.cumsum([0, *(h.copies for h in waiting)])[:-1]
                copies = np.clip(k - before, 0, [h.copies for h in waiting])
                draws.append((_with_rollouts(pool, waiting), copies, False))
        return _as_draw(draws)


def _split(available: Counts, n: int, rng: np.random.Generator) -> Counts:
    """``n`` draws without replacement from shards that hold ``available``: how many fall on each."""
    return rng.multivariate_hypergeometric(available, n, method="marginals").astype(np.int64)


def _choose_replay(prompt_ids: list[str], taken: set[str], n: int, rng: np.random.Generator) -> list[str]:
    """``n`` prompts without replacement, those not ``taken`` first; then further rounds over all."""
    left = [p for p in prompt_ids if p not in taken] if taken else prompt_ids
    chosen: list[str] = []
    while len(chosen) < n:
        n_now = min(n - len(chosen), len(left))
        chosen += [left[i] for i in rng.choice(len(left), n_now, replace=False)] if n_now else []
        left = prompt_ids
    return chosen


def _draw_uniform(rollouts: tuple[HeldRollout, ...], k: int, rng: np.random.Generator) -> tuple[Counts, bool]:
    """How often each is drawn in ``k`` draws from the multiset of ``copies``, and if with replacement."""
    copies = np.array([h.copies for h in rollouts], np.int64)
    if copies.sum() < k:
        return rng.multinomial(k, copies / copies.sum()), True
    return rng.multivariate_hypergeometric(copies, k, method="marginals"), False


def _draw_by_reward(
    rollouts: tuple[HeldRollout, ...], k: int, inverse_temperature: float, rng: np.random.Generator
) -> tuple[Counts, bool]:
    """As ``_draw_uniform``, each copy with weight exp(inverse_temperature * reward), one draw after another.

    Without replacement by the Gumbel trick: the k largest of log-weight + noise are distributed as k
    successive draws. It stays exact where a weight is too small for a float.
    """
    copies = np.array([h.copies for h in rollouts], np.int64)
    logits = inverse_temperature * np.array([h.rollout.reward for h in rollouts], np.float64)
    if copies.sum() < k:
        weights = copies * np.exp(logits - logits.max())
        return rng.multinomial(k, weights / weights.sum()), True
    owner = np.repeat(np.arange(len(rollouts)), copies)
    keys = logits[owner] + rng.gumbel(size=len(owner))
    top = np.argpartition(-keys, k - 1)[:k]
    return np.bincount(owner[top], minlength=len(rollouts)), False


def _untrained(pool: PoolView) -> list[HeldRollout]:
    return [h for h in pool.rollouts if not h.trained]


def _oldest_untrained(pool: PoolView) -> tuple[object, int]:
    return min(h.age_key for h in _untrained(pool))


def _with_rollouts(pool: PoolView, rollouts: tuple[HeldRollout, ...]) -> PoolView:
    return PoolView(
        prompt_id=pool.prompt_id,
        prompt_token_ids=pool.prompt_token_ids,
        rollouts=rollouts,
        fresh=pool.fresh,
    )


def _as_draw(draws: list[tuple[PoolView, Counts, bool]]) -> Draw:
    groups = tuple(_as_group(pool, copies) for pool, copies, _ in draws)
    return Draw(
        groups=groups,
        with_replacement=sum(replaced for _, _, replaced in draws),
        equal_reward_groups=sum(len({r.reward for r in group.rollouts}) == 1 for group in groups),
    )


def _as_group(pool: PoolView, copies: Counts) -> TrainGroup:
    drawn = [(h.rollout, n) for h, n in zip(pool.rollouts, copies.tolist(), strict=True) if n > 0]
    return TrainGroup(
        prompt_id=pool.prompt_id,
        prompt_token_ids=pool.prompt_token_ids,
        rollouts=tuple(rollout for rollout, _ in drawn),
        copies=tuple(n for _, n in drawn),
    )
