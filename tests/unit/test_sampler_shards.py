import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factory import RolloutFactory, as_batch, as_group
from sampler_steps import SAMPLERS, Group, draw_all, draw_one, every_sampler, groups_of, pool, shard_of, step_of

from tba_megatron.buffer import prompts
from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.sampler import Fifo, Sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.shard_state import SavedShard, restore, to_columns
from tba_megatron.types import PolicyHistory

# The same step on any number of shards

REWARDS = st.sampled_from([0.0, 1.0, -0.5, 3.0])
MESSAGES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 4), st.lists(st.tuples(st.integers(0, 5), REWARDS), min_size=1)),
    min_size=1,
    max_size=25,
)
Message = tuple[int, int, list[tuple[int, float]]]  # prompt, step, (token, reward) of each rollout
NOW = 4


def dealt(messages: list[Message], owners: list[int], max_reuse: int = 0) -> list[ReplayShard]:
    make = RolloutFactory()
    shards = [shard_of(max_reuse=max_reuse) for _ in range(max(owners) + 1)]
    for prompt, step, rollouts in messages:
        group = as_group(f"q{prompt}", [make.rollout(token, reward=r, step=step) for token, r in rollouts])
        shards[owners[prompt]].add(as_batch(group))
    return shards


def steps_of(sampler: Sampler, shards: list[ReplayShard], n_prompts: int, k: int, seed: int) -> list[object]:
    """Three steps, the rollouts of each trained on: groups and counts. Ends where nothing may be drawn any more."""
    seen: list[object] = []
    history = PolicyHistory(base_steps=(0,))
    for step in range(3):
        available = sampler.available([sampler.report(shard, history, NOW) for shard in shards])
        if available == 0 and not isinstance(sampler, Fifo):
            return [*seen, "waits"]
        n = min(n_prompts, available) if isinstance(sampler, Fifo) else n_prompts
        draws = draw_all(sampler, shards, n, k, seed + step, NOW)
        assert {draw.repeated_prompts for draw in draws} == {max(0, n - available)}
        for shard, draw in zip(shards, draws, strict=True):
            assert shard.may_draw(draw.rows).all()
            shard.mark_trained(draw.rows)
        groups = step_of(draws)
        assert len(groups) == n
        assert all(sum(copies for _, copies in rollouts) == k for _, rollouts in groups)
        counts = [sum(getattr(d, name) for d in draws) for name in ("with_replacement", "equal_reward_groups")]
        everywhere = {(draw.short_recent, draw.repeated_prompts) for draw in draws}
        assert len(everywhere) == 1
        seen.append((groups, counts, everywhere))
    return seen


@every_sampler
@settings(max_examples=40, derandomize=True)
@given(
    messages=MESSAGES,
    two=st.lists(st.integers(0, 1), min_size=10, max_size=10),
    four=st.lists(st.integers(0, 3), min_size=10, max_size=10),
    n_prompts=st.integers(1, 12),
    k=st.integers(1, 6),
    seed=st.integers(0, 2**70),
    max_reuse=st.sampled_from([0, 1, 2]),
)
def test_the_number_of_shards_changes_placement_only(
    sampler: Sampler,
    messages: list[Message],
    two: list[int],
    four: list[int],
    n_prompts: int,
    k: int,
    seed: int,
    max_reuse: int,
):
    one = steps_of(sampler, dealt(messages, [0] * 10, max_reuse), n_prompts, k, seed)
    for owners in ([*two[:9], 1], [*four[:9], 3]):
        assert steps_of(sampler, dealt(messages, owners, max_reuse), n_prompts, k, seed) == one


def in_any_order(draw: Draw) -> list[Group]:
    return [(prompt, tuple(sorted(rollouts))) for prompt, rollouts in groups_of(draw)]


@every_sampler
@settings(max_examples=30, derandomize=True)
@given(messages=MESSAGES, order=st.randoms(use_true_random=False), seed=st.integers(0, 1000))
def test_the_order_of_rows_and_prompts_does_not_matter(sampler: Sampler, messages: list[Message], order, seed: int):
    messages = [(prompt, step, list(dict(rollouts).items())) for prompt, step, rollouts in messages]
    messages = list({(prompt, step): (prompt, step, rollouts) for prompt, step, rollouts in messages}.values())
    messages.sort(key=lambda message: message[1])
    # Prompts change places, and, but for fifo that goes by it, the rollouts that arrive together.
    mixed = sorted(order.sample(messages, len(messages)), key=lambda message: message[1])
    if not isinstance(sampler, Fifo):
        mixed = [(prompt, step, order.sample(rollouts, len(rollouts))) for prompt, step, rollouts in mixed]
    n_prompts = len({prompt for prompt, _, _ in messages})
    draws = [draw_one(sampler, dealt(m, [0] * 10)[0], n_prompts, 3, seed, NOW) for m in (messages, mixed)]
    assert in_any_order(draws[0]) == in_any_order(draws[1])


@every_sampler
def test_the_same_seed_gives_the_same_draw_and_another_seed_another(sampler: Sampler):
    make = RolloutFactory()
    shard = shard_of(*(pool(make, f"q{i}", [0.0, 0.5, 1.0, 1.5], step=9) for i in range(30)))
    draws = [groups_of(draw_one(sampler, shard, 10, 2, seed, 9)) for seed in (1, 1, 2, 3, 4)]
    assert draws[0] == draws[1]
    assert len({str(draw) for draw in draws}) == 4


def test_prompts_with_equal_keys_are_drawn_once_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "prompt_key", lambda prompt_id: 7 << 52)
    for sampler in SAMPLERS.values():
        make = RolloutFactory()
        groups = [pool(make, prompt, [0.0, 1.0], step=9 * (prompt in "ace")) for prompt in "abcdef"]
        shards = [shard_of(*groups[:2]), shard_of(*groups[2:])]
        for seed in range(10):
            step = step_of(draw_all(sampler, shards, 6, 2, seed, 9))
            assert sorted(prompt for prompt, _ in step) == list("abcdef")
            step = step_of(draw_all(sampler, shards, 4, 2, seed, 9))
            assert len({prompt for prompt, _ in step}) == 4


@pytest.mark.parametrize("max_reuse", [0, 1, 2])
@every_sampler
def test_restored_shards_continue_the_same_steps_however_the_prompts_are_dealt(sampler: Sampler, max_reuse: int):
    messages: list[Message] = [(i % 7, i // 10, [(i % 5, 0.5), (i % 3, 1.0), (6 + i, 0.0)]) for i in range(50)]
    [shard] = dealt(messages, [0] * 10, max_reuse)
    shard.mark_trained(draw_one(sampler, shard, 4, 3, 9, NOW).rows)
    saved = [SavedShard(columns=to_columns(shard, with_payload=True))]
    two = [shard_of(max_reuse=max_reuse), shard_of(max_reuse=max_reuse)]
    for i, part in enumerate(two):
        restore(part, saved, lambda prompt_id, i=i: int(prompt_id[1:]) % 2 == i, keeps_rest=i == 0)
    expected = steps_of(sampler, [shard], 3, 4, 1)
    assert steps_of(sampler, two, 3, 4, 1) == expected
