"""Who holds the reference's weights: the trainer, or nobody in it where searchers send what it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.config import Config
from tba_megatron.trainer.build import build_model
from tba_megatron.types import Rollout, TrainGroup

TB, RLOO = {"kind": "tb_vargrad", "beta": 0.1}, {"kind": "rloo"}


def config(folder, loss: dict, placement: str) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": folder / "run"},
            "model": {"path": folder, "init": "pretrained", "max_length": 16},
            "task": {"kind": "copy", "length": 2},
            "sft": {"steps": 0},
            "trainer": {"optimizer": {"learning_rate": 1e-3}, "prompts_per_step": 2, "rollouts_per_prompt": 3},
            "objective": {"loss": loss, "reference": {"placement": placement}},
            "search": {"max_new_tokens": 6},
        }
    )


def reference_on_rank(groups, made: Config) -> bool:
    return build_model(made, groups).reference is not None


def told(model, group: TrainGroup, rollout: Rollout) -> Rollout:
    ids = torch.from_numpy(np.concatenate([group.prompt_token_ids, rollout.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)[:-1].gather(1, ids[1:, None])[:, 0]
    known = float(logprobs[len(group.prompt_token_ids) - 1 :].double().sum()) - 0.25
    return replace(rollout, reference_logprob=known, reference_version=0)


def kl_on_rank(groups, made: Config, train_groups) -> float:
    """Of the policy to what the rollouts say of the reference, in the step of a trainer that holds none."""
    from tba_megatron.packing import pack
    from tba_megatron.trainer.model import to_device
    from tba_megatron.trainer.step import update

    model = build_model(made, groups)
    packs = pack(train_groups, made.trainer.microbatch_tokens, 1)
    batches = [to_device(p.microbatch, groups.device) for p in packs]
    n = float(sum(sum(group.copies) for group in train_groups))
    return update(model.policy, batches, model.loss_at(1), n, model.head, groups).statistics["kl"]


@pytest.mark.parametrize(
    ("loss", "placement", "held"), [(TB, "device", True), (TB, "searcher", False), (RLOO, "device", False)]
)
def test_a_trainer_holds_the_reference_where_it_is_read_and_no_searcher_does(loss, placement, held, tmp_path):
    tiny.hf_model("qwen2", tied=True).save_pretrained(tmp_path)
    assert run_ranks(reference_on_rank, config(tmp_path, loss, placement)) == [held]


def test_without_a_reference_a_step_takes_what_the_rollouts_say_of_it(tmp_path):
    """0.25 nats below the policy, for every completion."""
    model = tiny.hf_model("qwen2", tied=True)
    model.save_pretrained(tmp_path)
    groups = [
        replace(group, rollouts=tuple(told(model, group, rollout) for rollout in group.rollouts))
        for group in tiny.train_groups(2)
    ]
    (divergence,) = run_ranks(kl_on_rank, config(tmp_path, TB, "searcher"), groups)
    assert divergence == pytest.approx(0.25, abs=1e-5)
