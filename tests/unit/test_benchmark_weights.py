"""The benchmark of weights: its models have the bytes they are called by, and its claims say what was measured."""

from __future__ import annotations

import math

import psutil
import pytest

from benchmarks import weights, weights_engine, weights_wire
from benchmarks.weights import LIMITS, MODELS, claimed, expected_tensors, figures


@pytest.mark.parametrize(("name", "bytes_"), [("100 MB", 94.5e6), ("500 MB", 505e6)])
def test_a_model_has_the_bytes_of_its_name_once(name, bytes_):
    expected = expected_tensors(MODELS[name])
    assert sum(4 * math.prod(shape) for shape, _ in expected.values()) == pytest.approx(bytes_, rel=0.01)
    assert {dtype for _, dtype in expected.values()} == {"float32"} and "lm_head.weight" not in expected


def test_rates_are_of_the_median_and_listed_from_the_slowest():
    assert weights_wire.rates(10_000_000, [1.0, 4.0, 2.0]) == {"mb_s": 5.0, "all_mb_s": [2.5, 5.0, 10.0]}
    assert weights_wire.milliseconds([0.002, 0.001, 0.009]) == {"median": 2.0, "least": 1.0, "most": 9.0}


def test_ways_take_turns_and_their_first_round_does_not_count():
    order, seconds = [], {"raw": iter([9, 1, 3, 2]), "ours": iter([9, 4, 2, 4]), "one tensor at a time": iter([8] * 4)}

    def way(name):
        def run():
            order.append(name)
            return float(next(seconds[name])), 0.5

        return run

    report = weights_wire._in_turn({name: way(name) for name in seconds}, 8_000_000, 3)
    assert order == list(seconds) * 4
    assert [report[name]["mb_s"] for name in seconds] == [4.0, 2.0, 1.0]
    assert len(report["raw"]["all_mb_s"]) == 3
    assert report["publish_of_raw"] == {"median": 0.5, "all": [0.25, 0.5, 1.5]}
    assert report["publish_and_snapshot_of_raw"] == {"median": 0.444, "all": [0.222, 0.444, 1.2]}
    assert report["publish_of_one_tensor_at_a_time"]["median"] == 2.0


def test_every_kind_of_claim_is_made_of_a_whole_run_and_each_is_one_of_the_limits():
    ways = {"publish_of_raw": {"median": 0.6}}
    models = {name: {"pause": {"ratio": 1.2}, "receivers": {"1": ways, "2": ways}} for name in MODELS}
    claims = claimed(figures(models, {"pause_of_apply_and_a_step": 0.9}))
    assert len(claims) == 2 * len(MODELS) + len(MODELS) + 1
    assert {name.split(",")[0] for name in claims} == LIMITS.keys()
    assert all(claim["holds"] for claim in claims.values())
    assert all(name.startswith(("publish", "snapshot")) for name in claimed(figures(models, {})))


@pytest.mark.parametrize(
    ("name", "figure", "holds"),
    [
        ("publish of raw gloo, 100 MB to 1", 0.5, True),
        ("publish of raw gloo, 100 MB to 1", 0.49, False),
        ("snapshot of a plain copy, 100 MB", 1.5, True),
        ("snapshot of a plain copy, 100 MB", 1.51, False),
    ],
)
def test_a_claim_holds_up_to_its_limit(name, figure, holds):
    assert claimed({name: figure})[name]["holds"] is holds


def test_a_pause_is_measured_by_applying_and_one_step():
    updates = [{"apply_s": 0.1, "pause_s": pause_s, "next_step_s": 0.05} for pause_s in (0.12, 0.24, 0.06)]
    report = weights_engine.report(updates, [0.02, 0.01, 0.09], [0.03])
    assert report["pause_of_apply_and_a_step"] == 1.0 and report["updates"] == 3
    assert report["engine_step_ms"]["median"] == 20.0 and report["first_step_after_ms"]["most"] == 50.0


def _sleep(connection):
    connection.send("up")
    connection.recv()


def test_no_receiver_is_left_over():
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RuntimeError, match="stop"), weights_wire.receivers(2, _sleep) as connections:
        assert [weights_wire.hear(connection) for connection in connections] == ["up", "up"]
        assert len(psutil.Process().children(recursive=True)) == len(before) + 2
        raise RuntimeError("stop")
    assert psutil.Process().children(recursive=True) == before


def test_a_silent_receiver_is_an_error(monkeypatch):
    monkeypatch.setattr(weights_wire, "LIMIT_S", 0.1)
    with weights_wire.receivers(1, _sleep) as (connection,):
        weights_wire.hear(connection)
        with pytest.raises(RuntimeError, match=r"silent for 0\.1 s"):
            weights_wire.hear(connection)


def test_the_processor_has_a_name():
    assert weights.processor()
