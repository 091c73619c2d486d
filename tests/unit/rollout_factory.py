"""Small rollouts and groups for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.types import (
    PolicyHistory,
    PolicySpan,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    RolloutId,
    StopReason,
    TrainGroup,
)

NEW_RUN = PolicyHistory(base_steps=(0,))


class RolloutFactory:
    """Makes rollouts with ids of its own; one for each test."""

    def __init__(self, searcher: str = "s0") -> None:
        self._sequence: Iterator[int] = itertools.count()
        self.searcher = searcher

    def rollout(
        self,
        tokens: list[int] | int,
        *,
        step: int = 0,
        attempt: int = 0,
        reward: float = 0.0,
        reference: float | None = None,
        **overrides: object,
    ) -> Rollout:
        tokens = [tokens] if isinstance(tokens, int) else tokens
        fields = {
            "rollout_id": RolloutId(self.searcher, next(self._sequence)),
            "token_ids": np.array(tokens, np.int32),
            "reward": reward,
            "stop_reason": StopReason.EOS,
            "spans": (PolicySpan(version=PolicyVersion(attempt, step), start=0, end=len(tokens)),),
            "source": "test",
            "reference_logprob": reference,
            "reference_version": None if reference is None else 0,
        }
        return Rollout(**(fields | overrides))

    def group(self, prompt_id: str, completions: list, **fields: object) -> RolloutGroup:
        return as_group(prompt_id, [self.rollout(tokens, **fields) for tokens in completions])


def as_group(prompt_id: str, rollouts: list[Rollout]) -> RolloutGroup:
    return RolloutGroup(prompt_id=prompt_id, prompt_token_ids=prompt_tokens(prompt_id), rollouts=tuple(rollouts))


def as_batch(*groups: RolloutGroup) -> RolloutBatch:
    return RolloutBatch.of_groups(groups)


def prompt_tokens(prompt_id: str) -> np.ndarray:
    return np.frombuffer(prompt_id.encode(), np.uint8).astype(np.int32)


def train_group(prompt_id: str, rollouts: list[Rollout], copies: list[int] | None = None) -> TrainGroup:
    return TrainGroup(
        prompt_id=prompt_id,
        prompt_token_ids=prompt_tokens(prompt_id),
        rollouts=tuple(rollouts),
        copies=tuple(copies or [1] * len(rollouts)),
    )
