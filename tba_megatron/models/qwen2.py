"""Qwen2 and Qwen2.5: RMS norms, rotary positions, gated MLP, biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba_megatron.models.architecture import (
    ModelShape,
    gated_decoder_rules,
    gated_decoder_shape,
    gated_decoder_tensor_shapes,
)
from tba_megatron.models.layouts import Rule


class Qwen2:
    name = "Qwen2ForCausalLM"

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape:
        return gated_decoder_shape(hf_config, architecture=self.name, qkv_bias=True, default_theta=10_000.0)

    def rules(self, shape: ModelShape, tensor_parallel: int) -> list[Rule]:
        return gated_decoder_rules(shape, tensor_parallel)

    def tensor_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        return gated_decoder_tensor_shapes(shape)
