"""``tba train``: one rank of the trainer."""

from __future__ import annotations

import argparse

from tba_megatron.cli.common import start_logging, trainer_groups
from tba_megatron.config import Config
from tba_megatron.config_load import store_config
from tba_megatron.config_sections import RecordedData
from tba_megatron.dist import rank_from_environment
from tba_megatron.heap import keep_freed_memory


def run(config: Config, args: argparse.Namespace) -> int:
    start_logging()
    if rank_from_environment().rank == 0:
        store_config(config, config.run.folder)
    with trainer_groups(config) as groups:
        data = config.trainer.data
        if isinstance(data, RecordedData):
            from tba_megatron.trainer.replay import train_on_recording

            return train_on_recording(config, data, groups)
        from tba_megatron.trainer.entry import train

        keep_freed_memory()
        return train(config, groups)
