"""From hidden states to log-probs of the tokens that were taken: ``kernels.linear_logprob`` as the output layer.

T packed tokens, R response positions, H hidden size, V rows of this rank's shard of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.kernels.linear_logprob import linear_logprob
from tba_megatron.trainer.model import Batch, forward


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """What turns hidden states into log-probs, beside the weights."""

    temperature: float
    vocab_size: int
    entropy: bool = False  # whether an update says how sure the policy is, too


def nobody(hidden: Tensor, batch: Batch) -> None:
    """Looks at no hidden states."""


def forward_responses(
    chunk: torch.nn.Module,
    batch: Batch,
    head: HeadSettings,
    groups: Groups,
    see: Callable[[Tensor, Batch], None] = nobody,
) -> Tensor:
    """Log-probs float32 [R] at the response positions on the last stage, hidden states for the next stage elsewhere.

    With ``head.entropy`` [2, R], the second row being the entropy of each distribution, in nats and without gradient.

    No logits are kept: neither for the backward pass nor, larger than a chunk of the vocabulary, within this one.
    ``see`` is shown the last hidden states [T, H] of all positions, as the output layer gets them.
    """
    gpt: Any = chunk
    while hasattr(gpt, "module"):  # DDP, Float16Module
        gpt = gpt.module
    if not gpt.post_process:
        return forward(chunk, batch)

    def logprobs(hidden: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Called as ColumnParallelLinear.forward (0.16.1): ``hidden`` [T, 1, H]; [R, 1 or 2], turned by GPTModel."""
        sequence_parallel = gpt.config.sequence_parallel
        if sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)  # its backward pass sums over ranks
        see(hidden[:, 0], batch)
        rows: Tensor = gpt.output_layer.weight if weight is None else weight  # given where embeddings are tied
        first = groups.tp_rank * rows.shape[0]
        out = linear_logprob(
            hidden[:, 0].index_select(0, batch.rows),
            rows,
            batch.labels,
            temperature=head.temperature,
            tp_group=cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group()),
            vocab_start=first,
            valid_rows=min(max(head.vocab_size - first, 0), rows.shape[0]),
            reduce_hidden_grad=not sequence_parallel,
            entropy=head.entropy,
            main_grad=getattr(rows, "main_grad", None) if rows.requires_grad else None,
        )
        return out.logprob[:, None] if out.entropy is None else torch.stack([out.logprob, out.entropy], dim=1), None

    with _computing(gpt.output_layer, logprobs):
        found = forward(chunk, batch)
    return found if head.entropy else found[0]


@contextmanager
def _computing(layer: Any, function: Any) -> Iterator[None]:
    """``layer`` computes ``function`` meanwhile. GPTModel offers no place for another head (0.16.1)."""
    layer.forward = function  # an attribute of the object goes before the method of its class
    try:
        yield
    finally:
        del layer.forward
