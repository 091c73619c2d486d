"""The step that transformers and torch make of a batch of demonstrations: what the trainer's speed is held against.

S sequences and L tokens of a padded microbatch, R of its positions predict a token of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tba_megatron.config_sections import OptimizerSection
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.models.random_weights import RandomTensors
from tba_megatron.types import TokenIds

Pairs = Sequence[tuple[TokenIds, TokenIds]]  # prompt and completion


class TransformersSide:
    """A Qwen2 with the weights of ``load_random``'s seed 0, trained by torch's AdamW with a clipped gradient norm.

    Sequences are padded on the right and sorted by length into ``n_microbatches`` of about equally many padded tokens.
    Plain: an attention mask, and logits at every position. Tuned: no mask, since a causal model never looks at what is
    behind; logits at the R positions that the loss reads; AdamW fused.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        architecture: Architecture,
        shape: ModelShape,
        optimizer: OptimizerSection,
        n_microbatches: int,
        *,
        tuned: bool,
    ) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        self.model = Qwen2ForCausalLM._from_config(Qwen2Config(**hf_config), attn_implementation="sdpa").float().train()
        random = RandomTensors(architecture, shape, 0)
        missing, unexpected = self.model.load_state_dict({n: random[n] for n in random.names}, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"transformers' model has other tensors: {missing} missing, {unexpected} unexpected")
        self.n_microbatches = n_microbatches
        self._clip, self._tuned = optimizer.clip_grad_norm, tuned
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
            weight_decay=optimizer.weight_decay,
            fused=tuned,
        )

    def step(self, pairs: Pairs) -> float:
        """One optimizer step on ``pairs``; the mean loss of a completion's token before it."""
        normaliser = sum(len(completion) for _, completion in pairs)
        self._optimizer.zero_grad()
        total = 0.0
        for part in by_length(pairs, self.n_microbatches):
            loss = self._nll(*pad(part)) / normaliser
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        return total

    def _nll(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        if not self._tuned:
            logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        response = labels >= 0
        return F.cross_entropy(self.model.lm_head(hidden[response]), labels[response], reduction="sum")


def by_length(pairs: Pairs, n_parts: int) -> list[Pairs]:
    """``pairs`` sorted by length, cut into ``n_parts`` of about equally many padded tokens."""
    ordered = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    ends = np.cumsum([len(prompt) + len(completion) for prompt, completion in ordered])
    cuts = np.searchsorted(ends, np.arange(1, n_parts) * ends[-1] / n_parts) + 1
    return [ordered[first:last] for first, last in zip([0, *cuts], [*cuts, len(ordered)], strict=True) if last > first]


def padded_tokens(pairs: Pairs, n_parts: int) -> int:
    return sum(
        len(part) * max(len(prompt) + len(completion) for prompt, completion in part)
        for part in by_length(pairs, n_parts)
    )


def pad(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, attention mask, labels), each int64 [S, L]; a label is -100 where nothing is to be predicted."""
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    tokens, mask = (
        torch.zeros(len(pairs), length, dtype=torch.int64),
        torch.zeros(len(pairs), length, dtype=torch.int64),
    )
    labels = torch.full_like(tokens, -100)
    for s, (prompt, completion) in enumerate(pairs):
        first, end = len(prompt), len(prompt) + len(completion)
        row = torch.from_numpy(np.concatenate([prompt, completion]))
        tokens[s, :end] = row
        mask[s, :end] = 1
        labels[s, first - 1 : end - 1] = row[first:]
    return tokens, mask, labels
