"""What a task is: a source of prompts and a judge of completions, ignorant of weights and versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from tba_megatron.types import Completion, Prompt, TokenIds

Demonstration = tuple[TokenIds, TokenIds]  # prompt, completion


class Task(Protocol):
    """A finite set of training prompts, a disjoint set of held-out prompts, and a score."""

    @property
    def name(self) -> str: ...

    @property
    def n_train(self) -> int:
        """Training prompts in one epoch."""
        ...

    @property
    def dropped_prompts(self) -> int:
        """Prompts that were left out at load, because they would fill the model's length."""
        ...

    def train_prompt(self, index: int) -> Prompt:
        """Prompt ``index`` (0, 1, ...) of the endless training stream: a pure function of the seed and the
        index.

        Each epoch of ``n_train`` indices holds every training prompt once.
        """
        ...

    def held_out_prompts(self, n: int) -> list[Prompt]:
        """The same n prompts at every call and for every seed; TaskError when there are fewer."""
        ...

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """A score for each completion of a group, in order; one that is not finite spoils its rollout."""
        ...


@runtime_checkable
class Demonstrations(Protocol):
    """A task that can show how it is done; ``tba sft`` needs it, unless it has a file."""

    def demonstration(self, rng: np.random.Generator) -> Demonstration:
        """A random training prompt and an answer, right or wrong, that ends with EOS."""
        ...

    def held_out_demonstrations(self, n: int) -> list[Demonstration]:
        """The first n held-out prompts with their right answers; TaskError when there are fewer."""
        ...
