"""What the benchmark of policy lag makes of its runs, and the control that it compares a mask with."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest
import torch
from loss_cases import random_inputs

from benchmarks import reference, staleness
from benchmarks.staleness_control import ScatteredGuards
from benchmarks.staleness_report import curves_svg, half_interval, lag_rows, markdown
from benchmarks.staleness_run import CHOICE, HELD_OUT, Cell
from tba_megatron.config_objective import GuardsConfig
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.sequences import Sequences


def arguments(**values):
    return argparse.Namespace(**{"seeds": [0, 1], "rates": [1e-4, 2e-4], "steps": 200} | values)


def found(accuracy: float, *, seed: int = 0, lag: int = 0, choice: float = 0.0) -> dict:
    return {
        "cell": asdict(Cell(loss="{kind: grpo}", seed=seed, lag=lag)),
        "start": 0.3,
        "accuracy": accuracy,
        "choice": choice,
        "curve": [[50, accuracy - 0.1], [200, accuracy]],
        "skipped": 0,
        "age_mean": float(lag),
        "diagnostics": {"abs_drift": 0.5, "lost_push": 0.25},
    }


def test_every_variant_is_an_objective_with_a_guard_that_the_configuration_takes(tmp_path):
    for variant in (*staleness.VARIANTS, *staleness.CONTROLS, *staleness.OTHERS, *staleness.FIXED):
        config = staleness.cell_of(variant, arguments(), lag=8).config(tmp_path)
        assert config.objective.loss.kind == variant.partition("@")[0].partition("+")[0]
        assert (config.objective.guards != GuardsConfig()) == ("+" in variant)
        assert config.buffer.sampler.kind == "fifo" and config.search.behaviour_logprobs
    recent = replace(staleness.cell_of("tb_vargrad", arguments()), recent=0.5).config(tmp_path)
    assert (recent.buffer.sampler.kind, recent.buffer.sampler.recent_probability) == ("reward_recency", 0.5)


def test_every_objective_of_the_configuration_is_in_the_benchmark():
    from tba_megatron.loss.registry import LOSSES

    kinds = {section.model_fields["kind"].default for section in LOSSES}
    assert kinds == set(staleness.OBJECTIVES)
    assert kinds == {v.partition("+")[0] for v in (*staleness.VARIANTS, *staleness.OTHERS)}


def test_cells_that_differ_have_different_files():
    base = Cell(loss="{kind: grpo}")
    others = [
        replace(base, **change)
        for change in (
            {"loss": "{kind: rloo}"},
            {"guards": "{negative_weight: 0.3}"},
            {"control": True},
            {"lag": 8},
            {"learning_rate": 2e-4},
            {"seed": 1},
            {"recent": 0.5},
            {"steps": 100},
        )
    ]
    assert len({cell.name for cell in (base, *others)}) == 1 + len(others)


def test_the_learning_rate_is_chosen_on_the_problems_that_are_not_reported(tmp_path):
    args = arguments(out=tmp_path)
    for rate, accuracy, choice in ((1e-4, 0.9, 0.5), (2e-4, 0.5, 0.6)):
        cell = staleness.cell_of("grpo", args, learning_rate=rate)
        (tmp_path / f"{cell.name}.json").write_text(json.dumps(found(accuracy, choice=choice)))
    assert staleness.chosen_rate("grpo", args) == 2e-4
    assert CHOICE > 0 and HELD_OUT > 0


def test_an_interval_takes_out_what_a_seed_adds_to_all_rows():
    # Rows (0, 1) and (2, 3) differ by 2, seeds by 1, and nothing is left over.
    assert half_interval([[0.0, 1.0], [2.0, 3.0]]) == 0.0
    # Left over is +- 0.25: 4 * 0.0625 over one degree of freedom, for a mean of two.
    assert half_interval([[0.0, 1.0], [2.0, 4.0]]) == pytest.approx(1.959964 * math.sqrt(0.25 / 2))
    assert math.isnan(half_interval([[0.0], [1.0]]))


def test_tables_and_the_plot_hold_every_row():
    runs = {
        ("grpo", 0): [found(0.6), found(0.62, seed=1)],
        ("grpo", 8): [found(0.5, lag=8), found(0.54, seed=1, lag=8)],
        ("grpo+lost", 0): [found(0.61), found(0.63, seed=1)],
        ("grpo+lost", 8): [found(0.59, lag=8), found(0.6, seed=1, lag=8)],
    }
    rows = lag_rows(runs)
    assert [(row["variant"], row["lag"], row["accuracy"]) for row in rows] == [
        ("grpo", 0, 0.61),
        ("grpo", 8, 0.52),
        ("grpo+lost", 0, 0.62),
        ("grpo+lost", 8, 0.595),
    ]
    assert {row["half_interval"] for row in rows} == {
        round(half_interval([[0.6, 0.62], [0.5, 0.54], [0.61, 0.63], [0.59, 0.6]]), 4)
    }
    assert rows[1]["worst_on_the_way"] == 0.4
    report = {
        "lags": rows,
        "recent": {"0.5": {"accuracy": [0.5, 0.6], "age_mean": 42.0}},
        "gain_at_lag_0": {"grpo": 0.3, "rloo": 0.1},
    }
    table = markdown(report)
    assert "| `grpo` | 0.0004 | 0.610 ± " in table and "| `grpo+lost` |" in table
    assert "| 0.5 | 0.500, 0.600 | 42.0 steps |" in table and "| `rloo` | +0.100 |" in table
    plot = ElementTree.fromstring(curves_svg(rows, [0, 8]))
    names = [element.text for element in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert {"grpo", "grpo+lost", "0", "8"} <= set(names)
    assert len(list(plot.iter("{http://www.w3.org/2000/svg}circle"))) == len(rows)


def test_the_control_drops_as_many_negative_pushes_as_the_mask_but_others():
    inputs = random_inputs(3, max_length=5)
    generator = torch.Generator().manual_seed(0)
    drift_T = 0.8 * torch.randn(inputs.logprob_T.shape, generator=generator, dtype=torch.float64)
    s = Sequences(replace(inputs, behaviour_logprob_T=inputs.logprob_T.detach() - drift_T))
    advantage_S = torch.randn(inputs.n_sequences, generator=generator, dtype=torch.float64)
    settings = GuardsConfig(lost_negative_ratio=0.8).model_dump()
    mask_S = Guards(**settings).factor_S(advantage_S, s)
    found = [ScatteredGuards(**settings, generator=generator).factor_S(advantage_S, s) for _ in range(20)]
    assert 0 < int((mask_S == 0).sum()) < int((advantage_S < 0).sum())
    for factor_S in found:
        assert (factor_S == 0).sum() == (mask_S == 0).sum()
        assert (factor_S[advantage_S >= 0] == 1).all()
    assert any(not torch.equal(factor_S, mask_S) for factor_S in found)


def test_ratios_compare_what_was_measured_in_one_turn():
    # The second turn is twice as slow in all, which is no difference.
    turns = {"none": [10, 20], "cached": [10.5, 21], "computed": [13.5, 27], "host": [14, 28], "forward": [3, 6]}
    found = reference.ratios(turns)
    assert found["cached_over_none"] == 1.05 and found["computing_over_forward"] == 1.0
    assert found["computing_from_host_over_forward"] == pytest.approx(3.5 / 3, abs=1e-3)
    assert all(found["claims"].values())
    slow = reference.ratios({**turns, "cached": [12, 24]})
    assert list(slow["claims"].values()) == [False, True]
