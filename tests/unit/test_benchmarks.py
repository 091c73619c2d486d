"""The benchmarks run, at a small size, and the table of docs/parallelism.md is what its command makes."""

from __future__ import annotations

import json
import re
import time

import psutil
import pytest

from benchmarks import parallelism, trainer
from benchmarks.parallelism import BEGIN, CASES, END, LIMIT, PAGE, difference, rewrite, table
from benchmarks.ranks import prepare, run_ranks


def rows_of(text):
    """The cells of each case of a table between the marks."""
    made = text.partition(BEGIN)[2].partition(END)[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in made.splitlines() if line[:2] == "| "]


def test_the_page_shows_every_case_and_no_difference_above_the_limit():
    header, *rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert header[0] == "case"
    assert [(row[0], row[1]) for row in rows] == [(case.name, str(case.trainer().world_size)) for case in CASES]
    worst = max(float(value) for row in rows for value in row[-2:])
    assert 0 < worst <= LIMIT
    (stated,) = re.findall(r"largest difference of all is (\S+)\.\n", PAGE.read_text(encoding="utf-8"))
    assert float(stated) == worst


def test_cases_have_different_names_and_lay_out_every_size():
    assert len({case.name for case in CASES}) == len(CASES)
    for size in ("tp", "pp", "vpp", "dp", "sequence_parallel", "recompute", "microbatch_tokens", "order", "family"):
        assert len({getattr(case, size) for case in CASES}) > 1, size


def test_a_difference_is_relative_and_never_hides_what_is_not_finite():
    assert difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert difference([-3.0], [-4.0]) == 0.25
    assert difference([float("nan")], [1.0]) == difference([1.0], [float("inf")]) == float("inf")


def test_rewriting_replaces_what_is_between_the_marks_and_nothing_else(tmp_path):
    report = {
        "steps": 1,
        "worst": 2e-7,
        "one_rank": {parallelism.FAMILY: {"loss": [0.5], "grad_norm": [2.0]}},
        "cases": [
            {
                "case": "A, B",
                "ranks": 2,
                "microbatches": 3,
                "groups_in_two_passes": 0,
                "loss_difference": 1e-7,
                "norm_difference": 2e-7,
            }
        ],
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rewrite(page, table(report))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"\n{END}\nafter\n") and "old" not in text
    assert rows_of(text)[1:] == [["A, B", "2", "3", "0", "1.0e-07", "2.0e-07"]]
    page.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(RuntimeError, match="lacks the marks"):
        rewrite(page, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_layouts_are_held_against_one_rank(capfd):
    command = ["--steps", "2", "--cases", "TP 2, SP", "microbatches of 80 tokens: some groups in two passes"]
    assert parallelism.main(command) == 0
    report = json.loads(capfd.readouterr().out)
    sharded, split = report["cases"]
    assert (sharded["ranks"], split["ranks"]) == (2, 1)
    assert sharded["groups_in_two_passes"] == 0 < split["groups_in_two_passes"]
    assert 0 < report["worst"] <= LIMIT
    assert len(set(sharded["loss"])) == len(sharded["grad_norm"]) == 2


def test_a_layout_that_is_wrong_is_found(monkeypatch, capfd):
    """Without the sum over tensor ranks, gradients of norms are those of a part of the tokens."""
    prepare()
    from tba_megatron.models import layer_spec

    original = layer_spec.TorchNorm

    class Unmarked:
        def __new__(cls, *args, **kwargs):
            norm = original(*args, **kwargs)
            for parameter in norm.parameters():
                setattr(parameter, "sequence_parallel", False)  # noqa: B010
            return norm

    monkeypatch.setattr(layer_spec, "TorchNorm", Unmarked)
    assert parallelism.main(["--steps", "1", "--cases", "TP 2, SP"]) == 1
    assert json.loads(capfd.readouterr().out)["worst"] > LIMIT


@pytest.mark.parametrize("arguments", [["--cases", "no such case"], ["--markdown", "--cases", "TP 2"]])
def test_arguments_that_make_no_table_are_refused_before_anything_runs(arguments, capfd):
    with pytest.raises(SystemExit) as caught:
        parallelism.main(arguments)
    assert caught.value.code == 2 and capfd.readouterr().out == ""


def test_a_rank_that_fails_ends_the_others():
    prepare()
    before = psutil.Process().children(recursive=True)

    def body(groups, trainer):
        if groups.rank:
            raise ValueError("a fault of rank 1")
        time.sleep(60)

    with pytest.raises(Exception, match="a fault of rank 1"):
        run_ranks(body, parallelism.Case(name="", dp=2).trainer())
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.slow
def test_the_benchmark_of_the_trainer_compares_equal_computations(capfd):
    small = ["--layers", "2", "--hidden", "64", "--share", "0.1", "--repetitions", "2", "--microbatch-tokens", "256"]
    assert trainer.main([*small, "--layouts", "one rank", "DP 2, bfloat16"]) == 0
    report = json.loads(capfd.readouterr().out)
    for batch, found in report["against_transformers"].items():
        assert batch in trainer.BATCHES
        assert found["loss_difference"] < 1e-5
        assert found["ratio"] > 0
        assert sum(found["phases"].values()) == pytest.approx(1, abs=0.01)
        assert found["phases"]["other"] < 0.5
        assert len(found["head_cpu_s"]) == 2 and min(found["head_cpu_s"].values()) > 0
        assert set(found["operators"]) == {trainer.OURS, found["fastest_of_transformers"]}
    one, two = report["layouts"]["one rank"], report["layouts"]["DP 2, bfloat16"]
    assert one["bytes_a_parameter"] == {"weights": 4.0, "gradients": 4.0, "optimizer": 8.0}
    assert two["bytes_a_parameter"] == {"weights": 2.0, "gradients": 4.0, "optimizer": 6.0}
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
    assert all(
        peak > before > 0
        for peak, before in zip(two["peak_mib_by_rank"], two["of_which_before_the_model_mib"], strict=True)
    )
