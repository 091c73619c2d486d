"""K rollouts of each prompt, for all prompts of a step at once.

N rows of pools that lie end to end, G pools. A rollout with c copies counts as c equal ones. Successive draws without
replacement are the K largest of logit + Gumbel noise (Efraimidis and Spirakis 2006, in logarithms): exact also where a
weight is too small for a float.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer import keyed
from tba_megatron.buffer.choice import Chosen
from tba_megatron.buffer.rows import RowColumns, turns
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.ragged import Ints, offsets, owners
from tba_megatron.rollout_batch import RolloutBatch

Floats64 = npt.NDArray[np.float64]
_WITHOUT, _WITH = 1, 2  # what noise is for
_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """What may be drawn: the rows of each prompt. A prompt that is drawn twice in a step has a pool for each round."""

    rows: Ints  # [N]
    sizes: Ints  # [G] rows, each at least 1
    keys: npt.NDArray[np.uint64]  # [G] of the prompts
    rounds: Ints  # [G]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The distinct rollouts of each group, in the order of their pool; S of all groups."""

    rows: Ints  # [S]
    copies: npt.NDArray[np.int32]  # [S] K in each group
    sizes: Ints  # [G]
    with_replacement: int  # groups whose pool held fewer than K


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What one shard gives to a step: G groups, S distinct rollouts.

    ``batch.copies_S`` sums to K in each group. Of this shard's groups, ``with_replacement`` come from pools of fewer
    than K copies, and ``equal_reward_groups`` have no reward to tell their rollouts apart. Of the whole step, equal on
    every shard: ``short_recent`` prompts were meant to be recent and are not, because there were too few;
    ``repeated_prompts`` are drawn although they are part of the step already, because there are fewer prompts.
    """

    batch: RolloutBatch
    rows: Ints  # [S] in the shard, until its next ``add``
    places: Ints  # [G] in the step: over all shards each of 0..n_prompts-1 once, whatever the number of shards
    with_replacement: int
    equal_reward_groups: int
    short_recent: int
    repeated_prompts: int


def by_reward(columns: RowColumns, pools: Pools, k: int, inverse_temperatures: Floats64, seed: int) -> Drawn:
    """K successive draws from each pool, weight exp(inverse_temperatures[G] * reward); 0 is uniform.

    A pool of fewer than K copies gives K independent draws.
    """
    rewards = columns.reward[pools.rows]
    logits = log_weights(rewards, np.repeat(inverse_temperatures, pools.sizes))
    copies = columns.copies[pools.rows].astype(np.int64)
    short = np.add.reduceat(copies, offsets(pools.sizes)[:-1]) < k if len(pools.sizes) else np.zeros(0, np.bool_)
    counts = np.zeros(len(pools.rows), np.int64)
    for chosen, draw in ((~short, _without_replacement), (short, _with_replacement)):
        if chosen.any():
            part = np.repeat(chosen, pools.sizes)
            noise = _noise(columns, _some(pools, chosen), seed)
            counts[part] = draw(pools.sizes[chosen], copies[part], logits[part], rewards[part], noise, k)
    return _drawn(pools, counts, int(short.sum()))


def oldest(columns: RowColumns, pools: Pools, k: int, seed: int) -> Drawn:
    """The first K copies of each pool, by ``turns`` and then arrival.

    A pool of fewer than K copies gives K independent uniform draws.
    """
    group = owners(pools.sizes)
    order = np.lexsort((columns.arrival[pools.rows], turns(columns.version[pools.rows]), group))
    pools = Pools(rows=pools.rows[order], sizes=pools.sizes, keys=pools.keys, rounds=pools.rounds)
    copies = columns.copies[pools.rows].astype(np.int64)
    before = offsets(copies)
    starts = before[offsets(pools.sizes)]
    counts = np.clip(k - (before[:-1] - np.repeat(starts[:-1], pools.sizes)), 0, copies)
    short = np.diff(starts) < k
    if short.any():
        part = np.repeat(short, pools.sizes)
        zeros = np.zeros(int(part.sum()))
        noise = _noise(columns, _some(pools, short), seed)
        counts[part] = _with_replacement(pools.sizes[short], copies[part], zeros, zeros, noise, k)
    return _drawn(pools, counts, int(short.sum()))


def whole_draw(shard: ReplayShard, chosen: Chosen, drawn: Drawn, *, short_recent: int, repeated_prompts: int) -> Draw:
    """The groups of the prompts ``chosen`` and what is to be told of them."""
    rewards, starts = shard.rows.reward[drawn.rows], offsets(drawn.sizes)[:-1]
    equal = np.zeros(0, np.bool_)
    if len(starts):
        equal = np.minimum.reduceat(rewards, starts) == np.maximum.reduceat(rewards, starts)
    return Draw(
        batch=shard.batch(chosen.prompts, drawn.sizes, drawn.rows, drawn.copies),
        rows=drawn.rows,
        places=chosen.places,
        with_replacement=drawn.with_replacement,
        equal_reward_groups=int(equal.sum()),
        short_recent=short_recent,
        repeated_prompts=repeated_prompts,
    )


def log_weights(rewards: Floats64, inverse_temperatures: Floats64 | float) -> Floats64:
    """inverse_temperature * reward; what would be infinite is the largest number there is."""
    with np.errstate(over="ignore"):
        return np.clip(inverse_temperatures * rewards, -_LARGEST, _LARGEST)


def _noise(columns: RowColumns, pools: Pools, seed: int) -> keyed.Hashes:
    """[N] what a rollout adds to its noise; copy or draw number are absorbed where they are known."""
    of_prompt = keyed.hashed(seed, pools.keys, pools.rounds)
    return keyed.absorb(np.repeat(of_prompt, pools.sizes), columns.content[pools.rows])


def _without_replacement(
    sizes: Ints, copies: Ints, logits: Floats64, rewards: Floats64, noise: keyed.Hashes, k: int
) -> Ints:
    """[N] how often each row is among the K largest of its group's copies."""
    # Of c copies at most k can be drawn: the j-th largest of c Gumbel numbers is -log of the j-th smallest of c
    # exponential ones, whose spacings are exponential (Renyi 1953), so however many copies cost no more than k.
    most = np.minimum(copies, k)
    turn = np.arange(int(most.max()))
    taken = turn < most[:, None]
    hashes = keyed.absorb(noise[:, None], _WITHOUT, turn)
    spacings = np.where(taken, -np.log(keyed.uniform(hashes)) / np.maximum(copies[:, None] - turn, 1), 0.0)
    scores = logits[:, None] - np.log(np.cumsum(spacings, axis=1))
    row = owners(most)
    group = owners(sizes)
    group_sizes = np.add.reduceat(most, offsets(sizes)[:-1])
    top = _largest(group[row], group_sizes, k, scores[taken], rewards[row], hashes[taken])
    return np.bincount(row[top], minlength=len(copies))


def _with_replacement(
    sizes: Ints, copies: Ints, logits: Floats64, rewards: Floats64, noise: keyed.Hashes, k: int
) -> Ints:
    """[N] how often each row is the largest of its group in K draws."""
    row = np.repeat(np.arange(len(copies)), k)
    turn = np.tile(np.arange(k), len(copies))
    hashes = keyed.absorb(noise[row], _WITH, turn)
    scores = (logits + np.log(copies))[row] + keyed.gumbel(hashes)
    group = owners(sizes)
    top = _largest(group[row] * k + turn, np.repeat(sizes, k), 1, scores, rewards[row], hashes)
    return np.bincount(row[top], minlength=len(copies))


def _largest(
    segment: Ints, sizes: Ints, n: int, scores: Floats64, rewards: Floats64, hashes: keyed.Hashes
) -> npt.NDArray[np.intp]:
    """Indices of the ``n`` largest scores of each segment.

    Scores so large that they swallow their noise are equal for equal rewards: then the hash decides.
    """
    order = np.lexsort((hashes, rewards, scores, segment))
    from_end = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(order))  # 1 for the largest of a segment
    return order[from_end <= n]


def _some(pools: Pools, chosen: npt.NDArray[np.bool_]) -> Pools:
    return Pools(
        rows=pools.rows[np.repeat(chosen, pools.sizes)],
        sizes=pools.sizes[chosen],
        keys=pools.keys[chosen],
        rounds=pools.rounds[chosen],
    )


def _drawn(pools: Pools, counts: Ints, with_replacement: int) -> Drawn:
    kept = counts > 0
    group = owners(pools.sizes)
    return Drawn(
        rows=pools.rows[kept],
        copies=counts[kept].astype(np.int32),
        sizes=np.bincount(group[kept], minlength=len(pools.sizes)),
        with_replacement=with_replacement,
    )
