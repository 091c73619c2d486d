"""Qwen2 and Qwen2.5: RMS norms, rotary positions, gated MLP, biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import ModelShape
from tba_megatron.models.gated_decoder import GatedDecoder, gated_decoder_shape, head_size_of
from tba_megatron.models.settings import Settings


class Qwen2(GatedDecoder):
    name = "Qwen2ForCausalLM"

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        settings = Settings(hf_config, self.name)
        return gated_decoder_shape(
            settings,
            # No default: transformers' is 32 heads for an absent key, which fits no small model.
            kv_heads=settings.size("num_key_value_heads"),
            head_size=head_size_of(settings),
            qkv_bias=True,
        )
