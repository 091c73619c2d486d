import pytest
from rollout_factory import RolloutFactory, as_batch
from sampler_steps import draw_all, draw_one, groups_of, shard_of, step_of, tokens_of

from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.sampler import Fifo
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.types import FOREIGN_ATTEMPT


def fifo_step(shard: ReplayShard, n: int, k: int, seed: int = 0) -> Draw:
    draw = draw_one(Fifo(), shard, n, k, seed)
    shard.mark_trained(draw.rows)
    return draw


def test_fifo_draws_each_rollout_once_the_oldest_versions_first():
    make = RolloutFactory()
    versions = {"b": 0, "a": 1, "c": 2}
    shard = shard_of(
        *(make.group(p, [4 * i, 4 * i + 1, 4 * i + 1], step=versions[p]) for i, p in enumerate("cab")),
        make.group("b", [12, 13, 13], step=3),
    )
    drawn = []
    while n := min(2, len(shard.fresh_prompts())):
        draw = fifo_step(shard, n, 3)
        assert draw.with_replacement == 0
        drawn += groups_of(draw)
    assert drawn == [
        ("b", ((8, 1), (9, 2))),
        ("a", ((4, 1), (5, 2))),
        ("c", ((0, 1), (1, 2))),
        ("b", ((12, 1), (13, 2))),
    ]
    assert shard.counts().held_untrained == 0


def test_of_one_version_the_first_to_arrive_is_the_first_to_leave():
    make = RolloutFactory()
    shard = shard_of(make.group("p", [5, 3], step=1), make.group("p", [4, 1], step=1), make.group("p", [9], step=0))
    assert groups_of(draw_one(Fifo(), shard, 1, 4)) == [("p", ((9, 1), (5, 1), (3, 1), (4, 1)))]


def test_what_another_policy_wrote_waits_with_what_is_of_its_time():
    make = RolloutFactory()

    def foreign(prompt_id: str, token: int, step: int):
        return make.group(prompt_id, [token], attempt=FOREIGN_ATTEMPT, step=step)

    shard = shard_of(make.group("c", [1], step=3), foreign("b", 2, 2), make.group("a", [3], step=1), foreign("a", 4, 0))
    drawn = [groups_of(fifo_step(shard, 1, 1)) for _ in range(3)]
    assert drawn == [[("a", ((4, 1),))], [("b", ((2, 1),))], [("c", ((1, 1),))]]


def test_what_a_visit_leaves_over_joins_the_next_visit():
    make = RolloutFactory()
    shard = shard_of(make.group("p", [1, 2, 3]))
    assert tokens_of(fifo_step(shard, 1, 2)) == {1: 1, 2: 1}
    assert shard.report_fresh().n_fresh == 0
    shard.add(as_batch(make.group("p", [4, 5, 6])))
    assert tokens_of(fifo_step(shard, 1, 2)) == {3: 1, 4: 1}


def test_a_short_visit_is_filled_up_and_counted_so_that_nothing_waits_for_ever():
    shard = shard_of(RolloutFactory().group("p", [1, 2]))
    draw = fifo_step(shard, 1, 4)
    assert (sum(draw.batch.copies_S), draw.with_replacement) == (4, 1)
    assert set(tokens_of(draw)) <= {1, 2}


def test_fifo_draws_no_more_prompts_than_wait():
    make = RolloutFactory()
    shards = [shard_of(*(make.group(f"{i}{j}", [1]) for j in range(3))) for i in range(2)]
    shards[0].mark_trained(shards[0].rows.living()[:1])
    assert len(step_of(draw_all(Fifo(), shards, 5, 1))) == 5
    with pytest.raises(ValueError, match="6 prompts are to be drawn but only 5 wait; wait for searchers"):
        draw_all(Fifo(), shards, 6, 1)
