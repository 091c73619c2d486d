"""Microbatches for tests of losses, and what is asked of every loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tba_megatron import config_objective as section
from tba_megatron.loss.base import Loss, LossInputs, LossOutput

# Every objective of the table, some in several forms.
MEMBERS = [
    section.TbVarGrad(beta=0.5),
    section.TbaPrime(beta=0.5),
    section.TbLearnedZ(beta=0.5),
    section.KimiK15(tau=0.5),
    section.KimiK2(tau=0.5),
    section.Oapl(tau=0.5),
    section.Rloo(),
    section.Rloo(beta=0.5),
    section.ProximalRloo(),
    section.ProximalRloo(beta=0.5),
    section.PpoClip(clip_low=0.1, clip_high=0.1),
    section.PpoClip(clip_low=0.1, clip_high=0.1, dual_clip=3.0),
    section.Grpo(clip_low=0.1, clip_high=0.1),
    section.Grpo(clip_low=0.1, clip_high=0.1, beta=0.5),
    section.DrGrpo(clip_low=0.1, clip_high=0.1),
    section.OnlineDpo(beta=1.0),
]


def inputs_of(
    lengths: list[int],
    groups: list[int],
    rewards: list[float],
    *,
    copies: list[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """A microbatch with random log-probs."""
    generator = torch.Generator().manual_seed(seed)
    n_sequences = len(lengths)
    copies_S = torch.tensor(copies or [1] * n_sequences, dtype=torch.float64)
    logprob_T = -torch.rand(sum(lengths), generator=generator, dtype=torch.float64).to(dtype)
    return LossInputs(
        logprob_T=logprob_T.requires_grad_(),
        sequence_index_T=torch.repeat_interleave(torch.arange(n_sequences), torch.tensor(lengths)),
        group_index_S=torch.tensor(groups),
        copies_S=copies_S,
        reward_S=torch.tensor(rewards, dtype=torch.float64),
        reference_logprob_S=-2 * torch.rand(n_sequences, generator=generator, dtype=torch.float64),
        behaviour_logprob_T=torch.full((sum(lengths),), math.nan, dtype=torch.float64),
        log_z_S=2 * torch.rand(n_sequences, generator=generator, dtype=torch.float64),
        n_groups=max(groups) + 1,
        normaliser=float(copies_S.sum()),
    )


def random_inputs(seed: int, *, max_length: int = 5) -> LossInputs:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, size=rng.integers(1, 5))
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    n = len(groups)
    return inputs_of(
        rng.integers(0, max_length + 1, n).tolist(),
        groups,
        rng.integers(0, 2, n).astype(float).tolist(),
        copies=rng.integers(1, 4, n).tolist(),
        seed=seed,
    )


def gradient_of(loss: Loss, inputs: LossInputs) -> torch.Tensor:
    logprob_T = inputs.logprob_T.detach().requires_grad_()
    loss(replace(inputs, logprob_T=logprob_T)).loss.backward()
    assert logprob_T.grad is not None
    return logprob_T.grad


def numbers(output: LossOutput) -> dict[str, float]:
    return {name: float(value) for name, value in (output.sums | output.maxima).items()}


def assert_same(a: dict[str, float], b: dict[str, float]) -> None:
    assert a == pytest.approx(b, abs=1e-12)


def permuted(inputs: LossInputs, order: torch.Tensor) -> LossInputs:
    """Sequences in another order; the tokens stay where they are."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return replace(
        inputs,
        sequence_index_T=place[inputs.sequence_index_T],
        group_index_S=inputs.group_index_S[order],
        copies_S=inputs.copies_S[order],
        reward_S=inputs.reward_S[order],
        reference_logprob_S=inputs.reference_logprob_S[order],
        log_z_S=None if inputs.log_z_S is None else inputs.log_z_S[order],
    )
