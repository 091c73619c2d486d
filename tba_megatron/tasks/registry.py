"""The table of tasks: a new one is a file beside this one, a section in ``config`` and a case here."""

from __future__ import annotations

from typing import assert_never

from tba_megatron.config import Config
from tba_megatron.config_sections import ArithmeticTask, CopyTask, FileDemonstrations
from tba_megatron.tasks.arithmetic import arithmetic
from tba_megatron.tasks.base import Task
from tba_megatron.tasks.copy import copy
from tba_megatron.tasks.demonstrations import DemonstrationStream, FromFile, FromTask
from tba_megatron.types import Tokenizer


def make_task(config: ArithmeticTask | CopyTask, tokenizer: Tokenizer, seed: int, max_length: int) -> Task:
    """The task of a configuration, or TaskError. ``max_length`` is the model's, in tokens."""
    match config:
        case ArithmeticTask():
            return arithmetic(config, tokenizer, seed, max_length)
        case CopyTask():
            return copy(config, tokenizer, seed, max_length)
        case _:
            assert_never(config)


def make_demonstrations(config: Config, tokenizer: Tokenizer) -> DemonstrationStream:
    """The warm start's demonstrations, or TaskError."""
    sft, seed, max_length = config.sft, config.run.seed, config.model.max_length
    if isinstance(sft.data, FileDemonstrations):
        return FromFile(sft.data, tokenizer, batch_size=sft.batch_size, seed=seed, max_length=max_length)
    return FromTask(make_task(config.task, tokenizer, seed, max_length), batch_size=sft.batch_size, seed=seed)
