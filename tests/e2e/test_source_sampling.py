"""A source that samples with top-p stores the log-probs of what was sampled, and nothing outside of it is sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_child import VOCAB
from test_vllm_engine import TOLERANCE, generate, prompt, settings


def kept_logprobs(model, sequence: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """[T, VOCAB] of the next token after temperature and top-p, in nats; -inf where it cannot be sampled."""
    with torch.no_grad():
        logits = model(torch.from_numpy(sequence).long()[None]).logits[0, :, :VOCAB].double() / temperature
    logprobs, order = torch.log_softmax(logits, -1).sort(dim=-1, descending=True)
    before = logprobs.exp().cumsum(-1) - logprobs.exp()
    kept = logprobs.masked_fill(before >= top_p, -torch.inf).log_softmax(-1)
    return torch.empty_like(kept).scatter_(-1, order, kept).numpy()


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_behaviour_logprobs_with_top_p_are_those_of_what_is_left(engines, first_models, top_p):
    asked = prompt(10)
    (completions,) = engines.call("tied", generate, [asked], settings(n=16, temperature=1.3, top_p=top_p))
    n_less = 0
    for completion in completions:
        sequence = np.concatenate([asked, completion.token_ids])
        expected = kept_logprobs(first_models["tied"], sequence, 1.3, top_p)[len(asked) - 1 : -1]
        of_tokens = expected[np.arange(len(completion.token_ids)), completion.token_ids]
        np.testing.assert_allclose(completion.behaviour_logprobs, of_tokens, atol=TOLERANCE)
        n_less += int(np.isinf(expected).any(axis=1).sum())
    assert n_less > 50, "top-p took hardly anything away"
