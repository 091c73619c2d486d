"""Megatron's layers as a spec: in plain torch for CPU and for GPUs without Transformer Engine, or that of the engine.

Both take packed sequences as one row, with the positions of its tokens beside it. T packed tokens, N query heads,
G key-value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_layer_norm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

# Whatever is not "thd": for "thd" Megatron's attention (0.16.1) would cut the angles of rotary positions for each
# sequence in a Python loop. One row of T tokens, as Megatron sees it: [T, 1, ...].
ROW_FORMAT = "sbhd"


def transformer_engine_found() -> bool:
    """Whether layers can be Transformer Engine's: installed, and a GPU there."""
    return find_spec("transformer_engine") is not None and torch.cuda.is_available()


def apex_accumulates_gradients() -> bool:
    """Whether apex's extension is there that adds a weight's gradient straight to the float32 sum."""
    return find_spec("fused_weight_gradient_mlp_cuda") is not None and torch.cuda.is_available()


@dataclasses.dataclass
class PackedRow(PackedSeqParams):
    """Megatron's packed-sequence parameters of one row of T tokens, with what our attention and positions want."""

    positions: Tensor | None = None  # [T] within each sequence
    runs: tuple[tuple[int, int], ...] = ()  # (length, how many) of neighbouring sequences of equal length


class TorchNorm:
    """torch.nn.RMSNorm or LayerNorm with the mark that sequence parallelism needs; apex's LayerNorm where it is found.

    Megatron's WrappedTorchNorm (0.16.1) refuses sequence parallelism; what it takes is that the gradients of weight
    and bias are summed over the tensor-parallel ranks, which ``finalize_model_grads`` does for marked parameters.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused) -> torch.nn.Module:
        fused = fused_layer_norm.HAVE_FUSED_LAYER_NORM and torch.cuda.is_available()
        if config.normalization == "RMSNorm":
            norm: torch.nn.Module = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        elif fused:
            norm = fused_layer_norm.FusedLayerNorm(config, hidden_size, eps)
        else:
            norm = torch.nn.LayerNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences by torch's scaled_dot_product_attention.

    Takes the place of Megatron's DotProductAttention (0.16.1), which has no packing. Runs of sequences of equal
    length, which ``packing`` lays side by side, are attended in one call.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [T, 1, N, D]
        key: Tensor,  # [T, 1, G, D]
        value: Tensor,  # [T, 1, G, D]
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> Tensor:
        """[T, 1, N * D]. The mask is always causal within a sequence; ``attention_mask`` has to be None."""
        if packed_seq_params is None or attention_mask is not None:
            raise RuntimeError("PackedAttention takes packed sequences and no mask")
        query, key, value = (part.squeeze(1) for part in (query, key, value))
        outputs, start = [], 0
        for length, n in packed_seq_params.runs:
            rows = slice(start, start + length * n)
            shape = (n, length)
            outputs.append(
                F.scaled_dot_product_attention(
                    query[rows].unflatten(0, shape).transpose(1, 2),
                    key[rows].unflatten(0, shape).transpose(1, 2),
                    value[rows].unflatten(0, shape).transpose(1, 2),
                    is_causal=True,
                    scale=self.scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
                .transpose(1, 2)
                .flatten(2)
                .flatten(0, 1)
            )
            start += length * n
        return torch.cat(outputs)[:, None]


class EnginePacking:
    """Before Transformer Engine's attention as its base class: one row of packed tokens in, "thd" for the engine."""

    def forward(
        self,
        query: Tensor,  # [T, 1, N, D]
        key: Tensor,  # [T, 1, G, D]
        value: Tensor,  # [T, 1, G, D]
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, 1, N * D]."""
        if packed_seq_params is None:
            raise RuntimeError("attention takes packed sequences")
        engine: Any = super()
        output = engine.forward(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            attention_mask,
            attn_mask_type=attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=dataclasses.replace(packed_seq_params, qkv_format="thd"),
        )
        return output.reshape(query.shape[0], 1, -1)


class ParallelResidualLayer(TransformerLayer):
    """A layer whose attention and MLP both read its input: x + attention(norm(x)) + mlp(norm'(x)) (GPT-NeoX).

    Megatron (0.16.1) has none. With Transformer Engine the second norm is part of the MLP, which changes nothing here.
    """

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        kwargs.pop("dynamic_inference_decode_only", None)
        residual, context = self._forward_attention(hidden_states, *args, **kwargs)
        normed = self._forward_pre_mlp_layernorm(hidden_states)
        return self._forward_post_mlp(self.mlp(normed), residual), context


def runs_of_equal_length(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    """(length, how many) of neighbouring sequences of equal length; empty sequences have no rows."""
    return tuple((length, len(list(same))) for length, same in groupby(lengths) if length)


def transformer_block_spec(
    config: TransformerConfig, chunk: int, *, parallel_residual: bool, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """The layers of this stage's virtual pipeline chunk ``chunk``, as a spec for Megatron's GPTModel."""
    layer, norm = _engine_layer(config) if transformer_engine else _torch_layer(config)
    if parallel_residual:
        layer.module = ParallelResidualLayer
    n_layers = get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * n_layers, layer_norm=norm)


def _torch_layer(config: TransformerConfig) -> tuple[ModuleSpec, Any]:
    layer: ModuleSpec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return layer, TorchNorm


def _engine_layer(config: TransformerConfig) -> tuple[ModuleSpec, Any]:
    # Names of the engine's classes exist only where it is installed.
    from megatron.core.extensions.transformer_engine import TENorm

    layer: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    parts: Any = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = type("PackedEngineAttention", (EnginePacking, attention.core_attention), {})
    return layer, TENorm
