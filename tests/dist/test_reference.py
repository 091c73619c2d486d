"""The reference: where it is kept changes no bit, a reset makes it the policy, and a resumed run has the same one."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import tiny
import torch
from ranks import run_ranks
from test_offline import (
    NAMES,
    assert_equal_exports,
    exported,
    logged,
    record,
    replay,
    replay_config,
    start_from,
)

from tba_megatron.config_objective import Grpo, ObjectiveConfig, TbVarGrad
from tba_megatron.errors import CheckpointError
from tba_megatron.loss.registry import make_loss
from tba_megatron.packing import pack

BATCH = tiny.train_groups(4, k=3)
LAYOUTS = [{}, {"pp": 2}, {"tp": 2}, {"dp": 2}]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [tiny.save_model(root / str(seed), layers=4, seed=seed) for seed in (1, 2)]


# ---- placements


def train(groups, trainer, folders, placement, objective, every):
    rank = tiny.Rank(groups, trainer, *folders, placement=placement, reset_every_steps=every)
    rank.loss = make_loss(ObjectiveConfig(loss=objective), 8)
    return rank.train([BATCH] * 5)


FAST = [
    ({}, TbVarGrad(beta=0.1), "bfloat16"),
    ({"tp": 2}, TbVarGrad(beta=0.1), "float32"),
    ({"pp": 2}, Grpo(beta=0.2), "float32"),
    ({"dp": 2}, Grpo(beta=0.2), "bfloat16"),
]
EVERY_CASE = [
    (layout, objective, dtype)
    for layout in LAYOUTS
    for objective in (TbVarGrad(beta=0.1), Grpo(beta=0.2))
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(
    ("layout", "objective", "dtype"),
    [pytest.param(*case, marks=() if case in FAST else SLOW) for case in EVERY_CASE],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_a_reference_in_host_memory_trains_as_one_beside_the_policy(layout, objective, dtype, folders):
    trainer = tiny.trainer_config(**layout, dtype=dtype)
    beside, host = (
        run_ranks(train, trainer, folders, placement, objective, 2, **layout) for placement in ("device", "host")
    )
    for mine, theirs in zip(host, beside, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=0, abs=0, nan_ok=True)
        assert mine.statistics == theirs.statistics and mine.norms == theirs.norms
        for name, expected in theirs.local.items():
            torch.testing.assert_close(mine.local[name], expected, rtol=0, atol=0)


def scoring(groups, folders):
    rank = tiny.Rank(groups, tiny.trainer_config(), *folders, placement="host")
    before = {name: p.detach().clone() for name, p in rank.policy.chunks[0].named_parameters()}
    with pytest.raises(ZeroDivisionError), rank.reference._weights.scoring() as (chunk,):
        assert any(not torch.equal(p, before[name]) for name, p in chunk.named_parameters())
        _ = 1 // 0
    return all(torch.equal(p, before[name]) for name, p in rank.policy.chunks[0].named_parameters())


def test_the_policy_has_its_weights_back_also_after_a_failure(folders):
    assert run_ranks(scoring, folders) == [True]


# ---- resets


@pytest.mark.parametrize(
    ("layout", "placement"),
    [
        pytest.param(layout, placement, marks=SLOW if placement == "host" and layout else ())
        for layout in LAYOUTS
        for placement in ("device", "host")
    ],
    ids=str,
)
def test_right_after_a_reset_the_log_ratio_is_exactly_zero(layout, placement, folders):
    found = run_ranks(
        train, tiny.trainer_config(**layout), folders, placement, TbVarGrad(beta=0.1), 2, **layout
    )
    (kls,) = [[s["kl"] for s in each.statistics] for each in found if each.statistics[0]]
    # Steps 3 and 5 are the first after a reset; their packs are those that the reference scored.
    assert kls[2] == kls[4] == 0.0
    assert min(abs(kls[0]), abs(kls[1]), abs(kls[3])) > 1e-4


def stored(groups, folders):
    """(log-prob sums under which version, how many were computed) as steps go by."""
    rank = tiny.Rank(groups, tiny.trainer_config(microbatch_tokens=1000), *folders, reset_every_steps=2)
    kept: dict = {}

    def packs():
        groups_now = [
            dataclasses.replace(
                group,
                rollouts=tuple(
                    dataclasses.replace(r, reference_logprob=value, reference_version=version)
                    for r in group.rollouts
                    for value, version in [kept.get(r.rollout_id, (None, None))]
                ),
            )
            for group in BATCH
        ]
        return pack(groups_now, 1000, reference_version=rank.reference.version)

    counts = []
    for _ in range(4):
        _, computed = rank.reference.fill(packs())
        counts.append(len(computed))
        kept.update(computed)
        rank.step(BATCH)
    return counts, {version for _, version in kept.values()}


def test_stored_log_probs_are_computed_anew_after_a_reset_and_only_then(folders):
    n = sum(len(group.rollouts) for group in BATCH)
    assert run_ranks(stored, folders) == [([n, 0, n, 0], {2})]


# ---- resume

EVERY = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return start_from(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recording"))


def with_resets(folder, model, recording, sizes, placement="device", **trainer):
    objective = {"reference": {"placement": placement, "reset_every_steps": EVERY}}
    return replay_config(folder, model, recording, sizes, objective, save_every_steps=7, keep_checkpoints=1, **trainer)


# Stopped at 8 the reference is the checkpoint's own policy, at 10 it is that of step 8, at 3 the start model.
@pytest.mark.parametrize(
    ("stop", "files"), [(3, []), (8, []), (10, ["step-00000008"])], ids=["before a reset", "at one", "after one"]
)
@pytest.mark.parametrize("placement", ["device", pytest.param("host", marks=SLOW)])
@pytest.mark.parametrize("sizes", [{}, pytest.param({"tp": 2, "pp": 2}, marks=SLOW)], ids=str)
def test_a_resumed_run_has_the_reference_of_the_unbroken_one(
    sizes, placement, stop, files, model, recording, tmp_path
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(replay, with_resets(whole, model, recording, sizes, placement, steps=14), **sizes)
    run_ranks(replay, with_resets(parts, model, recording, sizes, placement, steps=stop), **sizes)
    assert sorted(path.name for path in parts.glob("reference/*")) == files
    run_ranks(replay, with_resets(parts, model, recording, sizes, placement, steps=14), **sizes)
    found, expected = logged(parts, *NAMES), logged(whole, *NAMES)
    assert found == expected
    kls = dict(expected["policy/kl_ref"])
    assert {step for step, value in kls.items() if value == 0.0} >= {1, 5, 9, 13}
    assert_equal_exports(parts / "hf", whole / "hf")
    assert [path.name for path in whole.glob("reference/*")] == ["step-00000012"]  # of the one checkpoint, at 14


def test_the_kept_reference_is_the_policy_of_its_step_bit_for_bit(model, recording, tmp_path):
    run_ranks(replay, with_resets(tmp_path / "long", model, recording, {}, steps=10))
    run_ranks(replay, with_resets(tmp_path / "short", model, recording, {}, steps=8))
    kept, policy = exported(tmp_path / "long" / "reference" / "step-00000008"), exported(tmp_path / "short" / "hf")
    assert kept.keys() == policy.keys() and all(torch.equal(kept[name], policy[name]) for name in policy)


def test_a_branch_that_was_abandoned_leaves_its_reference_to_nobody(model, recording, tmp_path):
    run_ranks(replay, with_resets(tmp_path / "run", model, recording, {}, steps=3))
    # As after a save at step 6 that was killed before its checkpoint counted, in a run that went another way.
    left = tmp_path / "run" / "reference" / "step-00000004"
    shutil.copytree(model, left)
    run_ranks(replay, with_resets(tmp_path / "run", model, recording, {}, steps=6))
    run_ranks(replay, with_resets(tmp_path / "short", model, recording, {}, steps=4))
    kept, policy = exported(left), exported(tmp_path / "short" / "hf")
    assert kept.keys() == policy.keys() and all(torch.equal(kept[name], policy[name]) for name in policy)


@pytest.mark.parametrize("damage", ["gone", "without weights", "cut"])
def test_a_checkpoint_whose_reference_is_gone_or_damaged_is_one_line_on_every_rank(damage, model, recording, tmp_path):
    sizes = {"dp": 2}
    run_ranks(replay, with_resets(tmp_path / "run", model, recording, sizes, steps=10), **sizes)
    (folder,) = (tmp_path / "run" / "reference").iterdir()
    (weights,) = folder.glob("*.safetensors")
    if damage == "gone":
        folder.rename(tmp_path / "elsewhere")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        weights.unlink()

    def body(groups):
        with pytest.raises(CheckpointError) as caught:
            replay(groups, with_resets(tmp_path / "run", model, recording, sizes, steps=12))
        return str(caught.value)

    for message in run_ranks(body, **sizes):
        assert message.startswith(f"{folder} {'is missing' if damage == 'gone' else 'cannot be read'}")
        assert "remove the newest checkpoint" in message and "\n" not in message
