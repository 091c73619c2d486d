"""Megatron's TransformerConfig of a model and a layout; what cannot work is refused here, each in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tba_megatron.config_sections import TrainerConfig
from tba_megatron.errors import ConfigError
from tba_megatron.models.architecture import Activation, ModelShape
from tba_megatron.models.layer_spec import apex_accumulates_gradients

# What ``trainer.megatron_extra`` may set: layout and memory, never what is computed, which is config.json's alone.
_COUNT = (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, "a whole number of at least 1")
_FLAG = (lambda v: isinstance(v, bool), "true or false")
_NAMES = (lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v), "a list of names")
_LAYOUT = (lambda v: isinstance(v, str | list), "a text or a list, as Megatron's documentation has it")
EXTRA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_layers_in_first_pipeline_stage": _COUNT,
    "num_layers_in_last_pipeline_stage": _COUNT,
    "pipeline_model_parallel_layout": _LAYOUT,
    "account_for_embedding_in_pipeline_split": _FLAG,
    "account_for_loss_in_pipeline_split": _FLAG,
    "recompute_modules": _NAMES,  # with trainer.recompute selective
    "recompute_num_layers": _COUNT,  # with trainer.recompute full
    "distribute_saved_activations": _FLAG,
}
# Better words for what is asked for most.
REFUSED = {
    "num_moe_experts": "mixture of experts",
    "moe_layer_freq": "mixture of experts",
    "context_parallel_size": "context parallelism",
    "fp8": "FP8",
    "fp4": "FP4",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

_NEEDS = {"recompute_modules": "selective", "recompute_num_layers": "full", "distribute_saved_activations": "full"}


def transformer_config(shape: ModelShape, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's TransformerConfig; ConfigError for what ``megatron_extra`` may not set, and sizes that do not fit."""
    dtype = DTYPES[trainer.dtype]
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.query_heads,
        "num_query_groups": shape.kv_heads,
        "ffn_hidden_size": shape.intermediate_size,
        "kv_channels": shape.head_size,
        "normalization": shape.normalization,
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": shape.qk_norm,
        "gated_linear_unit": shape.gated,
        "activation_func": _ACTIVATIONS[shape.activation],
        "add_bias_linear": shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": trainer.tensor_parallel,
        "pipeline_model_parallel_size": trainer.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": trainer.virtual_pipeline if trainer.virtual_pipeline > 1 else None,
        # Interleaved stages exchange messages of different lengths both ways at once: sent in batches between two
        # stages they cross, and equal lengths would go wrong silently (0.16.1). Posted one by one they do not.
        "overlap_p2p_comm": trainer.virtual_pipeline > 1,
        "batch_p2p_comm": trainer.virtual_pipeline == 1,
        "sequence_parallel": trainer.sequence_parallel,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # asked for by variable_seq_lengths, for dense models too (0.16.1)
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # What it draws is replaced by load_hf, but drawing also marks parameters as tensor-parallel (0.16.1).
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": apex_accumulates_gradients(),
        "persist_layer_norm": False,
        # An overlapped send may still read its tensor when the schedule drops it: only the send before is waited for
        # (0.16.1), and the other side would get whatever is written there next.
        "deallocate_pipeline_outputs": trainer.virtual_pipeline == 1,
        "finalize_model_grads_func": finalize_model_grads,
    }
    _check_shape(shape, trainer)
    _check_extra(shape, trainer)
    fields |= {**_RECOMPUTE[trainer.recompute], **trainer.megatron_extra}
    try:
        config = TransformerConfig(**fields)
        _check_stages(config, shape, trainer)
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        extra = ", ".join(f"{name}: {value}" for name, value in trainer.megatron_extra.items()) or "nothing"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError([f"trainer.megatron_extra: Megatron refuses {{{extra}}}: {reason}"]) from None
    return config


def _check_extra(shape: ModelShape, trainer: TrainerConfig) -> None:
    problems = []
    for name, value in trainer.megatron_extra.items():
        key = f"trainer.megatron_extra.{name}"
        if name in REFUSED:
            problems.append(f"{key}: {REFUSED[name]} is not supported; remove it")
        elif name not in EXTRA:
            problems.append(f"{key}: may not be set; allowed are {', '.join(EXTRA)}, which leave the model as it is")
        elif not EXTRA[name][0](value):
            problems.append(f"{key}: {value!r} is not {EXTRA[name][1]}")
        elif name in _NEEDS and trainer.recompute != _NEEDS[name]:
            problems.append(f"{key}: has no effect with trainer.recompute {trainer.recompute}; set {_NEEDS[name]}")
    if shape.linear_bias and "mlp" in trainer.megatron_extra.get("recompute_modules", ()):
        # The bias that the MLP hands on becomes an output of the checkpoint, whose backward calls itself (0.16.1).
        problems.append(
            f"trainer.megatron_extra.recompute_modules: mlp is not supported with the biases of {shape.architecture}; "
            "remove it"
        )
    if problems:
        raise ConfigError(problems)


def _check_stages(config: TransformerConfig, shape: ModelShape, trainer: TrainerConfig) -> None:
    """ValueError unless the stages hold all layers between them, and none is without."""
    chunks = range(trainer.virtual_pipeline)
    stages = [
        sum(get_num_layers_to_build(config, chunk if len(chunks) > 1 else None, rank) for chunk in chunks)
        for rank in range(trainer.pipeline_parallel)
    ]
    if sum(stages) != shape.num_layers or min(stages) < 1:
        raise ValueError(f"the stages would hold {stages} of {shape.num_layers} layers")


def _check_shape(shape: ModelShape, trainer: TrainerConfig) -> None:
    tp, pp = trainer.tensor_parallel, trainer.pipeline_parallel
    sizes = {
        "num_attention_heads": (shape.query_heads, tp, "tensor_parallel"),
        "num_key_value_heads": (shape.kv_heads, tp, "tensor_parallel"),
        "intermediate_size": (shape.intermediate_size, tp, "tensor_parallel"),
    }
    uneven = {
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    }
    if not uneven & trainer.megatron_extra.keys():
        stages, key = pp * trainer.virtual_pipeline, "pipeline_parallel"
        if trainer.virtual_pipeline > 1:
            key += " x virtual_pipeline"
        sizes["num_hidden_layers"] = (shape.num_layers, stages, key)
    problems = [
        f"trainer.{key}: {size} does not divide {name} = {value} of the model; choose a divisor of {value}"
        for name, (value, size, key) in sizes.items()
        if value % size
    ]
    if problems:
        raise ConfigError(problems)
