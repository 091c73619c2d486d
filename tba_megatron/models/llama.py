"""Llama without rotary scaling (RhoMath, TinyLlama, SmolLM2): as Qwen2, without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba_megatron.errors import ModelError
from tba_megatron.models.architecture import (
    ModelShape,
    gated_decoder_rules,
    gated_decoder_shape,
    gated_decoder_tensor_shapes,
)
from tba_megatron.models.layouts import Rule


class Llama:
    name = "LlamaForCausalLM"

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        if hf_config.get("attention_bias"):
            raise ModelError(f"config.json of {self.name}: attention_bias is not supported")
        return gated_decoder_shape(hf_config, architecture=self.name, qkv_bias=False, default_theta=10_000.0)

    def rules(self, shape: ModelShape, tensor_parallel: int) -> list[Rule]:
        return gated_decoder_rules(shape, tensor_parallel)

    def tensor_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return gated_decoder_tensor_shapes(shape)
