"""Where the warm start's demonstrations come from: the task itself, or a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from tba_megatron.config_sections import FileDemonstrations
from tba_megatron.errors import TaskError
from tba_megatron.tasks.base import Demonstration, Demonstrations, Task
from tba_megatron.tasks.stream import EpochOrder, demonstrate, unit_hash
from tba_megatron.types import Tokenizer


class DemonstrationStream(Protocol):
    """A batch for every step, a pure function of seed and step, and a fixed list that is never trained on."""

    @property
    def dropped(self) -> int:
        """Demonstrations that were left out at load, because they are longer than the model's length."""
        ...

    @property
    def lost(self) -> Sequence[str]:
        """Characters of the demonstrations that the tokenizer does not give back."""
        ...

    def batch(self, step: int) -> list[Demonstration]:
        """The batch of optimizer step ``step``, from 1 on."""
        ...

    def held_out(self, n: int) -> list[Demonstration]:
        """TaskError when there are fewer than ``n``."""
        ...


class FromTask:
    """Random demonstrations of a task, with replacement."""

    dropped, lost = 0, ()

    def __init__(self, task: Task, *, batch_size: int, seed: int) -> None:
        if not isinstance(task, Demonstrations):
            raise TaskError(f"task {task.name} has no demonstrations; give a file by sft.data, or set sft.steps to 0")
        self._task, self._batch_size, self._seed = task, batch_size, seed

    def batch(self, step: int) -> list[Demonstration]:
        rng = np.random.default_rng([self._seed, step])
        return [self._task.demonstration(rng) for _ in range(self._batch_size)]

    def held_out(self, n: int) -> list[Demonstration]:
        return self._task.held_out_demonstrations(n)


class FromFile:
    """All demonstrations of a JSONL file, epoch after epoch, each epoch in another order.

    TaskError names the file and the line of what cannot be used. A demonstration of more than ``max_length`` tokens is
    left out and counted. Characters that the tokenizer cannot write are named, not refused: it may only write them in
    another form.
    """

    def __init__(
        self, config: FileDemonstrations, tokenizer: Tokenizer, *, batch_size: int, seed: int, max_length: int
    ) -> None:
        self._path, self._batch_size = config.path, batch_size
        self._train: list[Demonstration] = []
        held_out: list[tuple[float, int, Demonstration]] = []
        self.dropped = 0
        rows = _read(config.path)
        characters = {character for _, texts in rows for text in texts for character in text}
        self.lost = tuple(
            sorted(c for c in characters if not c.isspace() and tokenizer.decode(tokenizer.encode(c)) != c)
        )
        for number, (prompt, completion) in rows:
            demonstration = demonstrate(tokenizer, prompt, completion)
            if not len(demonstration[0]):
                raise TaskError(f"{config.path}:{number}: the prompt has no tokens; give it at least one")
            if sum(map(len, demonstration)) > max_length:
                self.dropped += 1
            elif (place := unit_hash(prompt)) < config.held_out_fraction:
                held_out.append((place, number, demonstration))
            else:
                self._train.append(demonstration)
        if not self._train:
            raise TaskError(
                f"{config.path} has nothing to train on: {len(held_out)} demonstrations held out, "
                f"{self.dropped} longer than model.max_length ({max_length})"
            )
        self._held_out = [demonstration for _, _, demonstration in sorted(held_out, key=lambda item: item[:2])]
        self._order = EpochOrder(len(self._train), seed)

    def batch(self, step: int) -> list[Demonstration]:
        first = (step - 1) * self._batch_size
        return [self._train[self._order[i]] for i in range(first, first + self._batch_size)]

    def held_out(self, n: int) -> list[Demonstration]:
        if n > len(self._held_out):
            raise TaskError(
                f"{self._path} has {len(self._held_out)} held-out demonstrations, not the {n} asked for; lower "
                f"sft.held_out or raise sft.data.held_out_fraction"
            )
        return self._held_out[:n]


def _read(path: Path) -> list[tuple[int, tuple[str, str]]]:
    """(line number, (prompt, completion)); empty lines are passed over."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028 within a text
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"sft.data.path: {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}:{number}: not JSON ({error})") from None
        row = row if isinstance(row, dict) else {}
        texts = [text for key in ("prompt", "completion") if isinstance(text := row.get(key), str)]
        if len(texts) < 2:
            raise TaskError(f"{path}:{number}: needs the texts 'prompt' and 'completion'")
        if not all(_is_unicode(text) for text in texts):
            raise TaskError(f"{path}:{number}: holds half of a surrogate pair; write the character in UTF-8")
        found.append((number, (texts[0], texts[1])))
    return found


def _is_unicode(text: str) -> bool:
    """JSON can spell halves of characters, which no encoding has."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
