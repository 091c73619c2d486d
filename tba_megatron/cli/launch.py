"""``tba launch``: all roles of a run on this machine."""

from __future__ import annotations

import argparse
import sys

from tba_megatron.config import Config
from tba_megatron.ops.launch import launch


def run(config: Config, args: argparse.Namespace) -> int:
    return launch(config, sys.stdout)
