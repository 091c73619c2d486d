"""``tba sft``: the warm start, one rank of it."""

from __future__ import annotations

import argparse
import sys

from tba_megatron.cli.common import start_logging, trainer_groups
from tba_megatron.config import Config
from tba_megatron.config_load import store_config
from tba_megatron.dist import rank_from_environment
from tba_megatron.errors import ConfigError, TaskError
from tba_megatron.metrics import open_metric_log
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.tasks.base import Demonstrations
from tba_megatron.tasks.registry import make_task


def run(config: Config, args: argparse.Namespace) -> int:
    start_logging()
    if not config.sft.steps:
        raise ConfigError(["sft.steps: 0 leaves nothing to do; set it to the number of steps"])
    task = make_task(config.task, HfTokenizer(config.model.path), config.run.seed, config.model.max_length)
    if not isinstance(task, Demonstrations):
        raise TaskError(f"task.kind: {config.task.kind} has no demonstrations; set sft.steps to 0")
    if rank_from_environment().rank == 0:
        store_config(config, config.run.folder)
    with trainer_groups(config) as groups:
        from tba_megatron.trainer.sft import warm_start

        log = None
        if groups.rank == 0:
            log = open_metric_log(
                config.metrics,
                config.run.folder / "sft-log",
                first_step=0,
                total_steps=config.sft.steps,
                stream=sys.stdout,
            )
        try:
            warm_start(config, task.demonstration, groups, log)
        finally:
            if log is not None:
                log.close()
    return 0
