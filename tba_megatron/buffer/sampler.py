"""What is trained on next: prompts are chosen over all shards, then each shard draws K rollouts of its own ones.

All randomness is keyed by what it is for (``keyed``), so a step's groups are the same however prompts are dealt to
shards, and in whatever order a shard keeps its rows. TBA (arXiv 2503.18929, section 4.1) switches per query between
recent rollouts, with probability m, and the whole pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tba_megatron import config_sections
from tba_megatron.buffer import keyed
from tba_megatron.buffer.choice import (
    Chosen,
    Keys,
    Offer,
    Shards,
    first_n,
    merge,
    tie_breaks,
    uniform_rounds,
)
from tba_megatron.buffer.draws import Draw, Floats64, Pools, by_reward, log_weights, oldest, whole_draw
from tba_megatron.buffer.prompts import BINS, bins_of
from tba_megatron.buffer.recency import nothing_recent, recent_part
from tba_megatron.buffer.rows import turns
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.ragged import Ints, keep, offsets
from tba_megatron.types import PolicyHistory, ShardReport

_PROMPTS = 4  # what noise is for
_AHEAD_STEPS = 1  # age up to which prompts hold searchers back where steps draw without regard to age


class Sampler(Protocol):
    """The seam between the shards and a step.

    ``fresh_first``: a step takes fresh prompts before others. ``repeats``: a step of more prompts than there are draws
    some again; otherwise it has to wait for them.
    """

    fresh_first: bool
    repeats: bool

    def report(self, shard: ReplayShard, history: PolicyHistory, step: int) -> ShardReport:
        """Counts of a shard. ``n_fresh`` holds searchers back (``search.max_age_steps``): prompts that a sampler may
        leave for ever must not be fresh for ever.
        """
        ...

    def available(self, reports: Sequence[ShardReport]) -> int:
        """How many different prompts could be drawn now; a step waits until they are enough.

        Rollouts that were part of ``buffer.max_reuse`` steps are not drawn again, nor are prompts that have no others.
        """
        ...

    def draw(
        self,
        shard: ReplayShard,
        shards: Shards,
        n_prompts: int,
        k: int,
        seed: int,
        history: PolicyHistory,
        step: int,
    ) -> Draw:
        """This shard's part of ``n_prompts`` groups of ``k`` rollouts; changes nothing.

        Collective: every shard calls it with the same numbers. ValueError, on all of them, where there is too little.
        """
        ...


def make_sampler(settings: config_sections.Sampler) -> Sampler:
    """The sampler that ``buffer.sampler`` names."""
    if isinstance(settings, config_sections.FifoSampler):
        return Fifo()
    if isinstance(settings, config_sections.PrioritisedSampler):
        return Prioritised(settings)
    if isinstance(settings, config_sections.UniformSampler):
        return Uniform()
    return RewardRecency(settings)


class RewardRecency:
    """Recent prompts with probability m, fresh ones first; the others uniformly, by reward from their whole pools."""

    fresh_first, repeats = True, True

    def __init__(self, settings: config_sections.RewardRecencySampler) -> None:
        self._settings = settings

    def report(self, shard: ReplayShard, history: PolicyHistory, step: int) -> ShardReport:
        return shard.report(history, step, self._settings.recent_age_steps)

    def available(self, reports: Sequence[ShardReport]) -> int:
        return sum(report.n_prompts for report in reports)

    def draw(
        self,
        shard: ReplayShard,
        shards: Shards,
        n_prompts: int,
        k: int,
        seed: int,
        history: PolicyHistory,
        step: int,
    ) -> Draw:
        settings = self._settings
        rng = np.random.default_rng(seed)
        wanted = int(rng.binomial(n_prompts, settings.recent_probability_at(step + 1)))  # ``step`` of them are made
        part = recent_part(shard, history, step, settings.recent_age_steps) if wanted else nothing_recent()
        best, offer = part.offer(shard, wanted, seed)
        surveys = shards.gather((shard.prompts.histogram().astype(np.int32), len(part.prompts), offer))
        histogram = np.array([counts for counts, _, _ in surveys], np.int64).sum(axis=0)
        total = _something(int(histogram.sum()))
        n_recent = min(wanted, sum(n for _, n, _ in surveys))

        front = merge([offer for _, _, offer in surveys], n_recent)
        places, offered = front.of_shard(shards.index)
        recent = best[offered]
        rest = uniform_rounds(
            shard,
            shards,
            histogram=histogram - np.bincount(bins_of(front.keys), minlength=BINS),
            histogram_of_all=histogram,
            taken=part.prompts[recent],
            n_taken=n_recent,
            n_prompts=n_prompts,
            rng=rng,
        )
        chosen = Chosen.in_one_round(part.prompts[recent], places).then(rest)
        recent_rows, recent_sizes = part.pools(shard, recent)
        rest_rows, rest_sizes = shard.drawable_rows_of(rest.prompts)
        pools = Pools(
            rows=np.concatenate([recent_rows, rest_rows]),
            sizes=np.concatenate([recent_sizes, rest_sizes]),
            keys=shard.prompts.key[chosen.prompts],
            rounds=chosen.rounds,
        )
        temperatures = np.repeat([0.0, settings.inverse_temperature], [len(recent), len(rest.prompts)])
        return whole_draw(
            shard,
            chosen,
            by_reward(shard.rows, pools, k, temperatures, seed),
            short_recent=wanted - n_recent,
            repeated_prompts=max(0, n_prompts - total),
        )


class Uniform(RewardRecency):
    """All prompts alike, and the rollouts of each."""

    fresh_first = False

    def __init__(self) -> None:
        super().__init__(
            config_sections.RewardRecencySampler(
                recent_probability=0.0, inverse_temperature=0.0, recent_age_steps=_AHEAD_STEPS
            )
        )


class Prioritised:
    """All rollouts by reward, whatever their prompt; every step looks at all of them.

    A prompt's weight is the sum over its copies of exp(inverse_temperature * reward); prompts are drawn one after
    another without replacement, and then the rollouts of each by the same weights.
    """

    fresh_first, repeats = False, True

    def __init__(self, settings: config_sections.PrioritisedSampler) -> None:
        self._inverse_temperature = settings.inverse_temperature

    def report(self, shard: ReplayShard, history: PolicyHistory, step: int) -> ShardReport:
        return shard.report(history, step, _AHEAD_STEPS)

    def available(self, reports: Sequence[ShardReport]) -> int:
        return sum(report.n_prompts for report in reports)

    def draw(
        self,
        shard: ReplayShard,
        shards: Shards,
        n_prompts: int,
        k: int,
        seed: int,
        history: PolicyHistory,
        step: int,
    ) -> Draw:
        prompts, weights = self._prompt_weights(shard)
        keys = shard.prompts.key[prompts]
        best = first_n(n_prompts, *_successive(weights, keys, 0, seed))
        surveys = shards.gather((len(prompts), weights[best], keys[best]))
        total = _something(sum(n for n, _, _ in surveys))

        # With too few prompts for the step each shard has offered all that it has, so every round has what it needs.
        chosen = Chosen.in_one_round(best[:0], best[:0])
        for done in range(0, n_prompts, total):
            round_ = done // total
            offers = []
            for _, offered_weights, offered_keys in surveys:
                first, tie = _successive(offered_weights, offered_keys, round_, seed)
                offers.append(Offer(first=first, tie=tie, key=offered_keys))
            places, offered = merge(offers, min(total, n_prompts - done)).of_shard(shards.index)
            rounds = np.full(len(places), round_)
            chosen = chosen.then(Chosen(prompts=prompts[best[offered]], places=done + places, rounds=rounds))
        rows, sizes = shard.drawable_rows_of(chosen.prompts)
        pools = Pools(rows=rows, sizes=sizes, keys=shard.prompts.key[chosen.prompts], rounds=chosen.rounds)
        temperatures = np.full(len(sizes), self._inverse_temperature)
        return whole_draw(
            shard,
            chosen,
            by_reward(shard.rows, pools, k, temperatures, seed),
            short_recent=0,
            repeated_prompts=max(0, n_prompts - total),
        )

    def _prompt_weights(self, shard: ReplayShard) -> tuple[Ints, Floats64]:
        """(number, logarithm of the weight) of each prompt."""
        prompts = shard.prompts.drawable_numbers()
        if not len(prompts):
            return prompts, np.zeros(0)
        rows, sizes = shard.drawable_rows_of(prompts)
        starts = offsets(sizes)[:-1]
        logits = log_weights(shard.rows.reward[rows], self._inverse_temperature)
        largest = np.maximum.reduceat(logits, starts)
        with np.errstate(over="ignore"):  # a difference of -inf is a weight of 0
            shares = shard.rows.copies[rows] * np.exp(logits - np.repeat(largest, sizes))
        return prompts, largest + np.log(np.add.reduceat(shares, starts))


class Fifo:
    """Each rollout once, the oldest first: the K oldest untrained rollouts of the prompts that wait longest.

    A prompt can be drawn while it has a visit of which nothing was trained. What a visit leaves over, where it brought
    more than K rollouts, joins the prompt's next visit; where it brought fewer, some are drawn again within the group.
    """

    fresh_first, repeats = True, False

    def report(self, shard: ReplayShard, history: PolicyHistory, step: int) -> ShardReport:
        return shard.report_fresh()

    def available(self, reports: Sequence[ShardReport]) -> int:
        return sum(report.n_fresh for report in reports)

    def draw(
        self,
        shard: ReplayShard,
        shards: Shards,
        n_prompts: int,
        k: int,
        seed: int,
        history: PolicyHistory,
        step: int,
    ) -> Draw:
        prompts = shard.fresh_prompts()
        rows, sizes = _untrained(shard, prompts)
        turn = turns(shard.rows.version[rows])
        waits_since = np.minimum.reduceat(turn, offsets(sizes)[:-1]) if len(rows) else turn
        keys = shard.prompts.key[prompts]
        ties = tie_breaks(seed, keys)
        best = first_n(n_prompts, waits_since, ties)
        offer = Offer(first=waits_since[best], tie=ties[best], key=keys[best])
        surveys = shards.gather((len(prompts), offer))
        waiting = sum(n for n, _ in surveys)
        if waiting < n_prompts:
            raise ValueError(f"{n_prompts} prompts are to be drawn but only {waiting} wait; wait for searchers")

        places, offered = merge([offer for _, offer in surveys], n_prompts).of_shard(shards.index)
        chosen = Chosen.in_one_round(prompts[best[offered]], places)
        rows, sizes = _untrained(shard, chosen.prompts)
        pools = Pools(rows=rows, sizes=sizes, keys=shard.prompts.key[chosen.prompts], rounds=chosen.rounds)
        return whole_draw(shard, chosen, oldest(shard.rows, pools, k, seed), short_recent=0, repeated_prompts=0)


def _something(total: int) -> int:
    if total == 0:
        raise ValueError("no shard holds a rollout that may be drawn; wait for searchers")
    return total


def _successive(weights: Floats64, keys: Keys, round_: int, seed: int) -> tuple[Floats64, Keys]:
    """(first, tie) that order prompts as successive draws by the logarithms ``weights`` would."""
    hashes = keyed.hashed(seed, _PROMPTS, round_, keys)
    return -(weights + keyed.gumbel(hashes)), hashes


def _untrained(shard: ReplayShard, prompts: Ints) -> tuple[Ints, Ints]:
    """(rows, sizes) of the untrained rows of each prompt."""
    rows, sizes = shard.rows_of(prompts)
    return keep(rows, sizes, shard.rows.uses[rows] == 0)
