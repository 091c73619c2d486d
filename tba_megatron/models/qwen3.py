"""Qwen3: as Qwen2, with norms of each head's queries and keys in place of biases, and heads of a size of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import ModelShape
from tba_megatron.models.gated_decoder import GatedDecoder, gated_decoder_shape, qwen_kv_heads
from tba_megatron.models.settings import Settings


class Qwen3(GatedDecoder):
    name = "Qwen3ForCausalLM"
    model_type = "qwen3"

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        settings = Settings(hf_config, self.name)
        if settings.flag("attention_bias", False):
            # Megatron (0.16.1) has a bias in the output projection of attention only with one in the MLP.
            raise settings.error("attention_bias is not supported")
        return gated_decoder_shape(
            settings,
            kv_heads=qwen_kv_heads(settings),
            head_size=settings.size("head_dim", 128),
            qk_norm=True,
        )
