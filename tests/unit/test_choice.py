import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_factory import NEW_RUN, RolloutFactory, as_batch
from sampler_steps import shard_of

from tba_megatron.buffer import prompts
from tba_megatron.buffer.choice import Offer, alone, by_rank, first_n, merge
from tba_megatron.buffer.recency import recent_part

SMALL = st.integers(0, 3)
PAIRS = st.lists(st.tuples(SMALL, st.integers(0, 2**64 - 1)), max_size=30, unique_by=lambda pair: pair[1])


def offer_of(pairs: list[tuple[int, int]]) -> Offer:
    ties = np.array([tie for _, tie in pairs], np.uint64)
    return Offer(first=np.array([first for first, _ in pairs], np.int64), tie=ties, key=ties)


@settings(derandomize=True)
@given(pairs=PAIRS, n=st.integers(0, 32))
def test_the_first_n_are_those_of_a_full_sort(pairs: list[tuple[int, int]], n: int):
    offer = offer_of(pairs)
    assert [pairs[i] for i in first_n(n, offer.first, offer.tie)] == sorted(pairs)[:n]


@settings(derandomize=True)
@given(pairs=PAIRS, owners=st.lists(SMALL, min_size=30, max_size=30), n=st.integers(0, 32))
def test_merged_offers_are_those_of_one_shard_and_tell_whose_they_are(
    pairs: list[tuple[int, int]], owners: list[int], n: int
):
    parts = [sorted(pair for pair, owner in zip(pairs, owners, strict=False) if owner == shard) for shard in range(4)]
    merged = merge([offer_of(part) for part in parts], n)
    expected = sorted(pairs)[:n]
    assert merged.keys.tolist() == [tie for _, tie in expected]
    found: dict[int, tuple[int, int]] = {}
    for shard, part in enumerate(parts):
        places, indices = merged.of_shard(shard)
        found |= {int(place): part[i] for place, i in zip(places, indices, strict=True)}
    assert [found[place] for place in range(len(found))] == expected


@pytest.mark.parametrize("n_taken", [0, 3])
def test_ranks_count_the_prompts_that_are_not_taken_by_key(n_taken: int, monkeypatch: pytest.MonkeyPatch):
    # Six bins of 5 to 10 prompts.
    monkeypatch.setattr(prompts, "prompt_key", lambda name: (int(name[1:]) ** 2 % 10 << 60) + int(name[1:]) * 7919 % 50)
    make = RolloutFactory()
    shard = shard_of(*(make.group(f"q{i}", [1]) for i in range(50)))
    taken = np.arange(n_taken)
    histogram = shard.prompts.histogram()
    np.subtract.at(histogram, (shard.prompts.key[taken] >> np.uint64(52)).astype(int), 1)
    free = np.setdiff1d(shard.prompts.all_numbers(), taken)
    by_key = free[np.argsort(shard.prompts.key[free])]
    ranks = np.append(np.arange(len(free))[::-1], [7, 7])
    numbers, which = by_rank(shard, alone(), histogram, ranks, taken)
    assert numbers.tolist() == by_key[ranks].tolist()
    assert which.tolist() == list(range(len(ranks)))


@pytest.mark.parametrize("n_recent", [3, 400])
def test_the_recent_part_is_that_of_its_definition(n_recent: int):
    make = RolloutFactory()
    shard = shard_of(*(make.group(f"q{i}", [1, 2], step=8 + i % 2) for i in range(0, n_recent, 2)))
    shard.add(as_batch(*(make.group(f"q{i}", [3, 4 + i % 3], step=3 if i % 3 else 9) for i in range(n_recent))))
    trained = shard.rows.living()[::5]
    shard.mark_trained(trained)
    part = recent_part(shard, NEW_RUN, 9, 2)
    rows = [row for row in shard.rows.living().tolist() if shard.rows.version[row] >= 7]
    numbers = sorted({int(shard.rows.prompt[row]) for row in rows})
    assert sorted(part.rows.tolist()) == rows
    assert part.prompts.tolist() == numbers
    assert (part.prompts[part.prompt_of_row] == shard.rows.prompt[part.rows]).all()
    for prompt, urgency in zip(numbers, part.urgency.tolist(), strict=True):
        mine = np.array([row for row in rows if shard.rows.prompt[row] == prompt])
        fresh = shard.rows.visit[mine] > shard.prompts.trained_visit[prompt]
        waiting = shard.rows.version[mine][shard.rows.uses[mine] == 0]
        assert urgency == (waiting.min() if fresh.any() else np.iinfo(np.int64).max)
    some = np.arange(len(numbers))[::-2]
    pool_rows, sizes = part.pools(shard, some)
    expected = [sorted(row for row in rows if shard.rows.prompt[row] == numbers[i]) for i in some]
    assert sizes.tolist() == [len(pool) for pool in expected]
    assert pool_rows.tolist() == [row for pool in expected for row in pool]
