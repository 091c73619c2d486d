"""Lock-step: a version for all, then the prompts of its steps, then the steps."""

from __future__ import annotations

from pathlib import Path

from tba_megatron.config_load import load_config
from tba_megatron.trainer.lockstep import LockStep
from tba_megatron.transport.registry import Member
from tba_megatron.types import PolicyVersion

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class Allowance:
    def __init__(self) -> None:
        self.given: list[int] = []

    def allow(self, prompts: int) -> None:
        self.given.append(prompts)


def lockstep(tmp_path, every: int) -> tuple[LockStep, Allowance]:
    overrides = [f"run.folder={tmp_path}", f"weights.publish_every_steps={every}", "trainer.prompts_per_step=4"]
    overrides.append("buffer.fresh_prompts_per_step=4")
    allowance = Allowance()
    return LockStep(load_config(QUICKSTART, overrides), allowance), allowance  # type: ignore[arg-type]


def version(step: int) -> PolicyVersion:
    return PolicyVersion(0, step)


def fleet(*steps: int, evaluating: bool = False) -> list[Member]:
    return [
        Member(searcher=f"s{i}", host="h", workers=1, version=version(s), joined_s=0, heard_s=0, evaluating=evaluating)
        for i, s in enumerate(steps)
    ]


def test_nothing_is_leased_before_every_searcher_runs_the_version(tmp_path):
    turns, allowance = lockstep(tmp_path, every=1)
    assert allowance.given == [0]
    assert not turns.may_train(version(0), [], 0)
    assert not turns.may_train(version(1), fleet(1, 0), 0)
    assert allowance.given == [0]
    assert not turns.may_train(version(1), fleet(1, 1), 0)
    assert allowance.given == [0, 4]


def test_the_steps_of_a_version_begin_when_all_its_prompts_have_come_and_wait_for_nothing_more(tmp_path):
    turns, allowance = lockstep(tmp_path, every=2)
    assert not turns.may_train(version(0), fleet(0), 5)
    assert not turns.may_train(version(0), fleet(0), 12)
    assert turns.may_train(version(0), fleet(0), 13)
    assert turns.may_train(version(1), fleet(0), 13)  # the second step of the turn
    assert not turns.may_train(version(2), fleet(0), 13)  # the searcher has not taken the next version
    assert allowance.given == [0, 8]
    assert not turns.may_train(version(2), fleet(2), 13)
    assert allowance.given == [0, 8, 8]


def test_a_run_that_resumes_between_two_versions_begins_with_a_turn(tmp_path):
    turns, allowance = lockstep(tmp_path, every=2)
    assert not turns.may_train(version(3), fleet(3), 0)
    assert allowance.given == [0, 8]


def test_a_searcher_that_evaluates_is_not_waited_for(tmp_path):
    turns, allowance = lockstep(tmp_path, every=1)
    assert not turns.may_train(version(1), [*fleet(1), *fleet(0, evaluating=True)], 0)
    assert allowance.given == [0, 4]


def test_a_turn_that_brought_too_little_asks_for_as_many_prompts_again(tmp_path):
    turns, allowance = lockstep(tmp_path, every=1)
    turns.may_train(version(1), fleet(1), 0)
    assert turns.may_train(version(1), fleet(1), 4)
    turns.extend(4)
    assert allowance.given == [0, 4, 4]
    assert not turns.may_train(version(1), fleet(1), 7)
    assert turns.may_train(version(1), fleet(1), 8)
