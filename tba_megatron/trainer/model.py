"""Build the policy and the reference: Megatron's GPTModel of this rank, wrapped for training or plain for scoring.

T packed tokens, V vocabulary, S sequences.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tba_megatron.config import OptimizerSection, TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.errors import ConfigError
from tba_megatron.models.architecture import ModelShape
from tba_megatron.models.layer_spec import runs_of_equal_length, transformer_block_spec
from tba_megatron.types import PackedMicrobatch

# Fields of TransformerConfig that would switch on what this trainer cannot do; refused whatever their value.
REFUSED = {
    "num_moe_experts": "mixture of experts",
    "moe_layer_freq": "mixture of experts",
    "context_parallel_size": "context parallelism",
    "fp8": "FP8",
    "fp4": "FP4",
    "virtual_pipeline_model_parallel_size": "interleaved pipeline stages",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Megatron logs a line for each configuration object and each parameter group; ours are in the run folder.
logging.getLogger("megatron").setLevel(logging.WARNING)


@dataclass
class RunLengths(PackedSeqParams):
    """Megatron's packed-sequence parameters with the runs of equal length that ``PackedAttention`` wants."""

    runs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A packed microbatch on the device, as the model wants it."""

    tokens: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    packed: RunLengths
    rows: Tensor  # [R] positions whose next token belongs to a completion
    labels: Tensor  # [R]
    sequence_index: Tensor  # [R]
    host: PackedMicrobatch


def to_device(microbatch: PackedMicrobatch, device: torch.device) -> Batch:
    """Move a microbatch to the device; only response positions (R of T) go on to the head."""
    rows = torch.from_numpy(microbatch.response.nonzero()[0])
    cu = torch.from_numpy(microbatch.cu_seqlens).to(device)
    lengths = (microbatch.cu_seqlens[1:] - microbatch.cu_seqlens[:-1]).tolist()
    longest = max(lengths)

    def put(array, index: Tensor | None = None) -> Tensor:
        tensor = torch.from_numpy(array).long()
        return (tensor if index is None else tensor[index]).to(device)

    packed = RunLengths(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        runs=runs_of_equal_length(lengths),
    )
    return Batch(
        tokens=put(microbatch.tokens)[None],
        positions=put(microbatch.positions)[None],
        packed=packed,
        rows=rows.to(device),
        labels=put(microbatch.labels, rows),
        sequence_index=put(microbatch.sequence_index, rows),
        host=microbatch,
    )


def transformer_config(shape: ModelShape, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's TransformerConfig; ConfigError for a ``megatron_extra`` key that it does not have."""
    dtype = DTYPES[trainer.dtype]
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.query_heads,
        "num_query_groups": shape.kv_heads,
        "ffn_hidden_size": shape.intermediate_size,
        "kv_channels": shape.head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": trainer.tensor_parallel,
        "pipeline_model_parallel_size": trainer.pipeline_parallel,
        "sequence_parallel": trainer.sequence_parallel,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # asked for by variable_seq_lengths, for dense models too (0.16.1)
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # What it draws is replaced by weights_io, but drawing also marks parameters as tensor-parallel (0.16.1).
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "deallocate_pipeline_outputs": True,
        "finalize_model_grads_func": finalize_model_grads,
    }
    _check_shape(shape, trainer)
    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    problems = [
        f"trainer.megatron_extra.{name}: "
        + (
            f"{REFUSED[name]} is not supported; remove it"
            if name in REFUSED
            else "is set by another part of the configuration"
            if name in fields
            else "unknown to TransformerConfig"
        )
        for name in trainer.megatron_extra
        if name in REFUSED or name in fields or name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return TransformerConfig(**fields, **trainer.megatron_extra)


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
        sizes["num_hidden_layers"] = (shape.num_layers, pp, "pipeline_parallel")
    problems = [
        f"trainer.{key}: {size} does not divide {name} = {value} of the model; choose a divisor of {value}"
        for name, (value, size, key) in sizes.items()
        if value % size
    ]
    if problems:
        raise ConfigError(problems)


def build_gpt(shape: ModelShape, trainer: TrainerConfig, groups: Groups) -> GPTModel:
    """This rank's part of the model. Its parameters hold nothing of use yet: ``weights_io`` fills them."""
    config = transformer_config(shape, trainer)
    return GPTModel(
        config=config,
        transformer_layer_spec=transformer_block_spec(config),  # type: ignore[arg-type]
        vocab_size=shape.padded_vocab(groups.tp_size),
        max_sequence_length=shape.max_positions,
        pre_process=groups.pp_rank == 0,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,  # type: ignore[arg-type]
    ).to(groups.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The trained model of this rank with its optimizer and schedule."""

    gpt: GPTModel  # the bare model: parameters under Megatron's names
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def config(self) -> TransformerConfig:
        return self.gpt.config


def build_policy(
    gpt: GPTModel, trainer: TrainerConfig, section: OptimizerSection, groups: Groups, steps: int
) -> Policy:
    """Wrap ``gpt`` in Megatron's DDP, with DistributedOptimizer and OptimizerParamScheduler."""
    module = Float16Module(gpt.config, gpt) if trainer.dtype == "bfloat16" else gpt
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    ddp = DistributedDataParallel(gpt.config, ddp_config, module)
    ddp.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.learning_rate,
            min_lr=_final_rate(section),  # each parameter group's goes before the schedule's (0.16.1)
            weight_decay=section.weight_decay,
            adam_beta1=section.adam_beta1,
            adam_beta2=section.adam_beta2,
            adam_eps=section.adam_eps,
            clip_grad=section.clip_grad_norm,
            use_distributed_optimizer=True,
            bf16=trainer.dtype == "bfloat16",
            params_dtype=DTYPES[trainer.dtype],
        ),
        [ddp],
    )
    gpt.config.grad_scale_func = optimizer.scale_loss
    return Policy(gpt=gpt, ddp=ddp, optimizer=optimizer, scheduler=_scheduler(optimizer, section, steps))


def _final_rate(section: OptimizerSection) -> float:
    schedule = section.schedule
    return section.learning_rate * (1.0 if schedule.kind == "constant" else schedule.final_fraction)


def _scheduler(optimizer: MegatronOptimizer, section: OptimizerSection, steps: int) -> OptimizerParamScheduler:
    # Beside the learning rate it is what applies wd_mult: without it norms and biases would decay too (0.16.1).
    schedule = section.schedule
    decays = schedule.kind != "constant"
    decay_steps = schedule.decay_steps if decays else max(steps, schedule.warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.learning_rate,
        min_lr=_final_rate(section),
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.kind,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def forward(gpt: torch.nn.Module, batch: Batch) -> Tensor:
    """Logits [1, T, V / tp] on the last stage, hidden states for the next stage elsewhere."""
    return gpt(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)


def named_parameters(gpt: GPTModel) -> Mapping[str, torch.nn.Parameter]:
    """This rank's parameters under Megatron's names, with layers counted over the whole model."""
    names: dict[str, torch.nn.Parameter] = {}
    layers: Any = gpt.decoder.layers
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    for name, parameter in gpt.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first_layer)
        names[".".join(parts)] = parameter
    return names
