"""GPT-2: learned positions, layer norms, biases everywhere; the weights of its linear layers are stored transposed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import ACTIVATIONS, ModelShape, make_rule, norm_rules
from tba_megatron.models.layouts import Replicated, Rule, Split, StackedQkv, Vocabulary
from tba_megatron.models.settings import Settings

_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")
_PREFIX = "transformer."

# Attention scores that are scaled or computed differently in each layer; no code here does.
_REFUSED = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")

# GPT2Config.attribute_map (transformers 5): each setting may come under either name.
_OTHER_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


class Gpt2:
    name = "GPT2LMHeadModel"
    model_type = "gpt2"
    residual_projections: tuple[str, ...] = ("c_proj.weight",)

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        s = Settings(hf_config, self.name)
        s.join_names(_OTHER_NAMES)
        names = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
        s.require(*names)
        layers, hidden, heads, positions, vocab = (s.size(name) for name in names)
        for name in _REFUSED:
            if s.flag(name, False):
                raise s.error(f"{name} is not supported")
        if not s.flag("scale_attn_weights", True):
            raise s.error("scale_attn_weights false is not supported")
        return ModelShape(
            architecture=self.name,
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=s.size("n_inner", 4 * hidden),
            query_heads=heads,
            kv_heads=heads,
            head_size=s.whole("n_embd", hidden, "n_head", heads),
            vocab_size=vocab,
            norm_eps=s.number("layer_norm_epsilon", 1e-5),
            max_positions=positions,
            tied=s.flag("tie_word_embeddings", True),
            rotary=None,
            normalization="LayerNorm",
            activation=s.choice("activation_function", "gelu_new", ACTIVATIONS),
            gated=False,
            qkv_bias=True,
            linear_bias=True,
            initializer_range=s.number("initializer_range", 0.02),
        )

    def rules(self, shape: ModelShape, tensor_parallel: int) -> list[Rule]:
        vocabulary = Vocabulary(shape.vocab_size, shape.padded_vocab(tensor_parallel))
        rules = [
            make_rule("embedding.word_embeddings.weight", "transformer.wte.weight", vocabulary),
            make_rule("embedding.position_embeddings.weight", "transformer.wpe.weight", Replicated()),
        ]
        linears = (
            ("self_attention.linear_qkv", "attn.c_attn", _stacked(shape, True), _stacked(shape, False)),
            ("self_attention.linear_proj", "attn.c_proj", Split(1, transposed=True), Replicated()),
            ("mlp.linear_fc1", "mlp.c_fc", Split(0, transposed=True), Split(0)),
            ("mlp.linear_fc2", "mlp.c_proj", Split(1, transposed=True), Replicated()),
        )
        for layer in range(shape.num_layers):
            ours, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
            rules += norm_rules(ours + "input_layernorm", theirs + "ln_1", shape)
            rules += norm_rules(ours + "pre_mlp_layernorm", theirs + "ln_2", shape)
            for megatron, hf, weight, bias in linears:
                rules.append(make_rule(f"{ours}{megatron}.weight", f"{theirs}{hf}.weight", weight))
                rules.append(make_rule(f"{ours}{megatron}.bias", f"{theirs}{hf}.bias", bias))
        rules += norm_rules("decoder.final_layernorm", "transformer.ln_f", shape)
        if not shape.tied:
            rules.append(make_rule("output_layer.weight", "lm_head.weight", vocabulary))
        return rules

    def tensor_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        hidden, ffn = shape.hidden_size, shape.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (shape.vocab_size, hidden),
            "transformer.wpe.weight": (shape.max_positions, hidden),
        }
        sizes = {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, ffn),
            "mlp.c_proj": (ffn, hidden),
        }
        for layer in range(shape.num_layers):
            prefix = f"transformer.h.{layer}."
            for name, size in sizes.items():
                shapes[f"{prefix}{name}.weight"], shapes[f"{prefix}{name}.bias"] = size, size[1:]
            for norm in ("ln_1", "ln_2"):
                shapes[f"{prefix}{norm}.weight"] = shapes[f"{prefix}{norm}.bias"] = (hidden,)
        shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (hidden,)
        if not shape.tied:
            shapes["lm_head.weight"] = (shape.vocab_size, hidden)
        return shapes

    def canonical(self, name: str) -> str | None:
        if _BUFFERS.search(name):
            return None
        return name if name.startswith((_PREFIX, "lm_head.")) else _PREFIX + name


def _stacked(shape: ModelShape, transposed: bool) -> StackedQkv:
    return StackedQkv(shape.query_heads, shape.head_size, transposed)
