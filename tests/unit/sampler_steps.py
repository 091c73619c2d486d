"""Steps drawn from one or several shards of a process, and their groups as plain values."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
from rollout_factory import NEW_RUN, RolloutFactory, as_batch, as_group

from tba_megatron.buffer.choice import Shards, alone
from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.sampler import Fifo, Prioritised, RewardRecency, Sampler, Uniform
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.config_sections import PrioritisedSampler, RewardRecencySampler
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.types import PolicyHistory, RolloutGroup

Group = tuple[str, tuple[tuple[int, int], ...]]  # prompt id, (first token, copies) of each rollout


def recency(m: float = 0.5, age: int = 2, inverse_temperature: float = 0.0) -> RewardRecency:
    return RewardRecency(
        RewardRecencySampler(recent_probability=m, recent_age_steps=age, inverse_temperature=inverse_temperature)
    )


def prioritised(inverse_temperature: float = 1.0) -> Prioritised:
    return Prioritised(PrioritisedSampler(inverse_temperature=inverse_temperature))


SAMPLERS: dict[str, Sampler] = {
    "reward_recency": recency(inverse_temperature=1.0),
    "uniform": Uniform(),
    "prioritised": prioritised(),
    "fifo": Fifo(),
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
every_sampler_but_fifo = pytest.mark.parametrize("sampler", list(SAMPLERS.values())[:3], ids=list(SAMPLERS)[:3])


def shard_of(*groups: RolloutGroup, max_reuse: int = 0) -> ReplayShard:
    """Each group comes in a message of its own."""
    shard = ReplayShard(1_000_000, 1_000_000, max_reuse=max_reuse)
    for group in groups:
        shard.add(as_batch(group))
    return shard


def pool(make: RolloutFactory, prompt_id: str, rewards: Sequence[float], *, step: int = 0, first: int = 0):
    """A group of one-token completions ``first``, ``first`` + 1, ... with these rewards."""
    return as_group(prompt_id, [make.rollout(first + i, reward=r, step=step) for i, r in enumerate(rewards)])


def one_prompt(prompt_id: str, rewards: Sequence[float] | np.ndarray) -> RolloutBatch:
    """A group of one-token completions 0, 1, ... of any number, without an object for each."""
    one = as_batch(pool(RolloutFactory(), prompt_id, rewards[:1]))
    n = len(rewards)
    names = [field.name for field in fields(one) if field.name[-2:] in ("_S", "_T", "_P")]
    columns = {name: np.repeat(getattr(one, name), n, axis=0) for name in names}
    columns |= {"token_ids_T": np.arange(n, dtype=np.int32), "sequence_S": np.arange(n)}
    columns |= {"reward_S": np.array(rewards, np.float64), "size_G": np.array([n], np.int32)}
    return replace(one, **columns)


def draw_one(
    sampler: Sampler,
    shard: ReplayShard,
    n_prompts: int,
    k: int,
    seed: int = 0,
    step: int = 0,
    history: PolicyHistory = NEW_RUN,
) -> Draw:
    return sampler.draw(shard, alone(), n_prompts, k, seed, history, step)


def draw_all(
    sampler: Sampler, shards: Sequence[ReplayShard], n_prompts: int, k: int, seed: int = 0, step: int = 0
) -> list[Draw]:
    """Each shard's part of a step; a thread for each shard, which exchange as ranks do."""
    n = len(shards)
    barrier = threading.Barrier(n, timeout=60)
    values: list[object] = [None] * n

    def shards_of(index: int) -> Shards:
        def gather(value: object) -> list:
            values[index] = value
            barrier.wait()
            everyone = list(values)
            barrier.wait()
            return everyone

        return Shards(index=index, gather=gather)

    def draw(index: int) -> Draw:
        return sampler.draw(shards[index], shards_of(index), n_prompts, k, seed, NEW_RUN, step)

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(draw, range(n)))


def groups_of(draw: Draw) -> list[Group]:
    return [
        (
            group.prompt_id,
            tuple((int(r.token_ids[0]), n) for r, n in zip(group.rollouts, group.copies, strict=True)),
        )
        for group in draw.batch.train_groups()
    ]


def tokens_of(draw: Draw, group: int = 0) -> Counter[int]:
    return Counter(dict(groups_of(draw)[group][1]))


def prompts_of(draw: Draw) -> str:
    """For prompts of one letter: all of them, in order."""
    return "".join(draw.batch.prompt_ids)


def step_of(draws: Sequence[Draw]) -> list[Group]:
    """The groups of all shards by their place in the step; fails unless every place is taken once."""
    placed = [item for draw in draws for item in zip(draw.places.tolist(), groups_of(draw), strict=True)]
    placed.sort()
    assert [place for place, _ in placed] == list(range(len(placed)))
    return [group for _, group in placed]
