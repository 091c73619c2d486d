"""A learned log Z on several ranks: every layout is one rank, a resumed run the unbroken one, a skipped step none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.errors import CheckpointError
from tba_megatron.loss.guards import Guards
from tba_megatron.loss.regression import TbLearnedZ
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.checkpoint import RunState
from tba_megatron.trainer.export_hf import export_hf
from tba_megatron.trainer.log_z import LogZ

SLOW = pytest.mark.slow
RATE = 0.1
BATCHES = [tiny.train_groups(4, k=4, seed=seed) for seed in range(4)]
LAYOUTS = [
    {"pp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"dp": 2},
    {"pp": 2, "vpp": 2},
    pytest.param({"tp": 2}, marks=SLOW),
    pytest.param({"tp": 2, "pp": 2, "dp": 2}, marks=SLOW),
]


def sizes_of(layout):
    return {name: size for name, size in layout.items() if name != "sequence_parallel"}


def learner(groups, trainer, folders) -> tiny.Rank:
    rank = tiny.Rank(groups, trainer, *folders)
    rank.loss = TbLearnedZ(tiny.BETA, Guards())
    rank.policy = replace(rank.policy, log_z=LogZ(rank.shape.hidden_size, RATE, groups.device))
    return rank


def state_of(rank: tiny.Rank) -> dict[str, np.ndarray]:
    assert rank.policy.log_z is not None
    return rank.policy.log_z.state()


def train(groups, trainer, folders):
    rank = learner(groups, trainer, folders)
    split = [pack.microbatch.split_group >= 0 for pack in rank.packs(BATCHES[0])]
    return split, rank.train(BATCHES), state_of(rank)


def assert_same_head(found, expected, tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [tiny.save_model(root / str(seed), layers=4, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def one_rank(folders):
    """Every group in one microbatch."""
    return run_ranks(train, tiny.trainer_config(microbatch_tokens=1000), folders)[0]


# 1: every sequence alone; 30: some groups are split over microbatches and some are not.
@pytest.mark.parametrize("microbatch_tokens", [1, 30])
def test_splitting_a_group_changes_nothing(microbatch_tokens, folders, one_rank):
    _, expected, head = one_rank
    ((split, found, mine),) = run_ranks(train, tiny.trainer_config(microbatch_tokens=microbatch_tokens), folders)
    assert any(split) and all(split) == (microbatch_tokens == 1)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    for one, other in zip(found.statistics, expected.statistics, strict=True):
        for name in ("log_z", "log_z_square", "log_z_error_square", "residual_square"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), name
    tiny.assert_same_weights(found.weights[-1], expected.weights[-1], 1e-5)
    assert_same_head(mine, head, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_learns_what_one_rank_learns(layout, folders, one_rank):
    _, expected, head = one_rank
    trainer = tiny.trainer_config(microbatch_tokens=30, **layout)
    ranks = run_ranks(train, trainer, folders, **sizes_of(layout))
    assert ranks[0][1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert ranks[0][1].norms == pytest.approx(expected.norms, rel=1e-5)
    tiny.assert_same_weights(tiny.whole([t.weights[-1] for _, t, _ in ranks]), expected.weights[-1], 1e-5)
    assert_same_head(ranks[0][2], head, 1e-5)
    for _, _, mine in ranks:  # the same bits
        assert_same_head(mine, ranks[0][2])


def test_log_z_starts_at_the_mean_estimate_of_the_first_batch_and_then_moves(one_rank):
    _, trained, head = one_rank
    rewards = [r.reward for g in BATCHES[0] for r, c in zip(g.rollouts, g.copies, strict=True) for _ in range(c)]
    first, last = trained.statistics[0], trained.statistics[-1]
    assert first["log_z"] == pytest.approx(np.mean(rewards) / tiny.BETA - first["kl"], rel=1e-5)
    assert first["log_z_square"] == pytest.approx(first["log_z"] ** 2)  # one value for all prompts
    assert last["log_z_square"] > last["log_z"] ** 2 + 1e-4
    assert head["steps"] == len(BATCHES) and np.abs(head["weight"]).min() > 0


def test_the_model_gets_no_gradient_from_log_z(folders):
    """Its first step is the same whatever log Z goes on to learn from it."""

    def body(groups, rate):
        rank = learner(groups, tiny.trainer_config(), folders)
        rank.policy = replace(rank.policy, log_z=LogZ(rank.shape.hidden_size, rate, groups.device))
        rank.step(BATCHES[0])
        return rank.weights(), state_of(rank)["weight"]

    (slow, little), (fast, much) = (run_ranks(body, rate)[0] for rate in (1e-6, 10.0))
    tiny.assert_same_weights(slow, fast, 0.0)
    assert np.abs(much).max() > 1e3 * np.abs(little).max() > 0


def broken(groups_of_a_step):
    """With a reward that is no number."""
    first = groups_of_a_step[0]
    rollouts = (replace(first.rollouts[0], reward=math.inf), *first.rollouts[1:])
    return [replace(first, rollouts=rollouts), *groups_of_a_step[1:]]


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("before", [0, 2])
def test_a_skipped_step_changes_neither_the_weights_nor_log_z(before, sizes, folders):
    def body(groups):
        rank = learner(groups, tiny.trainer_config(**sizes), folders)
        rank.train(BATCHES[:before])
        weights, head = rank.weights(), state_of(rank)
        done = rank.step(broken(BATCHES[2]))
        return done.skipped, (weights, rank.weights()), (head, state_of(rank)), rank.step(BATCHES[3]).skipped

    for skipped, (weights, weights_after), (head, head_after), next_skipped in run_ranks(body, **sizes):
        assert skipped and not next_skipped
        tiny.assert_same_weights(weights_after, weights, 0.0)
        assert_same_head(head_after, head)


class Spoilt(TbLearnedZ):
    """Its log Z learns from what is no number, once log Z has started."""

    def __call__(self, inputs):
        found = super().__call__(inputs)
        assert found.log_z_gradient_S is not None and inputs.log_z_S is not None
        spoilt_S = torch.where(inputs.log_z_S != 0, math.nan, found.log_z_gradient_S)
        return replace(found, log_z_gradient_S=spoilt_S)


@pytest.mark.parametrize("before", [0, 1])
def test_a_gradient_of_log_z_alone_that_is_not_finite_skips_the_step_too(before, folders):
    def body(groups):
        rank = learner(groups, tiny.trainer_config(dp=2), folders)
        rank.train(BATCHES[:before])
        weights, head = rank.weights(), state_of(rank)
        if groups.dp_rank == 1:
            rank.loss = Spoilt(tiny.BETA, Guards())
        done = rank.step(BATCHES[1])
        assert math.isfinite(done.grad_norm)
        return done.skipped, (weights, rank.weights()), (head, state_of(rank))

    for skipped, (weights, weights_after), (head, head_after) in run_ranks(body, dp=2):
        assert skipped
        tiny.assert_same_weights(weights_after, weights, 0.0)
        assert_same_head(head_after, head)


# Checkpoints


def run_state(step: int, groups) -> RunState:
    return RunState(
        step=step,
        base_steps=(0,),
        data_parallel=groups.dp_size,
        next_position=0,
        unfinished_prompts=[],
        generated={},
    )


def train_and_save(groups, trainer, folders, path, first: int, last: int):
    """Steps ``first`` to ``last``, from the newest checkpoint unless ``first`` is 0; a checkpoint after the last one,
    written while one more step is made."""
    rank = learner(groups, trainer, folders)
    if first:
        checkpoint.load(checkpoint.checkpoints(path)[-1][1], rank.policy, None, groups)
    trained = rank.train(BATCHES[first:last])
    head = state_of(rank)
    writer = checkpoint.CheckpointWriter(path, groups, 2)
    writer.begin(rank.policy, None, run_state(last, groups))
    rank.step(BATCHES[0])
    writer.finish()
    return trained, head


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, pytest.param({"tp": 2, "dp": 2}, marks=SLOW)], ids=str)
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(sizes, folders, tmp_path):
    trainer = tiny.trainer_config(**sizes)
    whole = run_ranks(train_and_save, trainer, folders, tmp_path / "whole", 0, 4, **sizes)
    parts = [
        run_ranks(train_and_save, trainer, folders, tmp_path / "parts", first, last, **sizes)
        for first, last in ((0, 1), (1, 2), (2, 4))
    ]
    assert [loss for part in parts for loss in part[0][0].losses] == whole[0][0].losses
    for rank, (trained, head) in enumerate(whole):
        tiny.assert_same_weights(parts[-1][rank][0].weights[-1], trained.weights[-1], 0.0)
        assert_same_head(parts[-1][rank][1], head)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({}, {"tp": 2, "pp": 2}), ({"dp": 2}, {}), pytest.param({"pp": 2}, {"dp": 2}, marks=SLOW)],
    ids=str,
)
def test_a_run_goes_on_at_other_parallel_sizes(saved, loaded, folders, tmp_path):
    (expected, head), *_ = run_ranks(train_and_save, tiny.trainer_config(), folders, tmp_path / "whole", 0, 4)
    run_ranks(train_and_save, tiny.trainer_config(**saved), folders, tmp_path / "moved", 0, 2, **saved)
    ranks = run_ranks(train_and_save, tiny.trainer_config(**loaded), folders, tmp_path / "moved", 2, 4, **loaded)
    assert ranks[0][0].losses == pytest.approx(expected.losses[2:], rel=1e-5)
    for _, mine in ranks:
        assert_same_head(mine, head, 1e-5)


def test_a_checkpoint_of_another_objective_is_one_line_on_every_rank(folders, tmp_path):
    def body(groups):
        messages = []
        for name, saves, loads in (("without", tiny.Rank, learner), ("with", learner, tiny.Rank)):
            trainer = tiny.trainer_config(pp=2)
            makes = [make if make is tiny.Rank else lambda g, t, *f: learner(g, t, f) for make in (saves, loads)]
            saving, loading = (make(groups, trainer, *folders) for make in makes)
            path = checkpoint.save(tmp_path / name, saving.policy, None, run_state(1, groups), groups, keep=1)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(path, loading.policy, None, groups)
            messages.append(str(caught.value))
        return messages

    first, second = run_ranks(body, pp=2)
    assert first == second and not any("\n" in message for message in first)
    assert "log_z.npz is missing, which objective.loss tb_learned_z goes on from" in first[0]
    assert "log_z.npz is a learned log Z, which objective.loss has no use for" in first[1]


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def other_width(path):
    np.savez(path, **LogZ(3, RATE, torch.device("cpu")).state())


def incomplete(path):
    np.savez(path, weight=np.zeros(32, np.float32), steps=np.array(1))


@pytest.mark.parametrize("damage", [cut, other_width, incomplete])
def test_a_damaged_log_z_is_one_line_that_names_the_file(damage, folders, tmp_path):
    def body(groups):
        rank = learner(groups, tiny.trainer_config(), folders)
        rank.train(BATCHES[:1])
        path = checkpoint.save(tmp_path, rank.policy, None, run_state(1, groups), groups, keep=1)
        damage(path / "log_z.npz")
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(path, rank.policy, None, groups)
        return str(caught.value), path

    ((message, path),) = run_ranks(body)
    assert f"{path / 'log_z.npz'} cannot be read (" in message and "\n" not in message


def test_neither_published_weights_nor_the_exported_model_hold_log_z(folders, tmp_path):
    def body(groups):
        rank, plain = learner(groups, tiny.trainer_config(), folders), tiny.Rank(groups, tiny.trainer_config(), *folders)
        rank.train(BATCHES[:1])
        export_hf(
            rank.policy.chunks,
            rank.architecture,
            rank.shape,
            groups,
            folder=tmp_path / "hf",
            template=folders[0],
            dtype="float32",
        )
        return set(rank.weights()), set(plain.weights())

    ((streamed, expected),) = run_ranks(body)
    assert streamed == expected
    assert not [path for path in (tmp_path / "hf").iterdir() if "log_z" in path.name]
    tiny.load_hf_model(tmp_path / "hf")
