"""The roles of a run on one machine: which processes there are, and how each is started."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tba_megatron.config import Config
from tba_megatron.config_search import MAIN_SOURCE
from tba_megatron.config_sections import SearcherData
from tba_megatron.dist import STORE_FILE

STORE = ".store-"  # how files in the run folder are called in which trainer ranks meet


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Role:
    """One process. Its stderr goes to ``log``; its stdout too, unless it is ``visible``."""

    name: str
    argv: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    visible: bool = False


def tba(command: str, config: Path, *overrides: str) -> tuple[str, ...]:
    """The argument list of a role of this installation."""
    return (sys.executable, "-m", "tba_megatron.cli.main", command, str(config), *overrides)


def trainer_ranks(config: Config, command: str, stored: Path) -> list[Role]:
    """torchrun's variables, and a new file to meet in: on one machine no port has to be free."""
    world_size = config.trainer.world_size
    store = config.run.folder.resolve() / f"{STORE}{time.time_ns()}"
    return [
        Role(
            name=f"{command}-{rank}",
            argv=tba(command, stored),
            log=config.run.folder / "logs" / f"{command}-{rank}.log",
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                STORE_FILE: str(store),
            },
            visible=rank == 0,
        )
        for rank in range(world_size)
    ]


def has_searchers(config: Config) -> bool:
    """Whether the run learns from searchers, not from a recording."""
    return isinstance(config.trainer.data, SearcherData)


def searchers_by_source(config: Config) -> dict[str, int]:
    """How many searchers of each source this machine starts; sources of none are left out."""
    if not has_searchers(config):
        return {}
    wanted = {MAIN_SOURCE: config.search.searchers}
    wanted |= {name: source.searchers for name, source in config.search.sources.items()}
    return {name: n for name, n in wanted.items() if n}


def searchers(config: Config, stored: Path) -> list[Role]:
    """``search-0``, ``search-1`` and so on, and ``search-NAME-0`` of each source NAME."""
    roles = []
    for source, n in searchers_by_source(config).items():
        is_main = source == MAIN_SOURCE
        for i in range(n):
            name = f"search-{i}" if is_main else f"search-{source}-{i}"
            # Also for those of the main source: the stored configuration may name another one.
            argv = tba("search", stored, f"search.source={source}")
            roles.append(Role(name=name, argv=argv, log=config.run.folder / "logs" / f"{name}.log"))
    return roles
