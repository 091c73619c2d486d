"""A model folder is either understood whole or refused in one line that says why."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tba_megatron.errors import ModelError
from tba_megatron.models.architecture import check_length
from tba_megatron.models.random_weights import RandomTensors
from tba_megatron.models.registry import ARCHITECTURES, read_model

QWEN2 = json.loads((Path(__file__).parents[2] / "configs/tiny_qwen2/config.json").read_text())
LLAMA = {**QWEN2, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 48}
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "vocab_size": 19,
    "max_position_embeddings": 64,
    "rotary_pct": 0.25,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 128,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 19,
}
CONFIGS = {c["architectures"][0]: c for c in (QWEN2, QWEN3, LLAMA, NEOX, GPT2)}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write(folder: Path, hf_config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(hf_config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_model(folder)
    assert "\n" not in str(caught.value) and str(folder / "config.json") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shape_is_that_of_config_json(name, tmp_path):
    architecture, shape = read_model(write(tmp_path, CONFIGS[name]))
    assert architecture is ARCHITECTURES[name]
    assert (shape.num_layers, shape.hidden_size, shape.query_heads, shape.vocab_size) == (3, 128, 4, 19)
    assert shape.intermediate_size == (512 if name == "GPT2LMHeadModel" else 384)
    assert shape.kv_heads == (2 if shape.gated else 4)
    assert shape.head_size == (48 if name == "Qwen3ForCausalLM" else 32)
    assert shape.tied is (name != "GPTNeoXForCausalLM")
    assert shape.qk_norm is (name == "Qwen3ForCausalLM")
    assert shape.qkv_bias is (name in ("Qwen2ForCausalLM", "GPTNeoXForCausalLM", "GPT2LMHeadModel"))
    assert shape.parallel_residual is (name == "GPTNeoXForCausalLM")
    assert (shape.rotary and shape.rotary.size) == {"GPTNeoXForCausalLM": 8, "GPT2LMHeadModel": None}.get(
        name, shape.head_size
    )


def test_defaults_are_those_of_hugging_face(tmp_path):
    absent = ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "rms_norm_eps")
    _, shape = read_model(write(tmp_path, {k: v for k, v in LLAMA.items() if k not in absent}))
    assert shape.rotary is not None
    assert (shape.kv_heads, shape.head_size, shape.rotary.theta) == (4, 32, 10_000.0)
    assert not shape.tied and shape.norm_eps == 1e-6
    _, shape = read_model(write(tmp_path, {k: v for k, v in QWEN3.items() if k != "head_dim"}))
    assert shape.head_size == 128
    _, shape = read_model(write(tmp_path, {**GPT2, "n_inner": None}))
    assert (shape.intermediate_size, shape.activation, shape.norm_eps) == (512, "gelu_tanh", 1e-5)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4}}, "rotary scaling 'yarn' is not supported"),
        (
            QWEN2,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2}},
            "rotary scaling 'dynamic' is not supported",
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "rotary scaling 'longrope' is not supported"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "['full_attention'] in rope_parameters"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor None is not a number above 0"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_parameters.factor '8' is not a number above 0"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor has to be above"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_parameters 'linear' is not an object"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 16 of 32 columns is not supported"),
        (NEOX, {"rotary_pct": 0.1}, "3 rotated columns of a head of 32 are not an even part"),
        (NEOX, {"rope_parameters": {"partial_rotary_factor": 2.0}}, "64 rotated columns of a head of 32"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; known: silu"),
        (NEOX, {"hidden_act": "mish"}, "hidden_act 'mish' is not supported; known: gelu, gelu_new"),
        (GPT2, {"activation_function": ["gelu"]}, "activation_function ['gelu'] is not supported"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window is not supported"),
        (
            QWEN3,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types ['full_attention', 'sliding_attention'] is not supported",
        ),
        *[
            (base, {"is_causal": odd}, f"is_causal {odd!r} is not supported")
            for base in (QWEN2, QWEN3, LLAMA, NEOX, GPT2)
            for odd in (False, 0, None, "true")
        ],
        (QWEN3, {"attention_bias": True}, "attention_bias is not supported"),
        (LLAMA, {"attention_bias": True}, "attention_bias without mlp_bias"),
        (LLAMA, {"mlp_bias": True}, "attention_bias without mlp_bias"),
        (NEOX, {"attention_bias": False}, "attention_bias false is not supported"),
        (NEOX, {"head_dim": 16}, "head_dim 16 is not hidden_size / num_attention_heads, 32; remove head_dim"),
        (NEOX, {"head_dim": "32"}, "head_dim '32' is not a whole number"),
        (GPT2, {"hidden_size": 64}, "n_embd 128 and hidden_size 64 are one setting; remove one of them"),
        (GPT2, {"num_hidden_layers": 2}, "n_layer 3 and num_hidden_layers 2 are one setting"),
        (GPT2, {"num_attention_heads": "4"}, "n_head 4 and num_attention_heads '4' are one setting"),
        (GPT2, {"max_position_embeddings": 32}, "n_positions 64 and max_position_embeddings 32 are one setting"),
        (
            LLAMA,
            {"model_type": "mistral"},
            "model_type mistral contradicts the architecture LlamaForCausalLM",
        ),
        (QWEN2, {"model_type": "qwen3"}, "model_type qwen3 contradicts the architecture Qwen2ForCausalLM"),
        (QWEN3, {"model_type": "qwen3_moe"}, "model_type qwen3_moe contradicts the architecture Qwen3ForCausalLM"),
        (NEOX, {"model_type": "gpt2"}, "model_type gpt2 contradicts the architecture GPTNeoXForCausalLM"),
        (GPT2, {"model_type": ["gpt2"]}, "model_type ['gpt2'] contradicts the architecture GPT2LMHeadModel"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not supported"),
        (GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is not supported"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights false is not supported"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention is not supported"),
        (QWEN2, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        (QWEN2, {"hidden_size": 128.5}, "hidden_size 128.5 is not a whole number from 1 to 2147483647"),
        (QWEN2, {"vocab_size": 0}, "vocab_size 0 is not a whole number from 1 to 2147483647"),
        (GPT2, {"n_layer": "3"}, "n_layer '3' is not a whole number from 1 to 2147483647"),
        (QWEN2, {"hidden_size": 130, "head_dim": None}, "hidden_size 130 is not a multiple of num_attention_heads 4"),
        (GPT2, {"n_head": 3}, "n_embd 128 is not a multiple of n_head 3"),
        (LLAMA, {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (LLAMA, {"head_dim": 31}, "31 rotated columns of a head of 31 are not an even part"),
        (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps -1.0 is not a number above 0"),
        (LLAMA, {"rope_theta": True}, "rope_theta True is not a number above 0"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings 'no' is neither true nor false"),
        (QWEN2, {"architectures": ["Qwen2MoeForCausalLM"]}, "architecture Qwen2MoeForCausalLM is not supported; known"),
        (QWEN2, {"architectures": []}, "architecture (none) is not supported"),
        (QWEN2, {"architectures": [None]}, "architecture None is not supported"),
        (QWEN2, {"architectures": {"x": 1}}, "architecture {'x': 1} is not supported"),
        (QWEN2, {"architectures": ["Qwen\nFast\x1b"]}, "architecture Qwen\\nFast\\x1b is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(base, changes, words, tmp_path):
    assert words in refusal(write(tmp_path, {**base, **changes}))


@pytest.mark.parametrize(
    ("base", "names"),
    [
        (QWEN2, ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")),
        (LLAMA, ("num_attention_heads", "max_position_embeddings")),
        (NEOX, ("num_hidden_layers", "intermediate_size", "max_position_embeddings")),
        (GPT2, ("n_layer", "n_embd", "n_head", "n_positions")),
    ],
)
def test_a_missing_size_is_named(base, names, tmp_path):
    for name in names:
        assert f"lacks {name}" in refusal(write(tmp_path, {k: v for k, v in base.items() if k != name}))
        assert f"lacks {name}" in refusal(write(tmp_path, {**base, name: None}))


@pytest.mark.parametrize("base", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_qwens_key_heads_may_be_null_but_not_absent(base, tmp_path):
    _, shape = read_model(write(tmp_path, {**base, "num_key_value_heads": None}))
    assert shape.kv_heads == shape.query_heads == 4
    hf_config = {name: value for name, value in base.items() if name != "num_key_value_heads"}
    assert "lacks num_key_value_heads" in refusal(write(tmp_path, hf_config))


def test_gpt2_is_read_under_either_name_of_a_setting(tmp_path):
    from transformers import GPT2Config

    _, shape = read_model(write(tmp_path, GPT2))
    for name, other in {value: key for key, value in GPT2Config.attribute_map.items()}.items():
        renamed = {key: value for key, value in GPT2.items() if key != name}
        for hf_config in ({**renamed, other: GPT2[name]}, {**GPT2, other: GPT2[name]}, {**GPT2, other: None}):
            assert read_model(write(tmp_path, hf_config))[1] == shape


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_that_say_what_is_computed_anyway_are_accepted(name, tmp_path):
    architecture, shape = read_model(write(tmp_path, CONFIGS[name]))
    head = {"head_dim": shape.head_size}
    for changes in ({"is_causal": True}, {"model_type": None}, head if name != "GPT2LMHeadModel" else {}):
        assert read_model(write(tmp_path, {**CONFIGS[name], **changes})) == (architecture, shape)
    without = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    assert read_model(write(tmp_path, without)) == (architecture, shape)


def test_the_model_type_of_an_architecture_is_that_of_transformers():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    assert {a.name: names[a.model_type] for a in ARCHITECTURES.values()} == {name: name for name in ARCHITECTURES}


def test_a_long_name_of_an_architecture_does_not_flood_the_line(tmp_path):
    message = refusal(write(tmp_path, {**QWEN2, "architectures": ["A" * 100_000 + "End"]}))
    assert len(message) < len(str(tmp_path)) + 300 and "AAA...AAA" in message and "AEnd is not supported" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON (Expecting property name"),
        (b"[" * 100_000, "is nested too deeply to be read; copy or download it again"),
        (b'{"a":' * 100_000, "is nested too deeply to be read"),
        (b"", "is empty; copy or download it again"),
        (b" \n", "is empty; copy or download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer and not the file; run git lfs pull in"),
        (b"\xef\xbb\xbf{}", "has a byte order mark or is UTF-16; save it as UTF-8 without"),
        ("{}".encode("utf-16"), "has a byte order mark or is UTF-16"),
        ("{}".encode("utf-16-be"), "has a byte order mark or is UTF-16"),
        (b'{"a": "\xe9"}', "is not UTF-8 text; copy or download it again"),
        (b"[]", "is not a JSON object; copy or download it again"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON (Exceeds the limit"),
    ],
)  # fmt: skip
def test_a_config_that_is_no_json_object_is_refused_with_what_to_do(content, words, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    assert f"config.json {words}" in refusal(tmp_path)


def test_a_config_that_is_no_file_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "config.json"
    assert "config.json does not exist; model.path must be a Hugging Face folder" in refusal(tmp_path)
    path.mkdir()
    assert "config.json is a folder and not a file; remove or replace it" in refusal(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    assert "config.json is a pipe, socket or device and not a file" in refusal(tmp_path)
    path.unlink()
    path.symlink_to(path)
    assert "config.json cannot be read (Too many levels of symbolic links); check what it is" in refusal(tmp_path)


ODD = [None, True, False, 0, -1, 1, 3, 1.5, 1e400, float("nan"), 10**400, "x", "", [], ["x"], [[]], {}, {"x": {}}]


@pytest.mark.parametrize("name", CONFIGS)
def test_any_odd_value_is_used_or_refused_in_one_line(name):
    base = {**CONFIGS[name], "rope_scaling": None, "layer_types": None, "quantization_config": None, "head_dim": None}
    rope = {**LLAMA3, "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0, "rope_theta": 1e4}
    cases = [{**base, key: odd} for key in base for odd in ODD]
    cases += [{**base, "rope_parameters": {**rope, key: odd}} for key in rope for odd in ODD]
    refused = 0
    for hf_config in cases:
        try:
            ARCHITECTURES[name].read(hf_config)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 250
    assert len(cases) / 4 < refused < len(cases)


def test_dropouts_are_ignored(tmp_path):
    _, plain = read_model(write(tmp_path, GPT2))
    _, noisy = read_model(write(tmp_path, {**GPT2, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}))
    assert noisy == plain


def test_only_learned_positions_limit_the_length():
    neox, gpt2 = (ARCHITECTURES[c["architectures"][0]].read(c) for c in (NEOX, GPT2))
    check_length(neox, 10_000)
    check_length(gpt2, 64)
    with pytest.raises(ModelError) as caught:
        check_length(gpt2, 65)
    assert "model.max_length: 65 is more than the 64 learned positions of GPT2LMHeadModel" in str(caught.value)
    assert "\n" not in str(caught.value)


MODELS = [
    (kind, tied, {})
    for kind, tied in [(k, t) for k in ("qwen2", "qwen3", "llama", "gpt_neox", "gpt2") for t in (True, False)]
] + [
    ("llama", False, {"attention_bias": True, "mlp_bias": True}),
    ("gpt_neox", False, {"use_parallel_residual": False}),
]


@pytest.mark.parametrize(("kind", "tied", "changes"), MODELS)
def test_tensors_are_those_that_transformers_saves(kind, tied, changes, tmp_path):
    import tiny
    from safetensors import safe_open

    architecture, shape = read_model(tiny.save_model(tmp_path, kind, tied=tied, **changes))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert architecture.tensor_shapes(shape) == stored
    assert {architecture.canonical(name) for name in stored} == stored.keys()
    named = [name for rule in architecture.rules(shape, 2) for name in rule.hf]
    assert sorted(named) == sorted(stored)
    megatron = [rule.megatron for rule in architecture.rules(shape, 2)]
    assert len(megatron) == len(set(megatron))


def test_other_spellings_and_buffers_of_the_hub_are_known():
    gpt2, neox = ARCHITECTURES["GPT2LMHeadModel"], ARCHITECTURES["GPTNeoXForCausalLM"]
    assert gpt2.canonical("h.0.attn.c_attn.bias") == "transformer.h.0.attn.c_attn.bias"
    assert gpt2.canonical("wte.weight") == "transformer.wte.weight"
    assert gpt2.canonical("lm_head.weight") == "lm_head.weight"
    assert gpt2.canonical("h.0.attn.bias") is gpt2.canonical("transformer.h.11.attn.masked_bias") is None
    assert neox.canonical("lm_head.weight") == neox.canonical("embed_out.weight") == "embed_out.weight"
    for buffer in ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"):
        assert neox.canonical(f"gpt_neox.layers.0.{buffer}") is None
    assert neox.canonical("gpt_neox.layers.0.attention.dense.bias") == "gpt_neox.layers.0.attention.dense.bias"
    assert ARCHITECTURES["LlamaForCausalLM"].canonical("model.layers.0.self_attn.rotary_emb.inv_freq") is None


@pytest.mark.parametrize("name", CONFIGS)
def test_random_projections_into_the_residual_stream_are_smaller(name):
    architecture = ARCHITECTURES[name]
    shape = dataclasses.replace(architecture.read(CONFIGS[name]), num_layers=8)
    tensors = RandomTensors(architecture, shape, seed=0)
    small = [
        n for n in sorted(tensors.names) if tensors[n].dim() == 2 and tensors[n].std() < 0.7 * shape.initializer_range
    ]
    # Two a layer: the projection of attention and the last one of the MLP.
    into_residual = ("o_proj.", "down_proj.", "c_proj.", "attention.dense.", "dense_4h_to_h.")
    assert len(small) == 2 * 8 and all(any(part in n for part in into_residual) for n in small)
    for n in tensors.names:
        if tensors[n].dim() == 1:
            assert (tensors[n] == (0.0 if n.endswith("bias") else 1.0)).all()
