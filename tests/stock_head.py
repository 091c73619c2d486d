"""The twin of the trainer's head: logits of Megatron's output layer, then torch's or Megatron's cross entropy.

R response positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.trainer.head import HeadSettings, nobody
from tba_megatron.trainer.model import Batch, forward


def forward_responses(
    chunk: torch.nn.Module,
    batch: Batch,
    head: HeadSettings,
    groups: Groups,
    see: Callable[[Tensor, Batch], None] = nobody,
) -> Tensor:
    """As ``trainer.head.forward_responses``, by way of logits [T, V / tp] of all positions: without hidden states to be
    seen, and without an entropy."""
    assert not head.entropy
    output = forward(chunk, batch)
    gpt: Any = chunk
    while hasattr(gpt, "module"):
        gpt = gpt.module
    return response_logprobs(output[0, batch.rows], batch.labels, head, groups) if gpt.post_process else output


def response_logprobs(logits: Tensor, labels: Tensor, head: HeadSettings, groups: Groups) -> Tensor:
    """log softmax(logits / temperature)[label] of this rank's columns [R, V / tp]; [R]."""
    if groups.tp_size == 1:
        return -F.cross_entropy(logits[:, : head.vocab_size].float() / head.temperature, labels, reduction="none")
    scaled = logits.float() / head.temperature
    first = groups.tp_rank * scaled.shape[1]
    padding = torch.arange(first, first + scaled.shape[1]) >= head.vocab_size
    # Megatron's op wants [s, b, v] and overwrites float32 logits (0.16.1); masked_fill makes a copy.
    masked = scaled.masked_fill(padding, -torch.inf)
    return -vocab_parallel_cross_entropy(masked[:, None], labels[:, None])[:, 0]
