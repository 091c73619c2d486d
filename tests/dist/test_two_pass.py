"""A group larger than a microbatch is trained in two passes, and nothing but the memory changes."""

from __future__ import annotations

import pytest
import tiny
from ranks import run_ranks

from tba_megatron.config_sections import TbaPrime, TbVarGrad
from tba_megatron.loss.registry import make_loss

BATCHES = [tiny.train_groups(4, k=4, seed=seed) for seed in range(2)]
LOSSES = [TbVarGrad(beta=tiny.BETA), TbaPrime(beta=tiny.BETA)]
LAYOUTS = [{}, {"pp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2}, {"pp": 2, "vpp": 2}]


def train(groups, trainer, folders, objective):
    rank = tiny.Rank(groups, trainer, *folders)
    rank.loss = make_loss(objective)
    split = [pack.microbatch.split_group >= 0 for pack in rank.packs(BATCHES[0])]
    return split, rank.train(BATCHES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [tiny.save_model(root / str(seed), layers=4, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def whole(folders):
    """Every group in one microbatch."""
    return {
        objective.kind: run_ranks(train, tiny.trainer_config(microbatch_tokens=1000), folders, objective)[0]
        for objective in LOSSES
    }


# 1: every sequence alone; 30: some groups are split and some are not.
@pytest.mark.parametrize("microbatch_tokens", [1, 30])
@pytest.mark.parametrize("objective", LOSSES, ids=lambda o: o.kind)
def test_splitting_a_group_changes_no_loss_no_gradient_and_no_statistic(objective, microbatch_tokens, folders, whole):
    (unsplit, expected), trainer = whole[objective.kind], tiny.trainer_config(microbatch_tokens=microbatch_tokens)
    ((split, found),) = run_ranks(train, trainer, folders, objective)
    assert not any(unsplit) and any(split)
    assert all(split) == (microbatch_tokens == 1)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)
    for mine, theirs in zip(found.statistics, expected.statistics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    tiny.assert_same_weights(found.weights[-1], expected.weights[-1], 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_two_passes_work_in_every_layout(layout, folders, whole):
    _, expected = whole["tb_vargrad"]
    sizes = {name: size for name, size in layout.items() if name != "sequence_parallel"}
    trainer = tiny.trainer_config(microbatch_tokens=30, **layout)
    ranks = run_ranks(train, trainer, folders, LOSSES[0], **sizes)
    assert any(any(split) for split, _ in ranks)
    assert ranks[0][1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert ranks[0][1].norms == pytest.approx(expected.norms, rel=1e-5)
    tiny.assert_same_weights(tiny.whole([t.weights[-1] for _, t in ranks]), expected.weights[-1], 1e-5)
