"""A model folder is either understood whole or refused in one line that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba_megatron.errors import ModelError
from tba_megatron.models.registry import ARCHITECTURES, read_model

QWEN2 = json.loads((Path(__file__).parents[2] / "configs/tiny_qwen2/config.json").read_text())
LLAMA = {**QWEN2, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def write(folder: Path, hf_config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(hf_config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("hf_config", [QWEN2, LLAMA], ids=["qwen2", "llama"])
def test_the_shape_is_that_of_config_json(hf_config, tmp_path):
    architecture, shape = read_model(write(tmp_path, hf_config))
    assert architecture is ARCHITECTURES[hf_config["architectures"][0]]
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size) == (3, 128, 384)
    assert (shape.query_heads, shape.kv_heads, shape.head_size, shape.vocab_size) == (4, 2, 32, 19)
    assert shape.tied and shape.rope_theta == 10_000.0
    assert shape.qkv_bias is (hf_config is QWEN2)


def test_defaults_are_those_of_hugging_face(tmp_path):
    absent = ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "rms_norm_eps")
    hf_config = {k: v for k, v in LLAMA.items() if k not in absent}
    _, shape = read_model(write(tmp_path, hf_config))
    assert (shape.kv_heads, shape.head_size, shape.rope_theta) == (4, 32, 10_000.0)
    assert not shape.tied and shape.norm_eps == 1e-6


def test_the_base_of_rotary_positions_is_read_in_the_new_and_the_old_place(tmp_path):
    new = {**QWEN2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert read_model(write(tmp_path, new))[1].rope_theta == 5e5
    assert read_model(write(tmp_path, {**QWEN2, "rope_theta": 1e6}))[1].rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rotary scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary scaling 'llama3' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "architecture Qwen2MoeForCausalLM is not supported; known are"),
        ({"architectures": []}, "architecture (none) is not supported"),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(changes, words, tmp_path):
    assert words in refusal(write(tmp_path, {**QWEN2, **changes}))


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_missing_size_is_named(name, tmp_path):
    hf_config = {k: v for k, v in QWEN2.items() if k != name}
    assert f"lacks {name}" in refusal(write(tmp_path, hf_config))


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    assert "config.json does not exist; model.path must be a Hugging Face folder" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(tmp_path)
