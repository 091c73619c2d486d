"""A group larger than a microbatch is trained in two passes, and nothing but the memory changes."""

from __future__ import annotations

import pytest
import tiny
from ranks import run_ranks

from tba_megatron.config_objective import (
    Grpo,
    GuardsConfig,
    KimiK2,
    ObjectiveConfig,
    OnlineDpo,
    ProximalRloo,
    TbaPrime,
    TbVarGrad,
)
from tba_megatron.loss.registry import make_loss

BATCHES = [tiny.train_groups(4, k=4, seed=seed) for seed in range(2)]
GRPO = Grpo(beta=0.2)  # reads the reference by token
LOSSES = [
    TbVarGrad(beta=tiny.BETA),
    TbaPrime(beta=tiny.BETA),
    KimiK2(tau=0.5),
    ProximalRloo(beta=0.2),
    GRPO,
    OnlineDpo(beta=0.5),
]
GUARDS = GuardsConfig(lost_negative_ratio=0.5)
LAYOUTS = [{}, {"pp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2}, {"pp": 2, "vpp": 2}]


def train(groups, trainer, folders, objective):
    rank = tiny.Rank(groups, trainer, *folders)
    guards = GuardsConfig() if isinstance(objective, OnlineDpo | ProximalRloo) else GUARDS
    rank.loss = make_loss(ObjectiveConfig(loss=objective, guards=guards), 8)
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
    # Ratios, and what is divided by a deviation, make more of the last bits of a log-prob than sums do.
    rel = 1e-6 if objective.kind in ("tb_vargrad", "tba_prime") else 1e-5
    assert found.losses == pytest.approx(expected.losses, rel=rel)
    assert found.norms == pytest.approx(expected.norms, rel=rel)
    for mine, theirs in zip(found.statistics, expected.statistics, strict=True):
        for name, value in theirs.items():
            of_behaviour = name.startswith(("ratio", "drift", "abs_drift"))
            assert mine[name] == pytest.approx(value, rel=1e-5 if of_behaviour else rel, abs=1e-6), name
    tiny.assert_same_weights(found.weights[-1], expected.weights[-1], 1e-6)


@pytest.mark.parametrize("microbatch_tokens", [30, 1000])
@pytest.mark.parametrize("objective", [LOSSES[0], GRPO], ids=lambda o: o.kind)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_one_and_two_passes_work_in_every_layout(layout, objective, microbatch_tokens, folders, whole):
    _, expected = whole[objective.kind]
    sizes = {name: size for name, size in layout.items() if name != "sequence_parallel"}
    trainer = tiny.trainer_config(microbatch_tokens=microbatch_tokens, **layout)
    ranks = run_ranks(train, trainer, folders, objective, **sizes)
    assert any(any(split) for split, _ in ranks) == (microbatch_tokens == 30)
    assert ranks[0][1].losses == pytest.approx(expected.losses, rel=1e-5)
    assert ranks[0][1].norms == pytest.approx(expected.norms, rel=1e-5)
    tiny.assert_same_weights(tiny.whole([t.weights[-1] for _, t in ranks]), expected.weights[-1], 1e-5)
