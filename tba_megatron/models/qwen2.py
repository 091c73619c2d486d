"""Qwen2 and Qwen2.5: RMS norms, rotary positions, gated MLP, biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import ModelShape
from tba_megatron.models.gated_decoder import GatedDecoder, gated_decoder_shape, head_size_of, qwen_kv_heads
from tba_megatron.models.settings import Settings


class Qwen2(GatedDecoder):
    name = "Qwen2ForCausalLM"
    model_type = "qwen2"

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        settings = Settings(hf_config, self.name)
        return gated_decoder_shape(
            settings,
            kv_heads=qwen_kv_heads(settings),
            head_size=head_size_of(settings),
            qkv_bias=True,
        )
