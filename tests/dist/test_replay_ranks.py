"""The same rollouts in one, two and four shards: their leaders train the same global batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from list_shard import plain_rollout
from ranks import run_ranks

from tba_megatron import config_sections
from tba_megatron.buffer.choice import Shards
from tba_megatron.buffer.sampler import make_sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.trainer.exchange import exchange_groups, gather_on_leaders
from tba_megatron.transport.rollouts import owner_of
from tba_megatron.types import (
    PolicyHistory,
    PolicySpan,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    RolloutId,
    StopReason,
)

SAMPLERS = {
    "reward_recency": config_sections.RewardRecencySampler(recent_probability=0.6, recent_age_steps=2),
    "uniform": config_sections.UniformSampler(),
    "prioritised": config_sections.PrioritisedSampler(),
    "fifo": config_sections.FifoSampler(),
}
LIMITED = "{} at most {} times"
RUNS: dict[str, tuple[str, int]] = {name: (name, 0) for name in SAMPLERS} | {
    LIMITED.format(name, n): (name, n) for name in SAMPLERS if name != "fifo" for n in (1, 2)
}
N_STEPS, N_PROMPTS, K = 6, 8, 4
HISTORY = PolicyHistory(base_steps=(0,))


def batches() -> list[RolloutBatch]:
    """What arrives before each step: completions of few tokens, so that some are equal; few prompts at first."""
    rng = np.random.default_rng(11)
    sequence = 0
    arriving = []
    for step in range(N_STEPS):
        groups = []
        for p in rng.choice(30, size=12, replace=False).tolist():
            rollouts = []
            for _ in range(rng.integers(1, 8)):
                tokens = rng.integers(3, size=rng.integers(1, 5)).astype(np.int32)
                version = PolicyVersion(0, int(max(0, step - rng.integers(0, 4))))
                rollouts.append(
                    Rollout(
                        rollout_id=RolloutId("s0", sequence),
                        token_ids=tokens,
                        reward=float(rng.integers(4)),
                        stop_reason=StopReason.EOS,
                        spans=(PolicySpan(version=version, start=0, end=len(tokens)),),
                        source="test",
                    )
                )
                sequence += 1
            prompt = np.full(1 + p % 5, p, np.int32)
            groups.append(RolloutGroup(prompt_id=f"p{p}", prompt_token_ids=prompt, rollouts=tuple(rollouts)))
        arriving.append(RolloutBatch.of_groups(groups))
    return arriving


def shorter(batch: RolloutBatch) -> RolloutBatch:
    """Fewer prompts than a step takes."""
    return batch.select(range(N_PROMPTS - 3))


def contents(shard: ReplayShard) -> list[Any]:
    prompts = shard.prompts.all_numbers()
    rows, sizes = shard.rows_of(prompts)
    batch = shard.batch(prompts, sizes, rows, shard.rows.copies[rows])
    uses = iter(shard.rows.uses[rows].tolist())
    return [
        (
            group.prompt_id,
            [(plain_rollout(r), n, next(uses)) for r, n in zip(group.rollouts, group.copies, strict=True)],
        )
        for group in batch.train_groups()
    ]


def lived(groups: Any, arriving: list[RolloutBatch], names: list[str]) -> Any:
    """Of each run and step: the groups that this replica trains. Then what its shards hold."""
    trained: dict[str, list[Any]] = {}
    held: dict[str, list[Any]] = {}
    for name in names:
        kind, max_reuse = RUNS[name]
        sampler, shard = make_sampler(SAMPLERS[kind]), ReplayShard(1000, 12, max_reuse=max_reuse)
        trained[name] = []
        for step, batch in enumerate(arriving):
            if step == 0 and kind != "fifo":  # which takes what waits, and waits for more
                batch = shorter(batch)
            owners = [owner_of(prompt_id, groups.dp_size) for prompt_id in batch.prompt_ids]
            shard.add(batch.select([g for g, owner in enumerate(owners) if owner == groups.dp_rank]))
            draw = sampler.draw(
                shard,
                Shards(index=groups.dp_rank, gather=lambda value: gather_on_leaders(value, groups)),
                N_PROMPTS,
                K,
                100 + step,
                HISTORY,
                step,
            )
            shard.mark_trained(draw.rows)
            mine = exchange_groups(draw.batch, groups)
            trained[name].append([(g.prompt_id, [plain_rollout(r) for r in g.rollouts], g.copies) for g in mine])
        held[name] = contents(shard)
    return trained, held


def in_order(groups: list[Any]) -> list[Any]:
    """A prompt may be there more than once; rollouts of a group come in any order."""
    plain = [(prompt, sorted(zip(rollouts, copies, strict=True), key=repr)) for prompt, rollouts, copies in groups]
    return sorted(plain, key=repr)


@pytest.fixture(scope="module")
def alone():
    ((trained, held),) = run_ranks(lived, batches(), list(RUNS))
    return trained, held


@pytest.mark.parametrize("n_shards", [2, 4])
def test_every_number_of_shards_holds_and_trains_the_same(n_shards, alone):
    ranks = run_ranks(lived, batches(), list(RUNS), dp=n_shards)
    trained_alone, held_alone = alone
    for name in RUNS:
        for step in range(N_STEPS):
            parts = [trained[name][step] for trained, _ in ranks]
            assert [len(part) for part in parts] == [N_PROMPTS // n_shards] * n_shards
            assert in_order([group for part in parts for group in part]) == in_order(trained_alone[name][step]), (
                name,
                step,
            )
        union = sorted((prompt for _, held in ranks for prompt in held[name]), key=lambda prompt: prompt[0])
        assert union == sorted(held_alone[name], key=lambda prompt: prompt[0])
        assert min(len(held[name]) for _, held in ranks) > 0


def test_the_steps_are_worth_comparing(alone):
    trained, held = alone
    for name, steps in trained.items():
        assert len({repr(in_order(step)) for step in steps}) == N_STEPS
        prompts = [[prompt for prompt, *_ in step] for step in steps]
        assert all(len(set(step)) == N_PROMPTS for step in prompts[1:])
        assert (len(set(prompts[0])) < N_PROMPTS) == (name != "fifo")
        copies = [n for step in steps for *_, copies in step for n in copies]
        assert max(copies) > 1 and all(sum(copies) == K for step in steps for *_, copies in step)
        assert any(n > 1 for _, rollouts in held[name] for _, n, _ in rollouts)
        most = RUNS[name][1] or N_STEPS
        assert {True, False} == {uses > 0 for _, rollouts in held[name] for *_, uses in rollouts}
        assert max(uses for _, rollouts in held[name] for *_, uses in rollouts) <= most
    assert len({repr(steps) for steps in trained.values()}) == len(RUNS)
