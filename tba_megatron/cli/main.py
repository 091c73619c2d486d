"""The console script ``tba``: a command, a configuration file, overrides ``section.key=value``, and no other
flags. Commands that look at what a run left take its folder and settings ``key=value`` instead.

Each command is a module beside this one with ``run(config, args) -> int``, or ``run(folder, settings) -> int``,
imported only when it is asked for, so that ``tba --help`` and ``tba config FILE`` answer without importing torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tba_megatron.errors import TbaError

COMMANDS = {
    "launch": "start all roles of a run on this machine",
    "train": "run one rank of the trainer",
    "search": "run one searcher: generate, score and send rollouts",
    "sft": "warm start: learn from the task's demonstrations",
    "eval": "measure accuracy on held-out problems",
    "export": "write the newest checkpoint as a Hugging Face folder",
    "config": "check a configuration and print the resolved tree",
}
RUN_COMMANDS = {
    "rollouts": "list, filter and export the stored rollouts of a run",
}
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A ``TbaError`` becomes its message on stderr and its exit code."""
    args = build_parser().parse_args(argv)
    try:
        if args.command in RUN_COMMANDS:
            return importlib.import_module(f"tba_megatron.cli.{args.command}").run(Path(args.folder), args.settings)
        from tba_megatron.config_load import load_config

        config = load_config(args.config, args.overrides)
        return importlib.import_module(f"tba_megatron.cli.{args.command}").run(config, args)
    except TbaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tba", description="Asynchronous LLM reinforcement learning with trajectory balance."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("config", metavar="FILE", help="a YAML configuration")
        command.add_argument(
            "overrides", metavar="section.key=value", nargs="*", help="values that replace those of FILE"
        )
    for name, summary in RUN_COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("folder", metavar="RUN", help="a run folder")
        command.add_argument("settings", metavar="key=value", nargs="*", help="what to show, and how")
    return parser


if __name__ == "__main__":
    sys.exit(main())
