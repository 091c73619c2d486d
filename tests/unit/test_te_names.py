"""Transformer Engine's names of norms and the plain ones are one another's inverse, for every parameter there is."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks
from test_architecture import CONFIGS

from tba_megatron.models.registry import ARCHITECTURES
from tba_megatron.models.te_names import to_fused, to_plain

PAIRS = [
    ("decoder.layers.7.input_layernorm.weight", "decoder.layers.7.self_attention.linear_qkv.layer_norm_weight"),
    ("decoder.layers.7.input_layernorm.bias", "decoder.layers.7.self_attention.linear_qkv.layer_norm_bias"),
    ("decoder.layers.12.pre_mlp_layernorm.weight", "decoder.layers.12.mlp.linear_fc1.layer_norm_weight"),
    ("decoder.layers.12.pre_mlp_layernorm.bias", "decoder.layers.12.mlp.linear_fc1.layer_norm_bias"),
]
SAME = [
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_qkv.bias",
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight",
    "decoder.layers.0.self_attention.linear_proj.bias",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.bias",
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "output_layer.weight",
    "decoder.layers.0.mlp.linear_fc1._extra_state",
]


@pytest.mark.parametrize(("plain", "fused"), PAIRS)
def test_norms_before_a_linear_layer_are_renamed_both_ways(plain, fused):
    assert to_fused(plain) == fused and to_plain(fused) == plain
    assert to_plain(plain) == plain and to_fused(fused) == fused


@pytest.mark.parametrize("name", SAME)
def test_other_names_are_the_same(name):
    assert to_fused(name) == to_plain(name) == name


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_rule_finds_its_parameter_again(name):
    architecture = ARCHITECTURES[name]
    plain = [rule.megatron for rule in architecture.rules(architecture.read(CONFIGS[name]), 2)]
    fused = [to_fused(parameter) for parameter in plain]
    assert len(set(fused)) == len(plain)
    assert [to_plain(parameter) for parameter in fused] == plain
    assert sum(a != b for a, b in zip(plain, fused, strict=True)) >= 2


def names_in_megatrons_checkpoints(groups) -> dict[str, str]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer: Any = get_gpt_layer_local_spec()
    return layer.submodules.sharded_state_dict_keys_map


def test_the_pairs_are_those_of_megatron():
    (keys,) = run_ranks(names_in_megatrons_checkpoints)
    assert {plain: to_fused(f"x.{plain}weight") for plain in keys} == {
        plain: f"x.{fused}weight" for plain, fused in keys.items()
    }
