"""GPT-NeoX (Pythia): layer norms, biases everywhere, part of each head rotated, attention and MLP side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import ACTIVATIONS, ModelShape, make_rule, norm_rules
from tba_megatron.models.layouts import Replicated, Rule, Split, Vocabulary
from tba_megatron.models.rotary import read_rotary
from tba_megatron.models.settings import Settings

# The name in files, which engines know too; transformers (5) calls it lm_head while it is loaded.
OUTPUT = "embed_out.weight"
_BUFFERS = re.compile(r"(\.attention\.(bias|masked_bias)|rotary_emb\.inv_freq)$")

# Linear layers: (Megatron's name, Hugging Face's, layout of the weight, layout of the bias). The rows of
# query_key_value are q, k, v of one head after the other, as Megatron has them.
_LINEARS = (
    ("self_attention.linear_qkv", "attention.query_key_value", Split(0), Split(0)),
    ("self_attention.linear_proj", "attention.dense", Split(1), Replicated()),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h", Split(0), Split(0)),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h", Split(1), Replicated()),
)


class GptNeox:
    name = "GPTNeoXForCausalLM"
    model_type = "gpt_neox"
    residual_projections: tuple[str, ...] = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        s = Settings(hf_config, self.name)
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        s.require(*names, "max_position_embeddings")
        layers, hidden, ffn, heads, vocab = (s.size(name) for name in names)
        if not s.flag("attention_bias", True):
            # Megatron (0.16.1) has no MLP with biases beside an attention without.
            raise s.error("attention_bias false is not supported")
        head_size = s.whole("hidden_size", hidden, "num_attention_heads", heads)
        if s.get("head_dim") is not None and s.size("head_dim") != head_size:
            # transformers (5) rotates by head_dim, but cuts the heads by hidden_size / num_attention_heads.
            raise s.error(
                f"head_dim {s.size('head_dim')} is not hidden_size / num_attention_heads, {head_size}; remove head_dim"
            )
        max_positions = s.size("max_position_embeddings")
        return ModelShape(
            architecture=self.name,
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=ffn,
            query_heads=heads,
            kv_heads=heads,
            head_size=head_size,
            vocab_size=vocab,
            norm_eps=s.number("layer_norm_eps", 1e-5),
            max_positions=max_positions,
            tied=s.flag("tie_word_embeddings", False),
            # GPTNeoXConfig (transformers 5) reads these two names and no others outside of rope_parameters.
            rotary=read_rotary(
                s,
                head_size,
                max_positions,
                theta=s.number("rotary_emb_base", 10_000.0),
                fraction=s.number("rotary_pct", 0.25),
            ),
            normalization="LayerNorm",
            activation=s.choice("hidden_act", "gelu", ACTIVATIONS),
            gated=False,
            qkv_bias=True,
            linear_bias=True,
            parallel_residual=s.flag("use_parallel_residual", True),
            initializer_range=s.number("initializer_range", 0.02),
        )

    def rules(self, shape: ModelShape, tensor_parallel: int) -> list[Rule]:
        vocabulary = Vocabulary(shape.vocab_size, shape.padded_vocab(tensor_parallel))
        rules = [make_rule("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight", vocabulary)]
        for layer in range(shape.num_layers):
            ours, theirs = f"decoder.layers.{layer}.", f"gpt_neox.layers.{layer}."
            rules += norm_rules(ours + "input_layernorm", theirs + "input_layernorm", shape)
            rules += norm_rules(ours + "pre_mlp_layernorm", theirs + "post_attention_layernorm", shape)
            for megatron, hf, weight, bias in _LINEARS:
                rules.append(make_rule(f"{ours}{megatron}.weight", f"{theirs}{hf}.weight", weight))
                rules.append(make_rule(f"{ours}{megatron}.bias", f"{theirs}{hf}.bias", bias))
        rules += norm_rules("decoder.final_layernorm", "gpt_neox.final_layer_norm", shape)
        if not shape.tied:
            rules.append(make_rule("output_layer.weight", OUTPUT, vocabulary))
        return rules

    def tensor_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        hidden, ffn = shape.hidden_size, shape.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (shape.vocab_size, hidden)}
        sizes = {
            "attention.query_key_value": (3 * hidden, hidden),
            "attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (ffn, hidden),
            "mlp.dense_4h_to_h": (hidden, ffn),
        }
        for layer in range(shape.num_layers):
            prefix = f"gpt_neox.layers.{layer}."
            for name, size in sizes.items():
                shapes[f"{prefix}{name}.weight"], shapes[f"{prefix}{name}.bias"] = size, size[:1]
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = shapes[f"{prefix}{norm}.bias"] = (hidden,)
        shapes["gpt_neox.final_layer_norm.weight"] = shapes["gpt_neox.final_layer_norm.bias"] = (hidden,)
        if not shape.tied:
            shapes[OUTPUT] = (shape.vocab_size, hidden)
        return shapes

    def canonical(self, name: str) -> str | None:
        if _BUFFERS.search(name):
            return None
        return OUTPUT if name == "lm_head.weight" else name
