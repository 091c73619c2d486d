"""Checkpoints of the whole run: model, optimizer, schedule and RNG by Megatron, shards and the run's state beside them.

``checkpoints/step-00000123/`` appears under its name only when it is complete, so the newest name is the newest
checkpoint. Megatron's part loads at other tensor and pipeline sizes; the shards need the same data-parallel size.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError
from tba_megatron.trainer.model import Policy
from tba_megatron.types import PolicyHistory

_PREFIX = "step-"
_METADATA = {
    # The one optimizer format that loads at other parallel sizes with torch.optim.AdamW (0.16.1).
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 knows beside weights and rollouts. ``base_steps`` are those of ``PolicyHistory``."""

    step: int
    base_steps: tuple[int, ...]
    data_parallel: int
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

    @property
    def history(self) -> PolicyHistory:
        return PolicyHistory(base_steps=self.base_steps)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints under ``folder``, oldest first."""
    found = []
    for path in folder.glob(f"{_PREFIX}*") if folder.exists() else []:
        digits = path.name.removeprefix(_PREFIX)
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def save(
    folder: Path, policy: Policy, shard: ReplayShard | None, state: RunState, groups: Groups, *, keep: int
) -> Path:
    """Write one checkpoint; a collective over all ranks. ``shard`` is given on DP leaders.

    CheckpointError on every rank when any rank could not write; what was there before stays loadable.
    """
    final = folder / f"{_PREFIX}{state.step:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        _save(partial, final, policy, shard, state, groups, keep)
    except CheckpointError:
        if groups.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # it may hold the space that the disk lacks
        raise
    return final


def _save(
    partial: Path,
    final: Path,
    policy: Policy,
    shard: ReplayShard | None,
    state: RunState,
    groups: Groups,
    keep: int,
) -> None:
    folder = final.parent
    with _AllOrNone(groups, f"cannot save step {state.step} in {folder}"):
        if groups.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "model").mkdir(parents=True)
    with _AllOrNone(groups, f"cannot save step {state.step} in {folder}"):
        dist_checkpointing.save(
            _sharded_state(policy, loading=False), str(partial / "model"), content_metadata=_METADATA
        )
    with _AllOrNone(groups, f"cannot save step {state.step} in {folder}"):
        if shard is not None:
            with (partial / f"shard-{groups.dp_rank}.npz").open("wb") as file:
                np.savez(file, **shard.state_arrays())  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
        if groups.rank == 0:
            (partial / "run.json").write_bytes(msgspec.json.encode(state))
    with _AllOrNone(groups, f"cannot save step {state.step} in {folder}"):
        if groups.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for _, old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)


def read_state(path: Path) -> RunState:
    """The run's state in the checkpoint ``path``; CheckpointError when it cannot be read."""
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}/run.json cannot be read ({error}); remove {path} to resume earlier") from None


def load(path: Path, policy: Policy, shard: ReplayShard | None, groups: Groups) -> RunState:
    """Restore everything on every rank from ``path``."""
    state = read_state(path)
    if state.data_parallel != groups.dp_size:
        raise CheckpointError(
            f"{path} holds replay shards of {state.data_parallel} data-parallel replicas; trainer.data_parallel is "
            f"{groups.dp_size}: resume with {state.data_parallel}"
        )
    load_policy(path, policy)
    if shard is not None:
        _load_shard(path / f"shard-{groups.dp_rank}.npz", shard)
    return state


def _load_shard(path: Path, shard: ReplayShard) -> None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            shard.restore(dict(arrays))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); remove {path.parent} to resume earlier") from None


def load_policy(path: Path, policy: Policy) -> None:
    """Restore model, optimizer, schedule and RNG alone; a collective over all ranks."""
    loaded: Any = dist_checkpointing.load(_sharded_state(policy, loading=True), str(path / "model"))
    for i, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"]["torch"])


def _sharded_state(policy: Policy, *, loading: bool) -> dict[str, Any]:
    model = {f"model{i}": chunk.sharded_state_dict(metadata=_METADATA) for i, chunk in enumerate(policy.chunks)}
    return {
        **model,
        "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_METADATA),
        "scheduler": policy.scheduler.state_dict(),
        # Nothing draws from it while dropout is 0; a resume at another world size takes rank 0's.
        "rng": {"torch": _shared(torch.get_rng_state(), dist.get_rank())},
    }


def _shared(value: torch.Tensor, rank: int) -> ShardedObject:
    """An object that rank 0 saves and every rank loads."""
    return ShardedObject("rng/torch", value, (1,), (0,), replica_id=rank)


class _AllOrNone:
    """If a file operation fails on one rank, every rank raises the same CheckpointError: none waits for another."""

    def __init__(self, groups: Groups, what: str) -> None:
        self._groups, self._what = groups, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None and not isinstance(error, OSError | CheckpointException):
            return
        problems: list[str | None] = [None] * self._groups.info.world_size
        dist.all_gather_object(problems, _reason(error, self._groups.rank), group=self._groups.world)
        found = [problem for problem in problems if problem]
        if found:
            raise CheckpointError(f"{self._what}: {'; '.join(found)}") from error


def _reason(error: OSError | CheckpointException | None, rank: int) -> str | None:
    """One line, or None for a rank that knows of no problem of its own."""
    if isinstance(error, CheckpointException):  # raised on all ranks; the coordinator's names those that failed
        failures = [f"rank {r}: {str(e).strip().splitlines()[0]}" for r, (e, _) in sorted(error.failures.items())]
        return "; ".join(failures) or None
    return None if error is None else f"rank {rank}: {error}"


def as_attempt(state: RunState, base_steps: tuple[int, ...]) -> RunState:
    """``state`` as the start of the attempt that ``base_steps`` ends with."""
    return msgspec.structs.replace(state, base_steps=base_steps)
