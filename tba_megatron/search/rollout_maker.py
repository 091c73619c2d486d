"""Completions become rollouts: scored, numbered, stamped with who wrote them and where they came from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from tba_megatron.config_objective import ObjectiveConfig
from tba_megatron.rollout_batch import START_REFERENCE
from tba_megatron.tasks.base import Task
from tba_megatron.transport.messages import SampleRollout
from tba_megatron.types import (
    Completion,
    PolicySpan,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutId,
    StopReason,
    Tokenizer,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A prompt that was leased: ``position`` in the task's stream."""

    lease: int
    position: int
    prompt: Prompt


class RolloutMaker:
    """Of one searcher incarnation, ``name``; ``source`` says in each rollout which kind of searcher wrote it."""

    def __init__(self, objective: ObjectiveConfig, task: Task, tokenizer: Tokenizer, name: str, source: str) -> None:
        self._objective, self._task, self._tokenizer = objective, task, tokenizer
        self._name, self._source = name, source
        self._sample: SampleRollout | None = None
        self.generated = 0

    def make(
        self,
        visit: Visit,
        completions: Sequence[Completion],
        newest: PolicyVersion,
        reference: Sequence[float] | None = None,
    ) -> RolloutGroup:
        """They count as generated before they are sent. ``newest``: the trainer's version, as far as it is known.
        ``reference``: the log-prob sums of the start model, where searchers compute them."""
        scores = self._task.score(visit.prompt, completions)
        sums: Sequence[float | None] = [None] * len(completions) if reference is None else reference
        rollouts = []
        for completion, score, known in zip(completions, scores, sums, strict=True):
            truncated = completion.stop_reason is StopReason.LENGTH
            penalised = truncated and self._objective.truncated == "penalise"
            rollouts.append(
                Rollout(
                    rollout_id=RolloutId(self._name, self.generated),
                    token_ids=completion.token_ids,
                    reward=score - (self._objective.truncated_penalty if penalised else 0.0),
                    stop_reason=completion.stop_reason,
                    spans=tuple(_in_its_era(span, newest) for span in completion.spans),
                    source=self._source,
                    behaviour_logprobs=completion.behaviour_logprobs,
                    reference_logprob=known,
                    reference_version=None if known is None else START_REFERENCE,
                )
            )
            self.generated += 1
        self._keep_sample(visit.prompt, rollouts[0])
        return RolloutGroup(
            prompt_id=visit.prompt.prompt_id,
            prompt_token_ids=visit.prompt.token_ids,
            rollouts=tuple(rollouts),
            lease=visit.lease,
        )

    def take_sample(self) -> SampleRollout | None:
        """One rollout since the last call, as text."""
        sample, self._sample = self._sample, None
        return sample

    def _keep_sample(self, prompt: Prompt, rollout: Rollout) -> None:
        if self._sample is None and math.isfinite(rollout.reward):
            self._sample = SampleRollout(
                prompt=self._tokenizer.decode(prompt.token_ids),
                completion=self._tokenizer.decode(rollout.token_ids),
                reward=rollout.reward,
                version=str(rollout.version),
            )


def _in_its_era(span: PolicySpan, newest: PolicyVersion) -> PolicySpan:
    """Another policy never changes; when it wrote something is what tells old from new."""
    if not span.version.is_foreign:
        return span
    return PolicySpan(version=newest.as_foreign(), start=span.start, end=span.end)


def new_name(host: str) -> str:
    """A name for this start of a searcher: host, process and a random part."""
    return f"{host}-{os.getpid()}-{os.urandom(4).hex()}"
