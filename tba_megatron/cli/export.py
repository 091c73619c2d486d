"""``tba export``: the newest checkpoint as a Hugging Face folder, ``hf`` in the run folder."""

from __future__ import annotations

import argparse

from tba_megatron.cli.common import start_logging, trainer_groups
from tba_megatron.config import Config


def run(config: Config, args: argparse.Namespace) -> int:
    start_logging()
    folder = config.run.folder / "hf"
    with trainer_groups(config) as groups:
        from tba_megatron.trainer.build import export_newest

        step = export_newest(config, groups, folder)
        if groups.rank == 0:
            print(f"step {step} is in {folder}")
    return 0
