"""The probe: a searcher that does not run what it was sent is found, counted, and sent the newest version again."""

from __future__ import annotations

import math

import pytest

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.trainer.probe import ProbeDesk, probe_tokens
from tba_megatron.transport.messages import Probed
from tba_megatron.types import PolicyVersion

OWN = (-1.0, -2.0, -3.0)


class Control:
    def __init__(self) -> None:
        self.answers: list[tuple[str, Probed]] = []
        self.refused: list[tuple[str, str]] = []

    def take_probes(self):
        taken, self.answers = self.answers, []
        return taken

    def refuse_weights(self, searcher, reason):
        self.refused.append((searcher, reason))

    def answer(self, version: str, *logprobs: float) -> None:
        self.answers.append(("s", Probed(version=version, logprobs_nats=logprobs)))


@pytest.fixture
def control():
    return Control()


@pytest.fixture
def desk(control):
    made = ProbeDesk(WeightsConfig(probe_gap_nats=0.1), control)
    made.know(PolicyVersion(0, 3), OWN)
    return made


def test_small_gaps_are_measured_and_nothing_else(desk, control):
    control.answer("0.3", -1.1, -2.0, -3.1)
    desk.compare()
    assert desk.metrics() == {
        "weights/probe_gap_nats": pytest.approx(0.2 / 3),
        "weights/probes_total": 1,
        "weights/probe_alerts_total": 0,
        "weights/probes_unknown_total": 0,
    }
    assert control.refused == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((-1.0, -2.5, -3.0), "0.167 nats in the mean, by 0.5 at token 2"),
        ((-1.0, math.nan, -3.0), "inf nats in the mean, by nan at token 2"),
        ((-1.0, -math.inf, -3.0), "inf nats in the mean, by inf at token 2"),
        ((-1.0,), "inf nats in the mean"),
    ],
)
def test_a_gap_above_the_limit_is_an_alert_with_numbers_and_the_searcher_is_sent_the_version_again(
    desk, control, answer, said
):
    control.answer("0.3", *answer)
    desk.compare()
    assert desk.alerts == 1
    ((searcher, reason),) = control.refused
    assert searcher == "s" and said in reason and "version 0.3" in reason and "probe_gap_nats is 0.1" in reason


def test_an_answer_that_overtakes_the_trainers_own_waits_for_it(desk, control):
    control.answer("0.4", -1.0, -2.0, -4.0)
    desk.compare()
    assert (desk.answered, desk.alerts) == (0, 0)
    desk.know(PolicyVersion(0, 4), OWN)
    desk.compare()
    assert (desk.answered, desk.alerts) == (1, 1)


def test_an_answer_about_a_forgotten_version_is_counted(desk, control):
    for step in range(4, 40):
        desk.know(PolicyVersion(0, step), OWN)
    control.answer("0.3", *OWN)
    desk.compare()
    assert (desk.answered, desk.unknown) == (0, 1)


def test_the_probe_is_fixed_by_the_seed_and_within_the_vocabulary():
    assert probe_tokens(16, 19, 5) == probe_tokens(16, 19, 5) != probe_tokens(16, 19, 6)
    assert set(probe_tokens(1000, 19, 0)) == set(range(19))
    assert probe_tokens(0, 19, 0) == probe_tokens(1, 19, 0) == ()
