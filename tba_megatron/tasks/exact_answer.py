"""Tasks made of a finite list of problems with one right answer each, in plain text.

A problem is held out or trained on by a hash of its text alone, so that neither the seed nor the other
problems can move it across, and nothing needs to be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tba_megatron.errors import TaskError
from tba_megatron.tasks.base import Demonstration
from tba_megatron.tasks.stream import EpochOrder, demonstrate, unit_hash
from tba_megatron.types import Completion, Prompt, StopReason, Tokenizer

MAX_PROBLEMS = 1_000_000  # all of them are tokenized at load


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSet:
    """Problem i of 0..n-1 is ``problem(i)``: its text and its answer. All texts differ."""

    name: str
    n: int
    problem: Callable[[int], tuple[str, str]]
    held_out_fraction: float


class ExactAnswerTask:
    """Reward 1 for a completion that is the answer and nothing else, and that ended with EOS; otherwise 0.

    Implements ``Task`` and ``Demonstrations``. ``wrong_answer`` spoils an answer; ``wrong_fraction`` of the
    demonstrations go through it. TaskError when there are too many problems, none to train on, or when the
    tokenizer cannot write them.
    """

    def __init__(
        self,
        problems: ProblemSet,
        *,
        tokenizer: Tokenizer,
        seed: int,
        max_length: int,
        wrong_answer: Callable[[str, np.random.Generator], str] | None = None,
        wrong_fraction: float = 0.0,
    ) -> None:
        if problems.n > MAX_PROBLEMS:
            raise TaskError(
                f"task {problems.name} has {problems.n} problems, more than {MAX_PROBLEMS}; make it smaller"
            )
        self._problems = problems
        self._tokenizer = tokenizer
        self._wrong_answer = wrong_answer
        self._wrong_fraction = wrong_fraction

        train: list[int] = []
        held_out: list[tuple[float, int]] = []
        characters: set[str] = set()
        self.dropped_prompts = 0
        for index in range(problems.n):
            text, answer = problems.problem(index)
            characters.update(text, answer)
            if len(tokenizer.encode(text)) >= max_length:
                self.dropped_prompts += 1
            elif (place := unit_hash(text)) < problems.held_out_fraction:
                held_out.append((place, index))
            else:
                train.append(index)
        self._check_tokenizer(characters)
        if not train:
            raise TaskError(
                f"task {self.name} has nothing to train on: {problems.n} problems, {len(held_out)} held out, "
                f"{self.dropped_prompts} too long for model.max_length ({max_length})"
            )
        self._train = np.array(train)
        self._order = EpochOrder(len(train), seed)
        self._held_out = [index for _, index in sorted(held_out)]

    @property
    def name(self) -> str:
        return self._problems.name

    @property
    def n_train(self) -> int:
        return len(self._train)

    def train_prompt(self, index: int) -> Prompt:
        return self._prompt(int(self._train[self._order[index]]))

    def held_out_prompts(self, n: int) -> list[Prompt]:
        if n > len(self._held_out):
            raise TaskError(
                f"task {self.name} has {len(self._held_out)} held-out problems, not the {n} asked for; "
                f"lower evaluation.problems to at most {len(self._held_out)} or enlarge the task"
            )
        return [self._prompt(index) for index in self._held_out[:n]]

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        answer = prompt.payload["answer"]
        return [
            float(c.stop_reason is StopReason.EOS and self._tokenizer.decode(c.token_ids) == answer)
            for c in completions
        ]

    def demonstration(self, rng: np.random.Generator) -> Demonstration:
        text, answer = self._problems.problem(int(rng.choice(self._train)))
        if self._wrong_answer is not None and rng.random() < self._wrong_fraction:
            answer = self._wrong_answer(answer, rng)
        return demonstrate(self._tokenizer, text, answer)

    def held_out_demonstrations(self, n: int) -> list[Demonstration]:
        if n > len(self._held_out):
            raise TaskError(
                f"task {self.name} has {len(self._held_out)} held-out problems, not the {n} asked for; lower "
                f"sft.held_out to at most {len(self._held_out)} or enlarge the task"
            )
        return [demonstrate(self._tokenizer, *self._problems.problem(index)) for index in self._held_out[:n]]

    def _prompt(self, index: int) -> Prompt:
        text, answer = self._problems.problem(index)
        return Prompt(
            prompt_id=f"{self.name}:{text}",
            task=self.name,
            token_ids=self._tokenizer.encode(text),
            payload={"answer": answer},
        )

    def _check_tokenizer(self, characters: set[str]) -> None:
        lost = [c for c in sorted(characters) if self._tokenizer.decode(self._tokenizer.encode(c)) != c]
        if lost:
            raise TaskError(f"the tokenizer of model.path cannot write {lost}, which task {self.name} needs")
