"""Megatron layer spec in plain torch: norms that know sequence parallelism, attention that knows packing.

For CPU, and for GPUs without Transformer Engine. T packed tokens, N heads, D head size.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class TorchNorm:
    """torch.nn.RMSNorm with the mark that sequence parallelism needs.

    Megatron's WrappedTorchNorm (0.16.1) refuses sequence parallelism; what it takes is that the gradient of the
    weight is summed over the tensor-parallel ranks, which ``finalize_model_grads`` does for marked parameters.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
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
        query: Tensor,  # [T, N, D]
        key: Tensor,  # [T, G, D]
        value: Tensor,  # [T, G, D]
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> Tensor:
        """[T, N * D]. The mask is always causal within a sequence; ``attention_mask`` has to be None."""
        if packed_seq_params is None or attention_mask is not None:
            raise RuntimeError("PackedAttention takes packed sequences and no mask")
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
        return torch.cat(outputs)


def runs_of_equal_length(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    """(length, how many) of neighbouring sequences of equal length; empty sequences have no rows."""
    return tuple((length, len(list(same))) for length, same in groupby(lengths) if length)


def transformer_block_spec(config: TransformerConfig, chunk: int) -> TransformerBlockSubmodules:
    """The layers of this stage's virtual pipeline chunk ``chunk``, as a spec for Megatron's GPTModel."""
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization=config.normalization)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm  # type: ignore[union-attr]
    parts.self_attention.submodules.core_attention = PackedAttention  # type: ignore[union-attr]
    n_layers = get_num_layers_to_build(config, chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * n_layers, layer_norm=TorchNorm)  # type: ignore[arg-type]
