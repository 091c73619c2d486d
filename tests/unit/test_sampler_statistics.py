"""Observed frequencies of draws against exact probabilities, by enumeration and the chi-square test.

A case passes where p > 1e-4. Seeds are fixed, so a result is always the same. Each outcome is a whole prompt set or a
whole group, and outcomes are independent, as the test requires.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import pytest
import torch
from rollout_factory import RolloutFactory, as_batch
from sampler_steps import draw_one, groups_of, pool, prompts_of, shard_of

from tba_megatron.buffer import prompts
from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.sampler import Prioritised, RewardRecency, Uniform, make_sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.config_sections import FifoSampler, PrioritisedSampler, RewardRecencySampler

LEVEL = 1e-4
STEPS = 600
NOW = 9  # optimizer step of the draws
OLD_REWARDS, NEW_REWARDS = (0.0, 0.3, 0.3, -0.2), (0.1, 0.4)
Outcome = Hashable


def p_value(observed: Mapping[Outcome, int], expected: Mapping[Outcome, float]) -> float:
    """Of Pearson's test. Outcomes of which fewer than 5 are expected count as one; an impossible one gives 0."""
    if any(expected.get(outcome, 0.0) <= 0 for outcome in observed):
        return 0.0
    n = sum(observed.values())
    if n == 0:
        return 1.0
    usual = [outcome for outcome, p in expected.items() if n * p >= 5]
    cells = [(observed.get(outcome, 0), n * expected[outcome]) for outcome in usual]
    rest = n - sum(e for _, e in cells)
    if rest > 1e-6 * n:
        cells.append((n - sum(o for o, _ in cells), rest))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    degrees = len(cells) - 1
    if degrees == 0:
        return 1.0
    half = [torch.tensor(value / 2, dtype=torch.float64) for value in (degrees, statistic)]
    return float(torch.special.gammaincc(*half))


def successive(weights: Sequence[float], k: int) -> dict[tuple[int, ...], float]:
    """Probability of each set of ``k`` draws one after another without replacement, as sorted indices."""
    found: Counter[tuple[int, ...]] = Counter()
    for order in itertools.permutations(range(len(weights)), k):
        left, p = sum(weights), 1.0
        for i in order:
            p *= weights[i] / left
            left -= weights[i]
        found[tuple(sorted(order))] += p
    return found


def independent(weights: Sequence[float], k: int) -> dict[tuple[int, ...], float]:
    """Probability of each multiset of ``k`` draws with replacement."""
    found: Counter[tuple[int, ...]] = Counter()
    for order in itertools.product(range(len(weights)), repeat=k):
        found[tuple(sorted(order))] += math.prod(weights[i] / sum(weights) for i in order)
    return found


def labelled(law: Mapping[tuple[int, ...], float], labels: Sequence[int]) -> dict[tuple[int, ...], float]:
    """``law`` where copies of a rollout cannot be told apart."""
    found: Counter[tuple[int, ...]] = Counter()
    for outcome, p in law.items():
        found[tuple(sorted(labels[i] for i in outcome))] += p
    return found


def multiset(group) -> tuple[int, ...]:
    return tuple(sorted(token for token, n in group[1] for _ in range(n)))


def law_of_group(rewards: Sequence[float], labels: Sequence[int], k: int, inverse_temperature: float):
    weights = [math.exp(inverse_temperature * r) for r in rewards]
    return labelled((successive if len(weights) >= k else independent)(weights, k), labels)


# Prompts and rollouts of reward_recency


def mixed_shard() -> ReplayShard:
    """Prompts a to c have 4 old and 2 recent rollouts (tokens 10 and 11, of which 10 twice), d to f only old ones.

    Every visit was trained on, so that no prompt is fresh.
    """
    make = RolloutFactory()
    shard = shard_of()
    for prompt in "abcdef":
        shard.add(as_batch(pool(make, prompt, OLD_REWARDS, step=0)))
        if prompt in "abc":
            shard.add(as_batch(pool(make, prompt, NEW_REWARDS, step=NOW, first=10)))
            shard.add(as_batch(pool(make, prompt, NEW_REWARDS[:1], step=NOW, first=10)))
    shard.mark_trained(shard.rows.living())
    return shard


RECENT_POOL = ((*NEW_REWARDS, NEW_REWARDS[0]), (10, 11, 10))
WHOLE_POOL = ((*OLD_REWARDS, *RECENT_POOL[0]), (0, 1, 2, 3, *RECENT_POOL[1]))
OLD_POOL = (OLD_REWARDS, (0, 1, 2, 3))


