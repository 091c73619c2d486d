"""``tba sft``: the warm start alone, one rank of it."""

from __future__ import annotations

import argparse
import logging
import sys

from tba_megatron.cli.common import start_logging, trainer_groups
from tba_megatron.config import Config
from tba_megatron.config_load import store_config
from tba_megatron.dist import rank_from_environment
from tba_megatron.errors import ConfigError
from tba_megatron.metrics import open_metric_log
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.tasks.registry import make_demonstrations

_log = logging.getLogger(__name__)


def run(config: Config, args: argparse.Namespace) -> int:
    start_logging()
    if not config.sft.steps:
        raise ConfigError(["sft.steps: 0 leaves nothing to do; set it to the number of steps"])
    if (config.start_model / "config.json").exists():
        print(f"{config.start_model} is complete; remove it to start over, or choose another run.folder")
        return 0
    demonstrations = make_demonstrations(config, HfTokenizer(config.model.path))
    demonstrations.held_out(config.sft.held_out)  # too few are an error before anything is written
    if rank_from_environment().rank == 0:
        store_config(config, config.run.folder)
        if demonstrations.dropped:
            _log.warning("%d demonstrations are longer than model.max_length and left out", demonstrations.dropped)
        if demonstrations.lost:
            shown, n = "".join(demonstrations.lost[:20]), len(demonstrations.lost)
            _log.warning("the tokenizer does not write %d of the characters as they are: %s", n, shown)
    with trainer_groups(config) as groups:
        from tba_megatron.trainer.sft import first_step, warm_start

        log = None
        if groups.rank == 0:
            log = open_metric_log(
                config.metrics,
                config.run.folder / "sft-log",
                first_step=first_step(config),
                total_steps=config.sft.steps,
                stream=sys.stdout,
            )
        try:
            stopped_by = warm_start(config, demonstrations, groups, log)
        finally:
            if log is not None:
                log.close()
    return 128 + stopped_by if stopped_by else 0
