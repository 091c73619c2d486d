"""Values that change with the optimizer step: the share of recent prompts m, and what searchers sample with.

That of beta is with the losses, whose value it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factory import RolloutFactory
from sampler_steps import draw_one, groups_of, pool, recency, shard_of
from test_searcher import TASK, config_of, fake_engine, handlers, run_here, until, weights  # noqa: F401  (fixtures)

from tba_megatron.buffer.sampler import RewardRecency
from tba_megatron.config_load import load_config
from tba_megatron.config_search import SourceConfig
from tba_megatron.config_sections import Constant, Line, RewardRecencySampler
from tba_megatron.errors import ConfigError
from tba_megatron.search.fake_engine import FakeEngine
from tba_megatron.search.source import sampling_of
from tba_megatron.types import PolicyVersion

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
LINE = {"kind": "linear", "target": 1.0, "target_step": 4, "stop_step": 4}  # from 0.2: 0.2, 0.4, 0.6, 1.0, 1.0, ...
VALUES = (0.2, 0.4, 0.6, 1.0, 1.0)


def test_a_line_ends_with_a_jump_at_its_stop_step():
    line = Line.model_validate(LINE)
    assert [line.value_at(0.2, step) for step in range(1, 6)] == pytest.approx(VALUES)
    assert [Constant().value_at(0.2, step) for step in (1, 9)] == [0.2, 0.2]


COUNTS = st.integers(1, 30)
FLOATS = st.floats(-5, 5)


@given(FLOATS, FLOATS, COUNTS, COUNTS)
def test_all_values_lie_between_the_ends_and_both_are_reached(start, target, target_step, stop_step):
    line = Line(target=target, target_step=target_step, stop_step=stop_step)
    values = [line.value_at(start, step) for step in range(1, 40)]
    first, last = line.ends(start)
    assert (values[0], values[-1]) == (first, last) == (target if stop_step == 1 else start, target)
    low, high = min(first, last), max(first, last)
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in values)


# m


@pytest.mark.parametrize("step", range(5))
def test_a_step_is_drawn_as_with_the_m_of_that_step(step):
    make = RolloutFactory()
    prompts = "abcdefgh"
    shard = shard_of(*(pool(make, p, [0.0, 1.0, 2.0], step=100 if p > "d" else 0) for p in prompts))
    moving = RewardRecency(
        RewardRecencySampler.model_validate(
            {"recent_probability": 0.2, "recent_age_steps": 200, "recent_probability_schedule": LINE}
        )
    )
    fixed = recency(VALUES[step], age=200)
    for seed in range(30):
        found = groups_of(draw_one(moving, shard, 4, 2, seed, step))  # ``step`` of them are made: the next is its own
        assert found == groups_of(draw_one(fixed, shard, 4, 2, seed, step))
        assert found == groups_of(draw_one(moving, shard, 4, 2, seed, step))  # as after a resume


def test_m_that_changes_draws_other_prompts_than_m_that_does_not():
    moved = RewardRecencySampler.model_validate({"recent_probability": 0.2, "recent_probability_schedule": LINE})
    wanted = [
        [int(np.random.default_rng(seed).binomial(8, sampler.recent_probability_at(4))) for seed in range(5)]
        for sampler in (moved, RewardRecencySampler(recent_probability=0.2))
    ]
    assert wanted[0] == [8] * 5 != wanted[1]


TEACHER = "search.sources={teacher: {policy: {kind: fixed, path: m}}}"
M = "buffer.sampler.recent_probability"


def line(target: float, stop_step: int = 9) -> str:
    return f"{{kind: linear, target: {target}, target_step: 9, stop_step: {stop_step}}}"


@pytest.mark.parametrize(
    ("m", "schedule", "fits"),
    [
        (1.0, "{kind: constant}", False),
        (1.0, line(1.0), False),
        (0.5, line(1.0, stop_step=1), False),  # 0.5 is no step's
        (1.0, line(0.9), True),
        (0.5, line(1.0), True),
    ],
)
def test_a_fixed_policy_needs_an_m_that_is_not_1_in_every_step(m, schedule, fits):
    overrides = [TEACHER, f"{M}={m}", f"{M}_schedule={schedule}"]
    if fits:
        load_config(QUICKSTART, overrides)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    (problem,) = caught.value.problems
    assert f"{M}: 1 in every step draws nothing but recent rollouts, which those of teacher" in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{M}_schedule={line(1.5)}", "less than or equal to 1"),
        (f"search.temperature_schedule={line(2.5)}", "less than or equal to 2"),
        (f"search.sources={{hot: {{temperature_schedule: {line(0.0)}}}}}", "greater than or equal to 0.01"),
        (f"objective.loss.beta_schedule={line(0.0)}", "greater than or equal to 0.000000001"),
        (f"{M}_schedule={{kind: linear, target: 0.5, target_step: 0, stop_step: 1}}", "greater than or equal to 1"),
    ],
)
def test_a_target_has_the_bounds_of_the_value_itself(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    (problem,) = caught.value.problems
    assert words in problem


# The temperature


def test_a_searcher_samples_as_the_step_of_its_policy_says():
    source = SourceConfig.model_validate({"temperature": 0.2, "temperature_schedule": LINE})
    assert [source.temperature_at(step) for step in range(6)] == pytest.approx((0.2, *VALUES))  # 0 counts as 1
    config = load_config(
        QUICKSTART,
        ["search.temperature=1.5", f"search.temperature_schedule={line(1.0)}", "search.sources={hot: {}}"],
    )
    assert [sampling_of(config, (1,), step).temperature for step in (0, 1, 9)] == pytest.approx([1.5, 1.5, 1.0])
    hot = config.model_copy(update={"search": config.search.model_copy(update={"source": "hot"})})
    assert sampling_of(hot, (1,), 1).temperature == 1.0  # a source has its own


class Moving(FakeEngine):
    """Runs a version one step newer after each submission."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.temperatures: list[float] = []

    def submit(self, request_id, prompt_token_ids, sampling) -> None:
        super().submit(request_id, prompt_token_ids, sampling)
        self.temperatures.append(sampling.temperature)
        self._version = PolicyVersion(self._version.attempt, self._version.step + 1)


