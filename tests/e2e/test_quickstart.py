"""The main job on real engines: it learns, it counts, it exports, and it leaves nothing behind."""

import json

import pytest
from launching import (
    SUMMARY_KEYS,
    contents,
    ledger_gap,
    processes_of,
    records,
    shared_memory,
    steps,
    summary_of,
    tba,
)

pytestmark = pytest.mark.slow

SETTINGS = ("trainer.steps=120", "evaluation.problems=384")
PARALLEL = "configs/quickstart_tp2_pp2.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("run"), shared_memory()
    done = tba("launch", folder, *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done, before


def test_reward_rises(run):
    summary = summary_of(run[0])
    # The standard error of each accuracy is about 0.025.
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05
    rewards = list(records(run[0], "reward/train_mean").values())
    assert sum(rewards[-20:]) > sum(rewards[:20])


def test_the_summary_is_whole_and_its_ledger_adds_up(run):
    summary = summary_of(run[0])
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["complete"], summary["steps"], summary["skipped_steps"]) == (True, 120, 0)
    assert (ledger_gap(summary), summary["rollouts_in_flight"], summary["rollouts_lost"]) == (0, 0, 0)
    assert summary["rollouts_trained"] > 0
    assert summary["weight_transfers_failed"] == 0
    assert summary["age_steps_p50"] <= 5


def test_every_step_is_in_both_logs_and_rollouts_are_shown(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert steps(run[0]) == list(range(1, 121))
    events = EventAccumulator(str(run[0] / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("reward/train_mean")] == list(range(1, 121))
    assert {"eval/accuracy", "optim/loss", "policy/kl_ref", "age/p50", "ledger/trained"} <= set(
        events.Tags()["scalars"]
    )
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("rollouts/sample")]
    (text,) = events.Tensors(tag)[0].tensor_proto.string_val
    assert text.decode().startswith("| prompt | completion | reward | version |")


def test_the_export_loads_in_transformers_without_a_missing_or_unexpected_key(run):
    import torch
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(run[0] / "hf", dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_export_is_as_good_in_an_engine_of_its_own(run):
    done = tba("eval", run[0], *SETTINGS)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["model"] == str(run[0] / "hf")
    assert measured["problems"] == 384
    # Two samples of 384 answers: 0.1 is about three standard errors of their difference.
    assert abs(measured["accuracy"] - summary_of(run[0])["accuracy_after"]) < 0.1


def test_nothing_is_left_and_a_second_launch_changes_nothing(run):
    folder, _, before = run
    assert processes_of(folder) == []
    assert shared_memory() <= before
    files = contents(folder)
    again = tba("launch", folder, *SETTINGS)
    assert (again.returncode, again.stderr) == (0, "")
    assert contents(folder) == files


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Overrides that start from weights on disk, the same for every layout."""
    folder = tmp_path_factory.mktemp("start")
    done = tba("sft", folder, "sft.steps=1")
    assert done.returncode == 0, done.stderr
    # A larger epsilon: Adam turns rounding noise of vanishing gradients into whole steps otherwise.
    start = ("model.init=pretrained", f"model.path={folder / 'sft'}")
    return (*start, "sft.steps=20", "sft.optimizer.adam_eps=1e-4")


@pytest.fixture(scope="module")
def parallel_run(tmp_path_factory, pretrained):
    folder = tmp_path_factory.mktemp("tp2_pp2")
    overrides = (*pretrained, "trainer.steps=5", "evaluation.problems=16")
    done = tba("launch", folder, *overrides, config=PARALLEL)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_four_ranks_run_the_same_job(parallel_run):
    summary = summary_of(parallel_run)
    assert {path.name for path in (parallel_run / "logs").iterdir()} >= {f"train-{rank}.log" for rank in range(4)}
    assert (summary["complete"], summary["steps"], ledger_gap(summary)) == (True, 5, 0)
    assert summary["weight_transfers_failed"] == 0
    assert summary["weight_versions"] >= 1
    assert processes_of(parallel_run) == []


def test_four_ranks_have_the_losses_of_one(parallel_run, pretrained, tmp_path):
    one_rank = ("trainer.tensor_parallel=1", "trainer.pipeline_parallel=1", "trainer.megatron_extra={}")
    done = tba("sft", tmp_path / "one", *pretrained, *one_rank, config=PARALLEL)
    assert done.returncode == 0, done.stderr
    one, four = (records(folder, "sft/nll", "sft-log") for folder in (tmp_path / "one", parallel_run))
    assert list(one) == list(range(1, 21))
    assert four == pytest.approx(one, abs=1e-4)
