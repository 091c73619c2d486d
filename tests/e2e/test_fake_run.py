"""The whole launch with the fake engine: every process and every wire is real, only the engine is not.

Real weights and real learning are in test_quickstart.py.
"""

import json
import math
import re

import pytest
from launching import (
    FAKE,
    ROOT,
    SUMMARY_KEYS,
    contents,
    ledger_gap,
    processes_of,
    records,
    rollouts_of,
    shared_memory,
    steps,
    summary_of,
    tba,
)

from tba_megatron.transport.weight_files import newest
from tba_megatron.types import PolicyVersion

SETTINGS = (
    FAKE,
    "sft.steps=3",
    "trainer.steps=4",
    "evaluation.problems=16",
    "metrics.sample_rollouts_every_steps=2",
    "transport.heartbeat_s=0.02",  # samples travel with heartbeats
    "trainer.data.record=true",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("run"), shared_memory()
    done = tba("launch", folder, *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done, before


def test_a_launch_writes_a_summary_whose_ledger_adds_up(run):
    folder, done, _ = run
    summary = summary_of(folder)
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["complete"], summary["steps"], summary["attempt"]) == (True, 4, 0)
    assert summary["accuracy_before"] is not None and summary["accuracy_after"] is not None
    assert summary["rollouts_generated"] > 0 and summary["rollouts_trained"] > 0
    assert (ledger_gap(summary), summary["rollouts_in_flight"], summary["rollouts_lost"]) == (0, 0, 0)
    assert summary["weight_versions"] >= 1
    assert (done.stderr, done.stdout.count("summary")) == ("", 1)


def test_metrics_have_one_line_a_step_and_a_table_of_rollouts(run):
    folder, _, _ = run
    assert steps(folder) == [1, 2, 3, 4]
    assert list(records(folder, "sft/nll", "sft-log")) == [1, 2, 3]
    assert '"tag": "rollouts/sample"' in (folder / "metrics.jsonl").read_text()


def test_nothing_of_a_launch_is_left(run):
    folder, _, before = run
    assert processes_of(folder) == []
    assert shared_memory() <= before
    assert not (folder / "rendezvous.json").exists()
    assert list(folder.glob(".store-*")) == []


def test_the_readme_lists_what_a_run_leaves(run):
    table = (ROOT / "README.md").read_text().partition("| in the run folder | is |")[2].partition("\n\n")[0]
    listed = {name.rstrip("/") for name in re.findall(r"^\| `([^`]+)` \|", table, flags=re.M)}
    assert listed == {path.name for path in run[0].iterdir()}


def test_a_complete_run_is_left_as_it_is(run):
    folder, first, _ = run
    before = contents(folder)
    again = tba("launch", folder, *SETTINGS)
    assert (again.returncode, again.stderr) == (0, "")
    assert "is complete" in again.stdout
    assert again.stdout.partition("summary")[2] == first.stdout.partition("summary")[2]
    assert contents(folder) == before


def test_a_run_folder_with_another_configuration_is_refused_by_its_keys(run):
    folder, _, _ = run
    before = contents(folder)
    refused = tba("launch", folder, *SETTINGS, "objective.loss.beta=0.2", "run.seed=3")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "run.seed is 0 there and 3 here" in line
    assert "objective.loss.beta is 0.1 there and 0.2 here" in line
    assert contents(folder) == before


def test_what_was_recorded_is_trained_on_again_without_searchers(run, tmp_path):
    folder, _, _ = run
    start = ("sft.steps=0", "model.init=pretrained", f"model.path={folder / 'sft'}")
    done = tba(
        "launch", tmp_path, *start, "trainer.steps=4", f"trainer.data={{kind: recording, folder: {folder}/recording}}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training: 4 steps, a recording" in done.stdout
    assert (summary_of(tmp_path)["complete"], summary_of(tmp_path)["steps"]) == (True, 4)
    for name in ("optim/loss", "optim/grad_norm", "optim/lr", "reward/train_mean"):
        assert records(tmp_path, name) == pytest.approx(records(folder, name), rel=1e-4)
    assert (tmp_path / "hf" / "config.json").exists()
    assert not list((tmp_path / "logs").glob("search-*"))


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        ("sync", "broadcast"),
        pytest.param("async", "files", marks=pytest.mark.slow),
        pytest.param("sync", "files", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_lock_step_trains_on_its_own_version_alone_and_files_bring_what_a_broadcast_does(
    mode, transport, tmp_path
):
    done = tba(
        "launch",
        tmp_path,
        *SETTINGS,
        "search.searchers=2",
        f"weights.mode={mode}",
        "weights.publish_every_steps=1",
        f"weights.transport={transport}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path)
    assert (summary["complete"], summary["steps"], ledger_gap(summary)) == (True, 4, 0)
    assert summary["weight_transfers_failed"] == 0
    if mode == "sync":
        assert (summary["weight_versions"], summary["age_steps_max"], summary["first_time_share"]) == (5, 0, 1.0)
    if transport == "files":
        assert newest(tmp_path / "weights")[0] == PolicyVersion(0, 4)


def test_a_run_whose_searchers_hold_the_reference_trains_on_what_they_say_of_it(tmp_path):
    done = tba("launch", tmp_path, *SETTINGS, "objective.reference.placement=searcher", "search.searchers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path)
    assert (summary["complete"], summary["steps"], ledger_gap(summary)) == (True, 4, 0)
    divergence = list(records(tmp_path, "policy/kl_ref").values())
    assert len(divergence) == 4 and all(map(math.isfinite, divergence))
    # The fake one says at most 0 and more than -1 nat a token; the policy, as its own reference, would be at 0.
    assert abs(divergence[0]) > 0.01
    rollouts_of(tmp_path, f"export={tmp_path / 'all.jsonl'}")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert rows and {row["reference_version"] for row in rows} == {0}
    assert all(-len(row["token_ids"]) < row["reference_logprob"] <= 0.0 for row in rows)
