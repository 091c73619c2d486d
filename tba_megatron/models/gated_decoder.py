"""A decoder with RMS norms, rotary positions and a gated MLP: what Llama, Qwen2 and Qwen3 have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import ModelShape, make_rule, norm_rules
from tba_megatron.models.layouts import Gated, Qkv, Replicated, Rule, Split, Vocabulary
from tba_megatron.models.rotary import read_rotary
from tba_megatron.models.settings import Settings


class GatedDecoder:
    """Implements ``Architecture`` but for its ``name``, ``model_type`` and ``read``."""

    residual_projections: tuple[str, ...] = ("o_proj.weight", "down_proj.weight")

    def rules(self, shape: ModelShape, tensor_parallel: int) -> list[Rule]:
        return gated_decoder_rules(shape, tensor_parallel)

    def tensor_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return gated_decoder_tensor_shapes(shape)

    def canonical(self, name: str) -> str | None:
        return None if name.endswith("rotary_emb.inv_freq") else name


def gated_decoder_shape(
    settings: Settings,
    *,
    kv_heads: int,
    head_size: int,
    qkv_bias: bool = False,
    linear_bias: bool = False,
    qk_norm: bool = False,
) -> ModelShape:
    """The shape that a config.json of such a decoder gives; ModelError for what this code cannot compute."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    settings.require(*names, "max_position_embeddings")
    layers, hidden, ffn, heads, vocab = (settings.size(name) for name in names)
    settings.choice("hidden_act", "silu", {"silu": "silu"})
    settings.whole("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    max_positions = settings.size("max_position_embeddings")
    rotary = read_rotary(
        settings,
        head_size,
        max_positions,
        theta=settings.number("rope_theta", 10_000.0),
        fraction=settings.number("partial_rotary_factor", 1.0),
    )
    if rotary.size != head_size:
        # transformers' Llama and Qwen models rotate whole heads; they fail with anything else.
        raise settings.error(f"partial_rotary_factor: {rotary.size} of {head_size} columns is not supported")
    return ModelShape(
        architecture=settings.architecture,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        query_heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab,
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tied=settings.flag("tie_word_embeddings", False),
        rotary=rotary,
        qkv_bias=qkv_bias or linear_bias,
        linear_bias=linear_bias,
        qk_norm=qk_norm,
        initializer_range=settings.number("initializer_range", 0.02),
    )


def head_size_of(settings: Settings) -> int:
    """``head_dim``, or else the hidden size over the heads."""
    settings.require("hidden_size", "num_attention_heads")
    if settings.get("head_dim") is not None:
        return settings.size("head_dim")
    heads = settings.size("num_attention_heads")
    return settings.whole("hidden_size", settings.size("hidden_size"), "num_attention_heads", heads)


def qwen_kv_heads(settings: Settings) -> int:
    """``num_key_value_heads``, or with null as many as queries have (transformers 5, Qwen2Config and Qwen3Config).

    It may not be absent: transformers' default is 32 then, which fits no small model.
    """
    null = settings.is_null("num_key_value_heads")
    return settings.size("num_attention_heads" if null else "num_key_value_heads")


def gated_decoder_rules(shape: ModelShape, tensor_parallel: int) -> list[Rule]:
    """The rules of that decoder, in the order of Hugging Face's own checkpoints."""
    vocabulary = Vocabulary(shape.vocab_size, shape.padded_vocab(tensor_parallel))
    rules = [make_rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocabulary)]
    for layer in range(shape.num_layers):
        rules += _layer_rules(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    rules += norm_rules("decoder.final_layernorm", "model.norm", shape)
    if not shape.tied:
        rules.append(make_rule("output_layer.weight", "lm_head.weight", vocabulary))
    return rules


def _layer_rules(shape: ModelShape, ours: str, theirs: str) -> list[Rule]:
    qkv = Qkv(shape.query_heads, shape.kv_heads, shape.head_size)
    attention = ours + "self_attention."
    qkv_names = [theirs + f"self_attn.{x}_proj." for x in "qkv"]
    mlp_names = [theirs + f"mlp.{x}_proj." for x in ("gate", "up")]
    rules = norm_rules(ours + "input_layernorm", theirs + "input_layernorm", shape)
    rules.append(make_rule(attention + "linear_qkv.weight", [p + "weight" for p in qkv_names], qkv))
    if shape.qkv_bias:
        rules.append(make_rule(attention + "linear_qkv.bias", [p + "bias" for p in qkv_names], qkv))
    if shape.qk_norm:
        rules += norm_rules(attention + "q_layernorm", theirs + "self_attn.q_norm", shape)
        rules += norm_rules(attention + "k_layernorm", theirs + "self_attn.k_norm", shape)
    rules.append(make_rule(attention + "linear_proj.weight", theirs + "self_attn.o_proj.weight", Split(1)))
    if shape.linear_bias:
        rules.append(make_rule(attention + "linear_proj.bias", theirs + "self_attn.o_proj.bias", Replicated()))
    rules += norm_rules(ours + "pre_mlp_layernorm", theirs + "post_attention_layernorm", shape)
    rules.append(make_rule(ours + "mlp.linear_fc1.weight", [p + "weight" for p in mlp_names], Gated()))
    if shape.linear_bias:
        rules.append(make_rule(ours + "mlp.linear_fc1.bias", [p + "bias" for p in mlp_names], Gated()))
    rules.append(make_rule(ours + "mlp.linear_fc2.weight", theirs + "mlp.down_proj.weight", Split(1)))
    if shape.linear_bias:
        rules.append(make_rule(ours + "mlp.linear_fc2.bias", theirs + "mlp.down_proj.bias", Replicated()))
    return rules


def gated_decoder_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of that decoder and their shapes, in Hugging Face's layout."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    linears: Mapping[str, tuple[int, int, Any]] = {
        "self_attn.q_proj": (queries, hidden, shape.qkv_bias),
        "self_attn.k_proj": (keys, hidden, shape.qkv_bias),
        "self_attn.v_proj": (keys, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, queries, shape.linear_bias),
        "mlp.gate_proj": (ffn, hidden, shape.linear_bias),
        "mlp.up_proj": (ffn, hidden, shape.linear_bias),
        "mlp.down_proj": (hidden, ffn, shape.linear_bias),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if shape.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (shape.head_size,)
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes
