"""The head of a learned log Z: its features, its start, its steps, its state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_cases import inputs_of
from rollout_factory import RolloutFactory, train_group

from tba_megatron.loss.guards import Guards
from tba_megatron.loss.regression import TbLearnedZ
from tba_megatron.packing import pack, padding
from tba_megatron.trainer.log_z import LogZ, prompt_means

CPU = torch.device("cpu")


def gradient(seed: int, size: int = 5) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_features_are_the_mean_over_the_prompt_and_over_nothing_else():
    make = RolloutFactory()
    groups = [
        train_group("ppp", [make.rollout([5, 6]), make.rollout([])]),
        train_group("qq", [make.rollout([7])]),
    ]
    (packed,) = pack(groups, 64, 8)
    mb = packed.microbatch
    assert (mb.sequence_index == -1).any()
    hidden = torch.randn(len(mb.tokens), 4, dtype=torch.float64)
    found = prompt_means(hidden, mb)
    assert found.dtype == torch.float32 and found.shape == (3, 4)
    for s in range(3):
        at = np.flatnonzero(mb.sequence_index == s)
        n_prompt = len(groups[int(mb.group_index[s])].prompt_token_ids)
        torch.testing.assert_close(found[s], hidden[at[:n_prompt]].float().mean(0))


def test_a_microbatch_of_padding_has_no_features():
    assert prompt_means(torch.zeros(8, 4, dtype=torch.bfloat16), padding(8)).shape == (0, 4)


def test_log_z_is_linear_in_the_features():
    head = LogZ(2, 0.1, CPU)
    head.weight.copy_(torch.tensor([1.0, -2.0]))
    head.start(0.5)
    found = head.values(torch.tensor([[3.0, 1.0], [0.0, 0.25]]))
    assert found.dtype == torch.float64 and found.tolist() == [1.5, 0.0]


def test_a_step_moves_the_bias_by_the_rate_and_each_weight_by_the_rate_over_their_number():
    head = LogZ(4, 0.2, CPU)
    head.step(torch.tensor([3.0, -50.0, 7.0, 9.0, -2.0], dtype=torch.float64))
    assert head.weight.tolist() == pytest.approx([-0.05, 0.05, -0.05, -0.05], rel=1e-3)
    assert head.bias.tolist() == pytest.approx([0.2], rel=1e-3)
    assert head.steps == 1


def test_rounding_noise_is_no_step():
    head = LogZ(4, 0.2, CPU)
    head.step(torch.full((5,), 1e-9, dtype=torch.float64))
    assert head.bias.abs().max() < 1e-6


def test_a_restored_head_goes_on_bit_for_bit_and_its_state_is_a_copy():
    whole, saved = LogZ(4, 0.2, CPU), LogZ(4, 0.2, CPU)
    for head in (whole, saved):
        head.start(2.0)
        for step in range(3):
            head.step(gradient(step))
    state = saved.state()
    saved.step(gradient(99))
    restored = LogZ(4, 0.2, CPU)
    restored.restore(state)
    assert restored.steps == 3
    for step in range(3, 6):
        for head in (whole, restored):
            head.step(gradient(step))
    for name, array in whole.state().items():
        np.testing.assert_array_equal(restored.state()[name], array)
    assert np.abs(whole.state()["weight.exp_avg"]).min() > 0


def test_the_state_of_a_head_that_made_no_step_is_that_of_a_new_one():
    restored, new = LogZ(4, 0.2, CPU), LogZ(4, 0.2, CPU)
    restored.restore(new.state())
    for head in (restored, new):
        head.step(gradient(0))
    for name, array in new.state().items():
        np.testing.assert_array_equal(restored.state()[name], array)


def test_a_head_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"weight has the shape \(3,\), but this model needs \(4,\)"):
        LogZ(4, 0.1, CPU).restore(LogZ(3, 0.1, CPU).state())


def test_with_a_policy_that_stays_log_z_becomes_the_mean_of_each_prompts_estimates():
    """Three prompts with features of their own, and completions of different rewards and log-probs."""
    inputs = inputs_of(
        [2, 1, 3, 1, 2, 2], [0, 0, 1, 1, 2, 2], [1.0, 0.0, 0.0, 0.3, 1.0, 1.0], copies=[1, 2, 1, 1, 3, 1]
    )
    beta, head = 0.5, LogZ(8, 0.05, CPU)
    loss = TbLearnedZ(beta, Guards())
    features_G = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    features_S = features_G[inputs.group_index_S]
    logprob_S = torch.zeros(6, dtype=torch.float64).index_add(0, inputs.sequence_index_T, inputs.logprob_T.detach())
    one_S = inputs.reward_S / beta - logprob_S + inputs.reference_logprob_S
    zeros_G = torch.zeros(3, dtype=torch.float64)
    expected_G = zeros_G.index_add(0, inputs.group_index_S, inputs.copies_S * one_S) / zeros_G.index_add(
        0, inputs.group_index_S, inputs.copies_S
    )
    assert (expected_G - expected_G.mean()).abs().max() > 0.3
    for _ in range(1500):
        gradient_S = loss(replace(inputs, log_z_S=head.values(features_S))).log_z_gradient_S
        assert gradient_S is not None
        head.step(torch.cat([gradient_S @ features_S.double(), gradient_S.sum()[None]]))
    torch.testing.assert_close(head.values(features_G), expected_G, rtol=0, atol=1e-2)
