"""Llama (RhoMath, TinyLlama, SmolLM2, Llama 3): RMS norms, rotary positions, gated MLP, all biases or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import ModelShape
from tba_megatron.models.gated_decoder import GatedDecoder, gated_decoder_shape, head_size_of
from tba_megatron.models.settings import Settings


class Llama(GatedDecoder):
    name = "LlamaForCausalLM"
    model_type = "llama"

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        settings = Settings(hf_config, self.name)
        biases = {settings.flag(name, False) for name in ("attention_bias", "mlp_bias")}
        if len(biases) > 1:
            # Megatron (0.16.1) has one switch for the output projection of attention and the MLP.
            raise settings.error("attention_bias without mlp_bias, or the other way round, is not supported")
        return gated_decoder_shape(
            settings,
            kv_heads=settings.size("num_key_value_heads", settings.size("num_attention_heads")),
            head_size=head_size_of(settings),
            linear_bias=biases.pop(),
        )
