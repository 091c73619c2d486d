"""What a step says of the policy, in every layout and in two passes, against transformers and numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.config_objective import KimiK2, ObjectiveConfig, TbVarGrad
from tba_megatron.loss.registry import make_loss
from tba_megatron.loss.statistics import EDGES

GROUPS = tiny.train_groups(4, k=4, seed=3)
LAYOUTS = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}, {"pp": 2, "vpp": 2}]
WHOLE, SPLIT = 1000, 20  # tokens of a microbatch: with the second some groups are trained in two passes
BALANCE = TbVarGrad(beta=tiny.BETA)


def step(groups, trainer, folders, objective):
    rank = tiny.Rank(groups, trainer, *folders)
    rank.head = replace(rank.head, entropy=True)
    rank.loss = make_loss(ObjectiveConfig(loss=objective), 8)
    split = any(pack.microbatch.split_group >= 0 for pack in rank.packs(GROUPS))
    done = rank.step(GROUPS)
    return split, dict(done.statistics), {name: list(counts) for name, counts in done.histograms.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [tiny.save_model(root / str(seed), layers=4, seed=seed) for seed in (1, 2)]


def scored(model, prompt, completion) -> tuple[float, float]:
    """(log-prob of the completion, sum of the entropies at its positions)."""
    ids = np.concatenate([prompt, completion])
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None].long()).logits[0].double()
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    taken = logprobs.gather(1, torch.tensor(completion).long()[:, None])
    return float(taken.sum()), float(-(logprobs.exp() * logprobs).sum())


@pytest.fixture(scope="module")
def expected(folders):
    """Of each copy: (group, reward, log pi / pi_ref, log pi / mu, entropy, tokens)."""
    rows, (policy_model, reference_model) = [], map(tiny.load_hf_model, folders)
    for number, group in enumerate(GROUPS):
        for rollout, copies in zip(group.rollouts, group.copies, strict=True):
            policy, entropy = scored(policy_model, group.prompt_token_ids, rollout.token_ids)
            reference, _ = scored(reference_model, group.prompt_token_ids, rollout.token_ids)
            drift = policy - float(rollout.behaviour_logprobs.astype(np.float64).sum())
            rows += [(number, rollout.reward, policy - reference, drift, entropy, len(rollout.token_ids))] * copies
    return np.array(rows).T


CASES = [
    *((BALANCE, layout, SPLIT) for layout in LAYOUTS),
    (BALANCE, {}, WHOLE),
    (BALANCE, {"tp": 2, "dp": 2}, WHOLE),
    (KimiK2(tau=tiny.BETA), {}, SPLIT),
]


@pytest.mark.parametrize(("objective", "layout", "microbatch_tokens"), CASES, ids=lambda v: getattr(v, "kind", str(v)))
def test_entropy_spreads_and_histograms_are_those_of_the_whole_batch(
    objective, layout, microbatch_tokens, folders, expected
):
    sizes = {name: size for name, size in layout.items() if name != "sequence_parallel"}
    trainer = tiny.trainer_config(microbatch_tokens=microbatch_tokens, **layout)
    (split, found, histograms), *others = run_ranks(step, trainer, folders, objective, **sizes)
    assert split == (microbatch_tokens == SPLIT)
    assert all(statistics == {} and counts == {} for _, statistics, counts in others)

    group, reward, kl, drift, entropy, tokens = expected
    assert found["tokens"] == tokens.sum()
    assert found["entropy"] == pytest.approx(entropy.sum() / tokens.sum(), rel=1e-5)
    assert found["drift_square"] == pytest.approx((drift**2).mean(), rel=1e-5)
    assert found["drift_per_token"] == pytest.approx(drift.sum() / tokens.sum(), rel=1e-5)
    log_ratio = kl if objective.kind == "tb_vargrad" else drift
    if objective.kind == "tb_vargrad":
        assert found["kl_square"] == pytest.approx((kl**2).mean(), rel=1e-5)
        assert found["kl_per_token"] == pytest.approx(kl.sum() / tokens.sum(), rel=1e-5)

    def centred(values):
        return values - np.array([values[group == g].mean() for g in range(len(GROUPS))])[group.astype(int)]

    residual = centred(reward / tiny.BETA - log_ratio) if log_ratio is kl else centred(reward) / tiny.BETA - log_ratio
    assert np.abs(residual[:, None] - np.array(EDGES)).min() > 1e-4  # no bin hangs on the last bits
    assert histograms == {"residual_nats": np.histogram(residual, EDGES)[0].tolist()}
