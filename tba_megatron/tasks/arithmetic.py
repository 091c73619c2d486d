"""Additions and subtractions, like ``12+7=`` and ``3-8=``; the answer may be negative."""

from __future__ import annotations

import numpy as np

from tba_megatron.config_sections import ArithmeticTask
from tba_megatron.tasks.exact_answer import ExactAnswerTask, ProblemSet
from tba_megatron.types import Tokenizer

SLIPS = (-10, -3, -2, -1, 1, 2, 3, 10)  # how far off a wrong demonstration is: a carry, or a digit nearby


def arithmetic(config: ArithmeticTask, tokenizer: Tokenizer, seed: int, max_length: int) -> ExactAnswerTask:
    """All a + b and a - b with a in 0..max_left and b in 0..max_right."""
    n_right = config.max_right + 1

    def problem(index: int) -> tuple[str, str]:
        pair, minus = divmod(index, 2)
        a, b = divmod(pair, n_right)
        return f"{a}{'-' if minus else '+'}{b}=", str(a - b if minus else a + b)

    def wrong_answer(answer: str, rng: np.random.Generator) -> str:
        return str(int(answer) + int(rng.choice(SLIPS)))

    return ExactAnswerTask(
        ProblemSet(
            name="arithmetic",
            n=2 * (config.max_left + 1) * n_right,
            problem=problem,
            held_out_fraction=config.held_out_fraction,
        ),
        tokenizer=tokenizer,
        seed=seed,
        max_length=max_length,
        wrong_answer=wrong_answer,
        wrong_fraction=config.wrong_fraction,
    )
