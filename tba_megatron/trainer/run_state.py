"""What can be read of a run without torch: what rank 0 noted in a checkpoint, the columns of shards, the attempts."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from tba_megatron.buffer.shard_state import Columns
from tba_megatron.errors import CheckpointError
from tba_megatron.types import PolicyHistory

ATTEMPTS = "attempts.json"  # of the run folder: the step at which each attempt began


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 knows beside weights and rollouts. ``base_steps`` are those of ``PolicyHistory``."""

    step: int
    base_steps: tuple[int, ...]
    data_parallel: int  # how many replay shards there are
    next_position: int  # of the prompt stream
    unfinished_prompts: list[tuple[int, int]]  # (start, count) that were leased and had not arrived
    generated: dict[str, int]  # by searcher incarnation, for the ledger
    skipped_steps: int = 0
    accuracy_before: float | None = None
    busy_s: float = 0.0
    idle_s: float = 0.0
    train_s: float = 0.0
    wait_s: float = 0.0
    versions: int = 0
    ages: dict[int, int] = {}  # age in steps -> rollouts trained at that age
    drawn: int = 0  # rollouts of all steps, copies counted
    drawn_first: int = 0  # of them, those that were part of no step before

    @property
    def history(self) -> PolicyHistory:
        return PolicyHistory(base_steps=self.base_steps)


def read_run_state(checkpoint: Path) -> RunState:
    with reading(checkpoint / "run.json") as file:
        return msgspec.json.decode(file.read_bytes(), type=RunState)


def read_shard(checkpoint: Path, index: int) -> Columns:
    """The columns of the shard with the number ``index``."""
    with reading(checkpoint / f"shard-{index}.npz") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def read_attempts(folder: Path, restored: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The base steps of all attempts that began in a run folder.

    ``restored``: those that a checkpoint knows, which count where the file is missing.
    """
    path = folder / ATTEMPTS
    try:
        return tuple(msgspec.json.decode(path.read_bytes(), type=list[int])) if path.exists() else restored
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), and without it versions of earlier attempts would be taken for new "
            f"ones; restore it or choose another run.folder"
        ) from None


@contextmanager
def reading(file: Path) -> Iterator[Path]:
    """Whatever a missing or damaged ``file`` can cause, as a CheckpointError that names it."""
    try:
        yield file
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        ImportError,
        EOFError,
        RuntimeError,
        msgspec.DecodeError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        first_line = str(error).strip().partition("\n")[0] or "no reason given"
        reason = "it is missing" if isinstance(error, FileNotFoundError) else first_line
        raise CheckpointError(f"{file} cannot be read ({reason})") from error
