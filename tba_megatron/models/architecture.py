"""What an architecture is: its shape, its Megatron configuration, and the rules that convert its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tba_megatron.errors import ModelError
from tba_megatron.models.layouts import Gated, Qkv, Replicated, Rule, Split, Vocabulary

# Rows of the vocabulary are padded to a multiple of this on each tensor-parallel rank: GEMMs like it, and the split
# comes out even for every vocabulary.
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder, named as in Hugging Face's config.json."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    initializer_range: float = 0.02  # standard deviation of random initial weights

    def padded_vocab(self, tensor_parallel: int) -> int:
        """The vocabulary with its padding: a multiple of 64 rows for each tensor-parallel rank."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


class Architecture(Protocol):
    """One file each. ``read`` raises ModelError for what it does not support; it never ignores a setting."""

    name: str

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape: ...

    def rules(self, shape: ModelShape, tensor_parallel: int) -> list[Rule]: ...

    def tensor_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that the rules name, in Hugging Face's layout."""
        ...


def read_shape(folder: Path, table: Mapping[str, Architecture]) -> tuple[Architecture, ModelShape]:
    """The architecture and shape that ``folder``/config.json names; ModelError when it cannot be used."""
    path = folder / "config.json"
    try:
        hf_config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; model.path must be a Hugging Face folder") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    names = hf_config.get("architectures") or ["(none)"]
    if names[0] not in table:
        raise ModelError(f"{path}: architecture {names[0]} is not supported; known are {', '.join(sorted(table))}")
    architecture = table[names[0]]
    return architecture, architecture.read(hf_config)


def gated_decoder_shape(
    hf_config: Mapping[str, Any], *, architecture: str, qkv_bias: bool, default_theta: float
) -> ModelShape:
    """The shape of a decoder with RMS norms, rotary positions and a gated MLP (Llama, Qwen2)."""
    c = hf_config
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in required if name not in c]
    if missing:
        raise ModelError(f"config.json of {architecture} lacks {', '.join(missing)}")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    refuse = {
        f"rotary scaling {kind!r}": kind != "default",
        f"hidden_act {c.get('hidden_act')!r}": c.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(c.get("use_sliding_window")),
        "mlp_bias": bool(c.get("mlp_bias")),
        "quantization_config": bool(c.get("quantization_config")),
    }
    for what, present in refuse.items():
        if present:
            raise ModelError(f"config.json of {architecture}: {what} is not supported")
    heads = c["num_attention_heads"]
    return ModelShape(
        architecture=architecture,
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        query_heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_size=c.get("head_dim") or c["hidden_size"] // heads,
        vocab_size=c["vocab_size"],
        norm_eps=c.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", c.get("rope_theta", default_theta))),
        max_positions=c.get("max_position_embeddings", 2048),
        tied=bool(c.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        initializer_range=float(c.get("initializer_range", 0.02)),
    )


def gated_decoder_rules(shape: ModelShape, tensor_parallel: int) -> list[Rule]:
    """The rules of that decoder, in the order of Hugging Face's own checkpoints."""
    qkv = Qkv(shape.query_heads, shape.kv_heads, shape.head_size)
    vocabulary = Vocabulary(shape.vocab_size, shape.padded_vocab(tensor_parallel))
    rules = [_rule("embedding.word_embeddings.weight", ["model.embed_tokens.weight"], vocabulary)]
    for layer in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention = ours + "self_attention."
        projections = [theirs + f"self_attn.{x}_proj." for x in "qkv"]
        rules += [
            _rule(ours + "input_layernorm.weight", [theirs + "input_layernorm.weight"], Replicated()),
            _rule(attention + "linear_qkv.weight", [p + "weight" for p in projections], qkv),
        ]
        if shape.qkv_bias:
            rules.append(_rule(attention + "linear_qkv.bias", [p + "bias" for p in projections], qkv))
        rules += [
            _rule(attention + "linear_proj.weight", [theirs + "self_attn.o_proj.weight"], Split(1)),
            _rule(ours + "pre_mlp_layernorm.weight", [theirs + "post_attention_layernorm.weight"], Replicated()),
            _rule(
                ours + "mlp.linear_fc1.weight",
                [theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"],
                Gated(),
            ),
            _rule(ours + "mlp.linear_fc2.weight", [theirs + "mlp.down_proj.weight"], Split(1)),
        ]
    rules.append(_rule("decoder.final_layernorm.weight", ["model.norm.weight"], Replicated()))
    if not shape.tied:
        rules.append(_rule("output_layer.weight", ["lm_head.weight"], vocabulary))
    return rules


def gated_decoder_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of that decoder and their shapes, in Hugging Face's layout."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for projection, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}self_attn.{projection}_proj.weight"] = (rows, hidden)
            if shape.qkv_bias:
                shapes[f"{prefix}self_attn.{projection}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, ffn)
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes


def _rule(megatron: str, hf: list[str], layout: Any) -> Rule:
    return Rule(megatron=megatron, hf=tuple(hf), layout=layout)