def test_the_temperature_is_that_of_the_version_at_the_time_of_submission(weights, handlers):  # noqa: F811
    engine = fake_engine(weights, Moving)
    search = config_of().model_dump()["search"] | {"temperature": 0.2, "temperature_schedule": LINE}
    run_here(config_of(search=search), engine, until(6 * 3, prompts=6))
    assert engine.temperatures == pytest.approx([0.2, *VALUES])


GRPO = ["objective.loss={kind: grpo}", "search.behaviour_logprobs=true", "search.in_flight=recompute"]


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        ([f"search.temperature_schedule={line(1.0)}"], True),
        ([f"search.temperature_schedule={line(0.9)}"], False),
        (["search.temperature=0.9", f"search.temperature_schedule={line(1.0)}"], False),
        (["search.temperature=0.9", f"search.temperature_schedule={line(1.0, stop_step=1)}"], True),
        ([f"search.sources={{hot: {{temperature_schedule: {line(1.2)}}}}}"], False),
    ],
)
def test_what_reads_behaviour_log_probs_needs_the_objectives_temperature_in_every_step(overrides, fits):
    load_config(QUICKSTART, overrides)  # trajectory balance learns from any of it
    if fits:
        load_config(QUICKSTART, [*GRPO, *overrides])
        return
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [*GRPO, *overrides])
    (problem,) = caught.value.problems
    assert "sampled as objective.temperature (1) says, in every step" in problem


def test_a_fixed_policy_has_no_step_that_a_temperature_could_go_by():
    source = f"{{teacher: {{policy: {{kind: fixed, path: m}}, temperature_schedule: {line(0.5)}}}}}"
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [f"search.sources={source}", f"{M}=0.5"])
    (problem,) = caught.value.problems
    assert "teacher has a temperature_schedule" in problem and "a fixed policy has none" in problem
