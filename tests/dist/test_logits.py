"""Every architecture in every parallel layout gives the logits of transformers, at every position of every sequence."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from logits import packed_logits
from ranks import run_ranks

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
# name: (kind, tied, changes to its config.json)
MODELS: dict[str, tuple[str, bool, dict]] = {
    **{kind: (kind, kind == "gpt2", {}) for kind in ("qwen2", "qwen3", "llama", "gpt_neox", "gpt2")},
    "qwen2_tied": ("qwen2", True, {}),
    "qwen3_tied": ("qwen3", True, {}),
    "llama_tied": ("llama", True, {}),
    "gpt_neox_tied": ("gpt_neox", True, {}),
    "gpt2_untied": ("gpt2", False, {}),
    "llama_biases": ("llama", False, {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": ("llama", True, {"rope_parameters": LLAMA3}),
    "llama_linear": ("llama", False, {"rope_parameters": LINEAR}),
    "llama_all_kv_heads": ("llama", False, {"num_key_value_heads": 4}),
    "gpt_neox_sequential": ("gpt_neox", False, {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "gpt_neox_linear": ("gpt_neox", False, {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}),
    "gpt2_relu": ("gpt2", True, {"activation_function": "relu", "n_inner": None}),
}
LAYOUTS: dict[str, dict] = {
    "one_rank": {},
    "tp2": {"tp": 2},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_pp2_sequence_parallel": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
HARD = "tp2_pp2_sequence_parallel"
FAST = [
    *[(model, layout) for model in ("qwen2", "qwen3", "llama", "gpt_neox", "gpt2") for layout in ("one_rank", HARD)],
    *[
        (model, "one_rank")
        for model in ("llama_biases", "llama_llama3", "llama_linear", "gpt_neox_sequential", "gpt_neox_linear")
    ],
    ("gpt_neox_tied", HARD),
]
SLOW = [(m, layout) for m in MODELS for layout in LAYOUTS if (m, layout) not in FAST]
# Prompt and completion lengths: uneven, some equal, one sequence as long as the positions of the model. They make two
# microbatches, which is what interleaved stages need.
LENGTHS = [(5, 3), (1, 7), (4, 4), (2, 1), (40, 24), (3, 10), (3, 10)]
_RNG = np.random.default_rng(0)
SEQUENCES = [(_RNG.integers(2, tiny.VOCAB, n, np.int32), _RNG.integers(2, tiny.VOCAB, m, np.int32)) for n, m in LENGTHS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """folder and expected logits of each sequence, by model; made when asked for."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(name: str):
        if name not in made:
            kind, tied, changes = MODELS[name]
            folder = tiny.save_model(root / name, kind, tied=tied, layers=4, seed=3, **changes)
            model = tiny.load_hf_model(folder)
            with torch.no_grad():
                made[name] = (
                    folder,
                    [model(torch.from_numpy(np.concatenate(pair))[None]).logits[0] for pair in SEQUENCES],
                )
        return made[name]

    return get


def check(model, layout, saved):
    folder, expected = saved(model)
    sizes = {k: v for k, v in LAYOUTS[layout].items() if k in ("tp", "pp", "vpp")}
    ranks = run_ranks(packed_logits, folder, tiny.trainer_config(**LAYOUTS[layout]), SEQUENCES, **sizes)
    last = [found for found in ranks if found]
    assert len(last) == sizes.get("tp", 1)
    for found in last:
        assert sorted(found) == list(range(len(SEQUENCES)))
        for i, logits in found.items():
            torch.testing.assert_close(logits, expected[i], rtol=0, atol=5e-6)
    assert 1 < max(float(logits.abs().max()) for logits in expected) < 30


@pytest.mark.parametrize(("model", "layout"), FAST)
def test_logits_are_those_of_transformers(model, layout, saved):
    check(model, layout, saved)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), SLOW)
def test_logits_are_those_of_transformers_in_every_layout(model, layout, saved):
    check(model, layout, saved)
