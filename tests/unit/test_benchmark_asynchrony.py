"""The benchmark of asynchrony: what it makes of two runs' metrics."""

from __future__ import annotations

import pytest

from benchmarks.asynchrony import claims, report, shares, steps_of

SUMMARY = {"accuracy_before": 0.25, "accuracy_after": 0.75, "age_steps_p50": 1, "age_steps_max": 3, "probe_alerts": 0}


def row(i: int, *, wait_s: float = 0.0, first: float = 0.5) -> dict[str, float]:
    """Step i of a run with one searcher: a second each, of which it is busy for three quarters."""
    return {
        "time/step_s": 1.0,
        "time/wait_rollout_s": wait_s,
        "time/weight_snapshot_s": 0.1,
        "time/weight_probe_s": 0.1,
        "fleet/busy_s": 0.75 * (i + 1),
        "fleet/idle_s": 0.25 * (i + 1),
        "buffer/first_time_share": first,
    }


def test_the_first_tenth_counts_for_the_gain_alone():
    rows = [row(0, wait_s=10.0, first=0.0), *(row(i, wait_s=0.25) for i in range(1, 10))]
    found = shares(steps_of([{"eval/accuracy": 0.5}, *rows]), SUMMARY)
    assert found["steps"] == 10
    assert found["loop_s"] == pytest.approx(10 + 10.0 + 9 * 0.25)
    assert found["trainer_waiting"] == pytest.approx(0.2)
    assert found["searcher_idle"] == pytest.approx(0.25)
    assert found["first_time_share"] == 0.5
    assert found["gain_per_s"] == pytest.approx(0.5 / 22.25)
    assert found["steps_per_s"] == pytest.approx(1 / 1.25)


GOOD = {"trainer_waiting": 0.04, "searcher_idle": 0.04, "first_time_share": 0.5, "gain_per_s": 1.0, "steps_per_s": 2.0}


def test_claims_hold_at_their_limits():
    assert all(claims({"sync": GOOD, "async": GOOD}).values())


@pytest.mark.parametrize(
    ("name", "value"),
    [("trainer_waiting", 0.05), ("searcher_idle", 0.05), ("first_time_share", 0.49), ("gain_per_s", 0.99)],
)
def test_each_claim_can_fail_alone_and_fails_where_nothing_was_measured(name, value):
    for broken in (value, None):
        found = claims({"sync": GOOD, "async": {**GOOD, name: broken}})
        assert list(found.values()).count(False) == 1


def test_the_report_sets_the_runs_beside_each_other():
    made = report(3, {"sync": {**GOOD, "steps_per_s": 1.0}, "async": GOOD})
    assert (made["seed"], made["steps_per_s_async_over_sync"]) == (3, 2.0)
