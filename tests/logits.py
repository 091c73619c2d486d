"""What the trainer's model says about whole sequences, packed and in any layout, to hold it against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tba_megatron.config_sections import TrainerConfig
from tba_megatron.models.registry import read_model
from tba_megatron.packing import pack_demonstrations
from tba_megatron.tasks.base import Demonstration


def packed_logits(
    groups, folder: Path, trainer: TrainerConfig, sequences: Sequence[Demonstration], microbatch_tokens: int = 64
) -> dict[int, torch.Tensor]:
    """By number of the sequence, the logits [its tokens, vocabulary]; empty on all stages but the last.

    Interleaved stages need an even number of microbatches.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tba_megatron.trainer.load_hf import load_hf
    from tba_megatron.trainer.model import build_chunks, forward, to_device

    architecture, shape = read_model(folder)
    chunks = build_chunks(shape, trainer, groups)
    load_hf(chunks, architecture, shape, folder, groups)
    packs = pack_demonstrations(sequences, microbatch_tokens, groups.tp_size if trainer.sequence_parallel else 1)
    batches = [to_device(pack.microbatch, groups.device) for pack in packs]
    found = {}

    def keep(logits, batch, pack):
        parts = [torch.empty_like(logits) for _ in range(groups.tp_size)]
        dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        whole = torch.cat(parts, dim=-1)[0, :, : shape.vocab_size]
        cu = batch.host.cu_seqlens
        for s, rollout_id in enumerate(pack.rollout_ids):
            found[rollout_id.sequence] = whole[cu[s] : cu[s + 1]].clone()
        return logits.new_zeros(()), None

    def step(data, model):
        batch, pack = next(data)
        return forward(model, batch), lambda logits: keep(logits, batch, pack)

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(zip(batches, packs, strict=True)) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=max(batch.tokens.shape[1] for batch in batches),
            micro_batch_size=1,
            forward_only=True,
        )
    return found