def law_of_prompts(m: float, n_prompts: int) -> dict[Outcome, float]:
    """Of (recent prompts, other prompts); the number of recent ones is binomial, a prompt is in one of the two."""
    law: Counter[Outcome] = Counter()
    for n in range(n_prompts + 1):
        p_n = math.comb(n_prompts, n) * m**n * (1 - m) ** (n_prompts - n)
        for recent in itertools.combinations("abc", n):
            rest = [p for p in "abcdef" if p not in recent]
            others = list(itertools.combinations(rest, n_prompts - n))
            for other in others:
                law[recent, other] += p_n / math.comb(3, n) / len(others)
    return {outcome: p for outcome, p in law.items() if p > 0}


def recency(m: float, inverse_temperature: float) -> RewardRecency:
    return RewardRecency(
        RewardRecencySampler(recent_probability=m, recent_age_steps=2, inverse_temperature=inverse_temperature)
    )


def observe(m: float, inverse_temperature: float) -> dict[str, Counter[Outcome]]:
    """Of many steps of 3 prompts and K = 2: prompts, and groups by where they were drawn from.

    How many prompts of a step are recent is the first number of its generator; places tell which they are.
    """
    shard, sampler = mixed_shard(), recency(m, inverse_temperature)
    found: dict[str, Counter[Outcome]] = {name: Counter() for name in ("prompts", "recent", "whole", "old")}
    for seed in range(STEPS):
        groups = groups_of(draw_one(sampler, shard, 3, 2, seed, NOW))
        n_recent = int(np.random.default_rng(seed).binomial(3, m))
        ids = [prompt_id for prompt_id, _ in groups]
        found["prompts"][tuple(sorted(ids[:n_recent])), tuple(sorted(ids[n_recent:]))] += 1
        found["recent"].update(map(multiset, groups[:n_recent]))
        found["whole"].update(multiset(group) for group in groups[n_recent:] if group[0] in "abc")
        found["old"].update(multiset(group) for group in groups[n_recent:] if group[0] in "def")
    return found


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("m", [0.0, 0.5, 0.95, 1.0])
def test_prompts_and_rollouts_of_reward_recency_have_their_exact_frequencies(m: float, inverse_temperature: float):
    found = observe(m, inverse_temperature)
    assert p_value(found["prompts"], law_of_prompts(m, 3)) > LEVEL
    assert p_value(found["recent"], law_of_group(*RECENT_POOL, 2, 0.0)) > LEVEL
    assert p_value(found["whole"], law_of_group(*WHOLE_POOL, 2, inverse_temperature)) > LEVEL
    assert p_value(found["old"], law_of_group(*OLD_POOL, 2, inverse_temperature)) > LEVEL
    assert found["prompts"].total() == STEPS
    assert [found[name].total() > 0 for name in ("recent", "whole", "old")] == [m > 0, m < 1, m < 1]


def test_the_statistics_see_a_wrong_law():
    found = observe(0.5, 5.0)
    assert p_value(found["prompts"], law_of_prompts(0.65, 3)) < LEVEL  # another m
    assert p_value(found["recent"], law_of_group(NEW_REWARDS, (10, 11), 2, 0.0)) < LEVEL  # copies forgotten
    assert p_value(found["recent"], law_of_group(*RECENT_POOL, 2, 5.0)) < LEVEL  # rewards where they do not count
    assert p_value(found["whole"], law_of_group(*WHOLE_POOL, 2, 3.0)) < LEVEL  # another temperature
    assert p_value(found["old"], independent([math.exp(5 * r) for r in OLD_REWARDS], 2)) < LEVEL  # with replacement
    assert p_value(found["old"], law_of_group(*OLD_POOL, 2, 3.0)) < LEVEL


def test_a_group_from_too_small_a_pool_is_independent_draws():
    make = RolloutFactory()
    shard = shard_of(*(pool(make, prompt, (0.0, 0.0, 1.0)) for prompt in "abcd"))
    shard.add(as_batch(*(pool(make, prompt, (0.0,)) for prompt in "abcd")))  # token 0 once more
    found: Counter[Outcome] = Counter()
    for seed in range(STEPS):
        found.update(map(multiset, groups_of(draw_one(recency(0.0, 1.0), shard, 4, 5, seed))))
    law = law_of_group((0.0, 0.0, 1.0, 0.0), (0, 1, 2, 0), 5, 1.0)
    assert p_value(found, law) > LEVEL
    assert p_value(found, law_of_group((0.0, 0.0, 1.0), (0, 1, 2), 5, 1.0)) < LEVEL


