"""From logits to the log-probs of the tokens that were taken.

R response positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from tba_megatron.dist import Groups


def response_logprobs(logits: Tensor, labels: Tensor, *, temperature: float, vocab_size: int, groups: Groups) -> Tensor:
    """log softmax(logits / temperature)[label], in nats, float32, [R].

    ``logits`` is [R, V / tp]: this rank's columns. Padded columns of the vocabulary never get probability.
    """
    if groups.tp_size == 1:
        return -F.cross_entropy(logits[:, :vocab_size].float() / temperature, labels, reduction="none")
    scaled = logits.float() / temperature
    first = groups.tp_rank * scaled.shape[1]
    padding = torch.arange(first, first + scaled.shape[1], device=scaled.device) >= vocab_size
    masked = scaled.masked_fill(padding, -torch.inf)
    # Megatron's op wants [s, b, v] and overwrites float32 logits (0.16.1); masked_fill has just made a copy.
    return -vocab_parallel_cross_entropy(masked[:, None], labels[:, None])[:, 0]
