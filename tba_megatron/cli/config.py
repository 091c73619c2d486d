"""``tba config``: check a configuration and print the resolved tree."""

from __future__ import annotations

import argparse

from tba_megatron.config import Config
from tba_megatron.config_load import dump_config


def run(config: Config, args: argparse.Namespace) -> int:
    print(dump_config(config), end="")
    return 0
