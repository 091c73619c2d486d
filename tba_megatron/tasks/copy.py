"""Repeat some digits: ``4071=`` is answered with ``4071``."""

from __future__ import annotations

from tba_megatron.config_sections import CopyTask
from tba_megatron.tasks.exact_answer import ExactAnswerTask, ProblemSet
from tba_megatron.types import Tokenizer

HELD_OUT_FRACTION = 0.2


def copy(config: CopyTask, tokenizer: Tokenizer, seed: int, max_length: int) -> ExactAnswerTask:
    """All strings of ``config.length`` digits."""

    def problem(index: int) -> tuple[str, str]:
        digits = f"{index:0{config.length}d}"
        return f"{digits}=", digits

    return ExactAnswerTask(
        ProblemSet(name="copy", n=10**config.length, problem=problem, held_out_fraction=HELD_OUT_FRACTION),
        tokenizer=tokenizer,
        seed=seed,
        max_length=max_length,
    )
