"""A run with ``buffer.max_reuse``: it waits while too few prompts may be drawn, and goes on when new rollouts come."""

from __future__ import annotations

from collections import Counter

import pytest
from rollout_factory import RolloutFactory, as_batch
from sampler_steps import draw_all, step_of
from test_chief import Desk, run_state, shard_counts

from tba_megatron.buffer.sampler import make_sampler
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.trainer.notes import Note, draw_facts
from tba_megatron.types import Action, StepPlan

NEEDED, K = 4, 3
KINDS = ("reward_recency", "uniform", "prioritised")


class SmallRun:
    """A chief, two shards and their sampler, without searchers and without a model."""

    def __init__(self, tmp_path, kind: str, max_reuse: int, *overrides: str) -> None:
        settings = [f"buffer.sampler={{kind: {kind}}}", f"trainer.prompts_per_step={NEEDED}", "trainer.steps=1000"]
        self.desk = Desk(tmp_path, *settings, *overrides, state=run_state(data_parallel=2))
        self.sampler = make_sampler(self.desk.config.buffer.sampler)
        self.shards = [ReplayShard(1000, 1000, max_reuse=max_reuse) for _ in range(2)]
        self.make, self.step, self.arrived = RolloutFactory(), 0, Counter[int]()
        self.drawn: list[list[str]] = []  # prompts of each step
        self.first_times: list[int] = []

    def visit(self, *prompts: str) -> None:
        """Two rollouts of the newest policy each, the same completions at every visit."""
        for prompt in prompts:
            batch: RolloutBatch = as_batch(self.make.group(prompt, [0, 1], step=self.step))
            self.shards[ord(prompt[-1]) % 2].add(batch)
            self.arrived[0] += 1

    def turn(self) -> StepPlan:
        """One iteration of the loop: decide, and draw where the plan says so."""
        history = self.desk.chief._history
        reports = [self.sampler.report(shard, history, self.step) for shard in self.shards]
        notes = [Note(report=report, counts=shard_counts()) for report in reports]
        notes[0] = Note(report=reports[0], counts=shard_counts(), arrived=dict(self.arrived))
        self.arrived.clear()
        plan = self.desk.chief.decide(notes, self.step)
        if plan.action is Action.TRAIN:
            draws = draw_all(self.sampler, self.shards, NEEDED, K, plan.seed, self.step)
            self.drawn.append([prompt for prompt, _ in step_of(draws)])
            for shard, draw in zip(self.shards, draws, strict=True):
                assert shard.may_draw(draw.rows).all()
                shard.mark_trained(draw.rows)
            facts = [
                draw_facts(draw, shard.rows, history, self.step, 0)
                for shard, draw in zip(self.shards, draws, strict=True)
            ]
            self.first_times.append(sum(f.first_time for f in facts))
            self.step = plan.step
        return plan

    def steps_until_it_waits(self) -> int:
        before = self.step
        while self.turn().action is Action.TRAIN:
            assert self.step - before < 100
        return self.step - before


@pytest.mark.parametrize("kind", KINDS)
def test_it_waits_rather_than_draw_what_is_used_up_and_goes_on_with_what_comes(kind, tmp_path):
    run = SmallRun(tmp_path, kind, 1)
    run.visit(*"abcdefgh")
    assert 1 <= run.steps_until_it_waits() <= 4  # 16 rollouts, at least 4 a step
    assert [run.turn().action for _ in range(5)] == [Action.WAIT] * 5
    assert all(len(set(prompts)) == NEEDED for prompts in run.drawn)
    left = sum(shard.prompts.n_drawable for shard in run.shards)
    assert left < NEEDED
    new = ["x", "y", "z", "w"]
    for prompt in new[: NEEDED - left - 1]:
        run.visit(prompt)
        assert run.turn().action is Action.WAIT
    run.visit(new[NEEDED - left - 1])
    assert run.turn().action is Action.TRAIN
    assert len(set(run.drawn[-1])) == NEEDED
    assert max(n for shard in run.shards for n in shard.rows.uses[shard.rows.living()].tolist()) == 1
    assert run.first_times == [NEEDED * K] * run.step


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_limit_it_goes_on_with_what_it_has(kind, tmp_path):
    run = SmallRun(tmp_path, kind, 0)
    run.visit(*"abcdefgh")
    for _ in range(50):
        assert run.turn().action is Action.TRAIN
    assert sum(run.first_times[20:]) < sum(run.first_times[:20])


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_prompts_than_a_step_needs_are_repeated_once_each_may_be_drawn(kind, tmp_path):
    run = SmallRun(tmp_path, kind, 1)
    run.visit(*"abb")
    assert run.turn().action is Action.WAIT
    run.visit(*"aabba")
    assert run.turn().action is Action.TRAIN
    assert sorted(Counter(run.drawn[-1]).values()) == [2, 2]
    while sum(shard.prompts.n_drawable for shard in run.shards) == 2:
        assert run.turn().action is Action.TRAIN
    run.turn()
    assert run.turn().action is Action.WAIT
    run.visit("a", "b")
    assert run.turn().action is Action.TRAIN
    assert sorted(Counter(run.drawn[-1]).values()) == [2, 2]


def test_few_prompts_that_are_not_used_up_are_repeated_without_new_visits(tmp_path):
    run = SmallRun(tmp_path, "uniform", 7)
    run.visit(*"aabbaabb")
    assert run.steps_until_it_waits() >= 7
    assert run.first_times[0] > 0 == run.first_times[6]


def test_a_prompt_that_brings_nothing_new_does_not_stop_the_run(tmp_path):
    run = SmallRun(tmp_path, "uniform", 1)
    run.visit(*"abababab")
    run.steps_until_it_waits()
    run.visit("a")
    assert run.turn().action is Action.WAIT
    run.visit(*"aaaaaa")  # b is asked for too, and what comes of it is refused
    assert run.turn().action is Action.WAIT
    run.visit("a")
    assert run.turn().action is Action.TRAIN
    assert run.drawn[-1] == list("aaaa")


def test_fresh_prompts_are_waited_for_with_a_limit_too(tmp_path):
    run = SmallRun(tmp_path, "reward_recency", 5, "buffer.fresh_prompts_per_step=2")
    run.visit(*"abcd")
    assert [run.turn().action for _ in range(3)] == [Action.TRAIN, Action.WAIT, Action.WAIT]
    run.visit(*"ef")
    assert run.turn().action is Action.TRAIN
