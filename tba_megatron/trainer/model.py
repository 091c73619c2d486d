"""Build the policy and the reference: Megatron's GPTModel of this rank, wrapped for training or plain for scoring.

T packed tokens, V vocabulary, S sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tba_megatron.config_sections import OptimizerSection, TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.models.architecture import ModelShape
from tba_megatron.models.layer_spec import (
    ROW_FORMAT,
    PackedRow,
    runs_of_equal_length,
    transformer_block_spec,
    transformer_engine_found,
)
from tba_megatron.models.rotary import PackedRotary
from tba_megatron.models.te_names import to_plain
from tba_megatron.trainer.log_z import LogZ
from tba_megatron.trainer.megatron_config import DTYPES, transformer_config
from tba_megatron.types import PackedMicrobatch

# Megatron logs a line for each configuration object and each parameter group; ours are in the run folder.
logging.getLogger("megatron").setLevel(logging.WARNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A packed microbatch on the device, as the model wants it."""

    tokens: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    packed: PackedRow
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

    positions = put(microbatch.positions)
    packed = PackedRow(
        qkv_format=ROW_FORMAT,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions,
        runs=runs_of_equal_length(lengths),
    )
    return Batch(
        tokens=put(microbatch.tokens)[None],
        positions=positions[None],
        packed=packed,
        rows=rows.to(device),
        labels=put(microbatch.labels, rows),
        sequence_index=put(microbatch.sequence_index, rows),
        host=microbatch,
    )


def build_chunks(shape: ModelShape, trainer: TrainerConfig, groups: Groups) -> tuple[GPTModel, ...]:
    """This rank's part of the model: one GPTModel, or with ``virtual_pipeline`` as many, in order of depth.

    Their parameters hold nothing of use yet: ``load_hf`` fills them.
    """
    config = transformer_config(shape, trainer)
    n_chunks = trainer.virtual_pipeline
    engine = trainer.layers == "fastest" and transformer_engine_found()
    chunks = []
    for chunk in range(n_chunks):
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=transformer_block_spec(  # type: ignore[arg-type]
                config, chunk, parallel_residual=shape.parallel_residual, transformer_engine=engine
            ),
            vocab_size=shape.padded_vocab(groups.tp_size),
            max_sequence_length=shape.max_positions,
            pre_process=groups.pp_rank == 0 and chunk == 0,
            post_process=groups.is_last_stage and chunk == n_chunks - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope" if shape.rotary else "learned_absolute",
            vp_stage=chunk if n_chunks > 1 else None,
        ).to(groups.device, config.params_dtype)  # learned positions and apex's norms do not follow params_dtype
        if shape.rotary:
            gpt.rotary_pos_emb = PackedRotary(shape.rotary, groups.device)  # type: ignore[assignment]
        chunks.append(gpt)
    return tuple(chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The trained model of this rank with its optimizer and schedule."""

    chunks: tuple[GPTModel, ...]  # the bare model: parameters under Megatron's names
    ddp: tuple[DistributedDataParallel, ...]  # each chunk, wrapped
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    log_z: LogZ | None = None  # of an objective that learns it; no part of the model

    @property
    def config(self) -> TransformerConfig:
        return self.chunks[0].config


def build_policy(chunks: Sequence[GPTModel], trainer: TrainerConfig, section: OptimizerSection, steps: int) -> Policy:
    """Wrap ``chunks`` in Megatron's DDP, with DistributedOptimizer and OptimizerParamScheduler."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    config = chunks[0].config
    ddp = tuple(
        DistributedDataParallel(
            config,
            ddp_config,
            Float16Module(config, gpt) if trainer.dtype == "bfloat16" else gpt,
            # As Megatron's training does (0.16.1): only the first chunk's gradients are worth overlapping.
            disable_bucketing=i > 0,
        )
        for i, gpt in enumerate(chunks)
    )
    for wrapped in ddp:
        wrapped.broadcast_params()
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
        list(ddp),
    )
    config.grad_scale_func = optimizer.scale_loss
    return Policy(chunks=tuple(chunks), ddp=ddp, optimizer=optimizer, scheduler=_scheduler(optimizer, section, steps))


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
        lr_decay_style="WSD" if schedule.kind == "wsd" else schedule.kind,
        wsd_decay_steps=schedule.anneal_steps if schedule.kind == "wsd" else None,
        lr_wsd_decay_style=schedule.anneal if schedule.kind == "wsd" else None,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def forward(gpt: torch.nn.Module, batch: Batch) -> Tensor:
    """What the output layer gives (of its own, logits [1, T, V / tp]), hidden states for the next stage elsewhere."""
    return gpt(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)


def named_parameters(chunks: Sequence[GPTModel]) -> Mapping[str, torch.nn.Parameter]:
    """This rank's parameters under Megatron's plain names, with layers counted over the whole model.

    Plain: those that Transformer Engine's layers hold within a fused norm have the names they have without it.
    """
    names: dict[str, torch.nn.Parameter] = {}
    for gpt in chunks:
        layers: Any = gpt.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in gpt.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + first_layer)
            names[to_plain(".".join(parts))] = parameter
    return names
