"""A real model, SmolLM2-135M-Instruct, says in the trainer what it says in transformers."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from logits import packed_logits
from ranks import run_ranks
from smollm2 import smollm2_folder

from tba_megatron.models.tokenizer import HfTokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    ("The capital of France is", " Paris, and the capital of Italy is Rome."),
    ("def add(a, b):\n", "    return a + b\n\n\nprint(add(1, 2))\n"),
    ("<|im_start|>user\nWhat is 12 times 7?<|im_end|>\n<|im_start|>assistant\n", "12 times 7 is 84.<|im_end|>"),
    ("Once upon a time", ", there was a little girl who lived in a small house at the edge of a large forest. " * 8),
    ("x", " y"),
]
LAYOUTS = [{}, {"pp": 2}, {"tp": 3}, {"tp": 3, "sequence_parallel": True}]


@pytest.fixture(scope="module")
def reference():
    """The folder, the sequences in tokens, and transformers' log-probs of each."""
    folder = smollm2_folder()
    tokenizer = HfTokenizer(folder)
    sequences = [(tokenizer.encode(prompt), tokenizer.encode(completion)) for prompt, completion in TEXTS]
    model = tiny.load_hf_model(folder)
    with torch.no_grad():
        expected = [
            model(torch.from_numpy(np.concatenate(s)).long()[None]).logits[0].log_softmax(-1) for s in sequences
        ]
    return folder, sequences, expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_trainer_agrees_with_transformers_on_a_real_model(layout, reference):
    folder, sequences, expected = reference
    sizes = {name: size for name, size in layout.items() if name != "sequence_parallel"}
    ranks = run_ranks(packed_logits, folder, tiny.trainer_config(**layout), sequences, 256, limit_s=300.0, **sizes)
    last = [found for found in ranks if found]
    assert len(last) == sizes.get("tp", 1)
    for found in last:
        logprobs = [found[i].log_softmax(-1) for i in range(len(sequences))]
        difference = torch.cat([(mine - theirs).abs() for mine, theirs in zip(logprobs, expected, strict=True)])
        assert float(difference.max()) <= 1e-3
        assert float(difference.mean()) <= 1e-4
        for mine, theirs in zip(logprobs, expected, strict=True):
            assert torch.equal(mine.argmax(-1), theirs.argmax(-1))
