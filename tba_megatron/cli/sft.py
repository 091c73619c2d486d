"""``tba sft``: the warm start."""

from __future__ import annotations

import argparse
import sys

from tba_megatron.cli.common import start_logging
from tba_megatron.config import Config
from tba_megatron.dist import prepare_trainer_environment
from tba_megatron.errors import ConfigError, TaskError


def run(config: Config, args: argparse.Namespace) -> int:
    if not config.sft.steps:
        raise ConfigError(["sft.steps: 0 leaves nothing to do; set it to the number of steps"])
    start_logging()
    prepare_trainer_environment(config.trainer.threads)
    import megatron_patches

    megatron_patches.apply()
    import torch

    from tba_megatron.metrics import open_metric_log
    from tba_megatron.models.tokenizer import HfTokenizer
    from tba_megatron.tasks.base import Demonstrations
    from tba_megatron.tasks.registry import make_task
    from tba_megatron.trainer.parallel import close_process_groups, open_process_groups
    from tba_megatron.trainer.sft import warm_start

    torch.set_num_threads(config.trainer.threads)
    task = make_task(config.task, HfTokenizer(config.model.path), config.run.seed, config.model.max_length)
    if not isinstance(task, Demonstrations):
        raise TaskError(f"task.kind: {config.task.kind} has no demonstrations; set sft.steps to 0 or choose another")
    trainer = config.trainer
    groups = open_process_groups(
        tensor_parallel=trainer.tensor_parallel,
        pipeline_parallel=trainer.pipeline_parallel,
        data_parallel=trainer.data_parallel,
        seed=config.run.seed,
        timeout_s=trainer.distributed_timeout_s,
    )
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
    close_process_groups()
    return 0
