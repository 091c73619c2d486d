"""Checkpoints of the whole run: model, optimizer, schedule and RNG by Megatron, shards and the run's state beside them.

``checkpoints/step-00000123/`` appears under its name only when it is complete, so the newest name is the newest
checkpoint. It loads at any tensor, pipeline and data-parallel sizes; shards are dealt anew when their number differs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from tba_megatron.buffer.shard_state import Columns
from tba_megatron.buffer.stored_shard import Generation, StoredShard
from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.checkpoint_folder import checkpoints
from tba_megatron.trainer.checkpoint_state import LOG_Z, load_into, load_model, model_to_load, policy_to_load
from tba_megatron.trainer.checkpoint_writer import CheckpointWriter
from tba_megatron.trainer.exchange import from_rank_0
from tba_megatron.trainer.model import Policy
from tba_megatron.trainer.run_state import RunState, read_run_state, read_shard, reading

__all__ = ["CheckpointWriter", "RunState", "as_attempt", "checkpoints", "load", "load_policy", "read_state", "save"]


def save(
    folder: Path, policy: Policy, shard: StoredShard | None, state: RunState, groups: Groups, *, keep: int
) -> Path:
    """Write one checkpoint while everybody waits; a collective over all ranks. ``shard`` is given on DP leaders.

    CheckpointError on every rank when any rank could not write; what was there before stays loadable.
    """
    return CheckpointWriter(folder, groups, keep).save(policy, shard, state)


def read_state(path: Path) -> RunState:
    """The run's state in the checkpoint ``path``; CheckpointError when it cannot be read."""
    try:
        return read_run_state(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_advice(path)}") from None


def load(
    path: Path, policy: Policy, shard: StoredShard | None, groups: Groups, logs: Sequence[Generation] = ()
) -> RunState:
    """Restore everything on every rank from ``path``, and what ``logs`` have beyond it; a collective over all ranks.

    CheckpointError, the same on every rank, names what is damaged and what to do.
    """
    with AllOrNone(f"cannot load {path}", groups.world, advice=_advice(path)):
        state = read_run_state(path)
    load_policy(path, policy)
    with AllOrNone(f"cannot load {path}", groups.world, advice=_advice(path)):
        parts = _shard_parts(path, state.data_parallel, groups) if shard is not None else {}
    with AllOrNone(f"cannot load {path}", groups.world):  # what fails here is a log, mostly
        if shard is not None:
            shard.restore(parts, logs)
    return state


def load_newest(
    folder: Path, policy: Policy, shard: StoredShard | None, groups: Groups, logs: Sequence[Generation] = ()
) -> tuple[RunState, Path | None]:
    """The newest checkpoint of ``folder``, restored on every rank, and its path; a collective over all ranks.

    Where there is none, the state of a run that has made no attempt yet, and None; the shards have what ``logs`` have.
    """
    found = checkpoints(folder) if groups.rank == 0 else []
    path = from_rank_0(str(found[-1][1]) if found else "", groups)
    if path:
        return load(Path(path), policy, shard, groups, logs), Path(path)
    with AllOrNone(f"cannot begin in {folder.parent}", groups.world):
        if shard is not None:
            shard.restore({}, logs)
    state = RunState(
        step=0,
        base_steps=(),
        data_parallel=groups.dp_size,
        next_position=0,
        unfinished_prompts=[],
        generated={},
    )
    return state, None


def load_policy(path: Path, policy: Policy) -> None:
    """Restore model, optimizer, schedule, RNG and a learned log Z alone; a collective over all ranks."""
    model = path / "model"
    # What a rank can find out alone comes first: in the midst of Megatron's collectives its peers would wait for it.
    with AllOrNone(f"cannot load {path}", advice=_advice(path)):
        metadata = _check_model(model)
        _load_log_z(path / LOG_Z, policy)
    with AllOrNone(f"cannot load {path}", advice=_advice(path)):
        wanted = policy_to_load(policy, metadata.state_dict_metadata)
        loaded: Any = dist_checkpointing.load(wanted, str(model))
        load_into(policy, loaded)


def load_weights(path: Path, chunks: Sequence[GPTModel]) -> None:
    """Restore the model alone, without memory for an optimizer; a collective over all ranks."""
    model = path / "model"
    with AllOrNone(f"cannot load {path}", advice=_advice(path)):
        _check_model(model)
    with AllOrNone(f"cannot load {path}", advice=_advice(path)):
        loaded: Any = dist_checkpointing.load(model_to_load(chunks), str(model))
        load_model(chunks, loaded)


def as_attempt(state: RunState, base_steps: tuple[int, ...]) -> RunState:
    """``state`` as the start of the attempt that ``base_steps`` ends with."""
    return msgspec.structs.replace(state, base_steps=base_steps)


def _advice(path: Path) -> str:
    return f"; remove {path} to resume earlier"


def _check_model(model: Path) -> Metadata:
    """What Megatron's part consists of, when all of it is there and of the size that it should have."""
    with reading(model / "metadata.json") as file:
        json.loads(file.read_bytes())
    with reading(model / "common.pt") as file:
        torch.load(file, map_location="cpu")
    with reading(model / ".metadata"):
        metadata = FileSystemReader(model).read_metadata()
    ends: dict[str, int] = {}
    for part in metadata.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        with reading(model / name) as file:
            if (size := file.stat().st_size) < end:
                raise ValueError(f"it has {size} of {end} bytes")
    return metadata


def _load_log_z(path: Path, policy: Policy) -> None:
    """The learned log Z, where the objective has one; CheckpointError where it has one and the checkpoint has not, or
    the other way round."""
    if policy.log_z is None:
        if path.exists():
            raise CheckpointError(
                f"{path} is a learned log Z, which objective.loss has no use for; a run with tb_learned_z goes on from "
                f"here, and another objective needs a run.folder of its own"
            )
        return
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing, which objective.loss tb_learned_z goes on from; if it was never written, because "
            f"another objective was trained here, choose another run.folder"
        )
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        policy.log_z.restore(arrays)


def _shard_parts(path: Path, n_saved: int, groups: Groups) -> dict[int, Columns]:
    """The columns of this leader's own shard, or of all shards where their number differs."""
    return {i: read_shard(path, i) for i in ([groups.dp_rank] if n_saved == groups.dp_size else range(n_saved))}