def test_the_groups_of_a_step_and_of_its_rounds_are_independent():
    make = RolloutFactory()
    shard = shard_of(pool(make, "a", (0.0,) * 4), pool(make, "b", (0.0,) * 4))
    pairs: Counter[Outcome] = Counter()
    rounds: Counter[Outcome] = Counter()
    for seed in range(4 * STEPS):
        groups = dict[str, list[int]](a=[], b=[])
        for prompt, rollouts in groups_of(draw_one(Uniform(), shard, 4, 1, seed)):
            groups[prompt].append(rollouts[0][0])
        pairs[groups["a"][0], groups["b"][0]] += 1
        rounds[tuple(groups["a"])] += 1
    law = dict.fromkeys(itertools.product(range(4), repeat=2), 1 / 16)
    assert p_value(pairs, law) > LEVEL
    assert p_value(rounds, law) > LEVEL


def test_uniform_ignores_rewards_recency_and_the_size_of_pools():
    chosen: Counter[Outcome] = Counter()
    groups: Counter[Outcome] = Counter()
    shard = mixed_shard()
    for seed in range(STEPS):
        drawn = groups_of(draw_one(Uniform(), shard, 2, 2, seed, NOW))
        chosen[tuple(sorted(p for p, _ in drawn))] += 1
        groups.update(multiset(group) for group in drawn if group[0] in "abc")
    assert p_value(chosen, dict.fromkeys(itertools.combinations("abcdef", 2), 1 / 15)) > LEVEL
    assert p_value(groups, law_of_group(*WHOLE_POOL, 2, 0.0)) > LEVEL


def test_prompts_are_uniform_where_bins_hold_many_and_keys_are_equal(monkeypatch: pytest.MonkeyPatch):
    # Two bins of 20 prompts; keys by threes equal.
    monkeypatch.setattr(prompts, "prompt_key", lambda prompt_id: (int(prompt_id) % 2 << 63) + int(prompt_id) // 6)
    make, n = RolloutFactory(), 40
    shard = shard_of(*(pool(make, f"{i}", (0.0,)) for i in range(n)))
    found = Counter(draw_one(Uniform(), shard, 1, 1, seed).batch.prompt_ids for seed in range(3 * STEPS))
    assert p_value(found, {(f"{i}",): 1 / n for i in range(n)}) > LEVEL


# Prioritised


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, 5.0])
def test_prompts_and_rollouts_of_prioritised_have_their_exact_frequencies(inverse_temperature: float):
    pools = {"a": (0.0, 0.5), "b": (0.2,), "c": (0.1, 0.1, 0.0), "d": (0.6,), "e": (-0.3, -0.1)}
    make = RolloutFactory()
    shard = shard_of(*(pool(make, prompt, rewards) for prompt, rewards in pools.items()))
    shard.add(as_batch(pool(make, "b", (0.2,)), pool(make, "c", (0.1,))))  # b's only and c's first rollout twice
    rewards = {**pools, "b": (0.2, 0.2), "c": (0.1, 0.1, 0.0, 0.1)}
    chosen: Counter[Outcome] = Counter()
    groups: Counter[Outcome] = Counter()
    sampler = Prioritised(PrioritisedSampler(inverse_temperature=inverse_temperature))
    for seed in range(2 * STEPS):
        drawn = groups_of(draw_one(sampler, shard, 2, 2, seed))
        chosen["".join(sorted(p for p, _ in drawn))] += 1
        groups.update(multiset(group) for group in drawn if group[0] == "c")

    def law(temperature: float) -> dict[Outcome, float]:
        weights = [sum(math.exp(temperature * r) for r in rewards[p]) for p in pools]
        return {"".join("abcde"[i] for i in pair): p for pair, p in successive(weights, 2).items()}

    assert p_value(chosen, law(inverse_temperature)) > LEVEL
    assert p_value(groups, law_of_group(rewards["c"], (0, 1, 2, 0), 2, inverse_temperature)) > LEVEL
    assert p_value(chosen, law(inverse_temperature + 1.5)) < LEVEL
    unweighted = {"".join(pair): 0.1 for pair in itertools.combinations("abcde", 2)}
    assert p_value(chosen, unweighted) < LEVEL


# Fifo and ties


def test_prompts_that_wait_equally_long_are_taken_in_random_order():
    make = RolloutFactory()
    shard = shard_of(*(pool(make, prompt, (0.0,)) for prompt in "abcd"))
    for sampler in (make_sampler(FifoSampler()), recency(1.0, 0.0)):
        draws: list[Draw] = [draw_one(sampler, shard, 2, 1, seed) for seed in range(2 * STEPS)]
        law: dict[Outcome, float] = {"".join(pair): 1 / 12 for pair in itertools.permutations("abcd", 2)}
        assert p_value(Counter(map(prompts_of, draws)), law) > LEVEL
