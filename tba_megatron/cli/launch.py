"""``tba launch``: all roles of a run on this machine."""

from __future__ import annotations

import argparse
import sys

from tba_megatron.config import Config
from tba_megatron.config_load import store_config
from tba_megatron.ops.launch import launch


def run(config: Config, args: argparse.Namespace) -> int:
    store_config(config, config.run.folder)
    return launch(config, sys.stdout)
