"""Saving beside training: ``begin`` copies at a step boundary, a thread writes, ``finish`` makes the checkpoint count.

Both halves are collectives of the main thread; the thread of a rank writes that rank's files and talks to nobody. It
is a thread and not Megatron's forked process (AsyncCallsQueue, 0.16.1) because a trainer rank holds threads, sockets
and gloo groups, which a fork breaks. Planning and the format are Megatron's (torch_dist), the files are written by
torch's FileSystemWriter.

Memory: until the thread is done, a rank keeps one more copy, in host memory, of what it writes: on replica 0 its part
of the weights, masters and both Adam moments (16 bytes a parameter in float32, 14 in bfloat16), on other replicas
nothing but their shard. While the optimizer's state is gathered in ``begin`` it is up to 2.3 times that (one rank, a
checkpoint of 448 MB: 1010 MB more for a moment, then 415 MB).

Used with gloo on CPU, where the thread leaves the interpreter to training for at least half of the time. nccl has not
been run: it takes the same path, with tensors copied to pinned memory and a synchronisation before ``begin`` returns.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from tba_megatron.buffer.stored_shard import StoredShard
from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.checkpoint_folder import complete, final_path, make_partial, partial_path, sync
from tba_megatron.trainer.checkpoint_state import GATHERED, LOG_Z, policy_to_save
from tba_megatron.trainer.model import Policy
from tba_megatron.trainer.run_state import RunState

_POLL_S = 1.0  # between two questions whether all ranks have written

Content = bytes | memoryview | Mapping[str, np.ndarray]  # of one file: as it is, or arrays for ``np.savez``


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flight:
    """A save between its two halves."""

    step: int
    storage: FileSystemWriter
    metadata: Metadata | None  # on rank 0: of the plans of all ranks
    written: Future[list[WriteResult]]


class CheckpointWriter:
    """Writes the checkpoints of a run into ``folder`` and keeps the newest ``keep``; one save at a time.

    All methods but ``done`` and ``in_flight`` are collectives over all ranks. CheckpointError on every rank when any
    rank could not do its part: the half-written folder is removed, and what was there before stays loadable.
    """

    def __init__(self, folder: Path, groups: Groups, keep: int) -> None:
        self.folder, self._groups, self._keep = folder, groups, keep
        self._flight: _Flight | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun that is not finished; the same on every rank."""
        return self._flight is not None

    @property
    def done(self) -> bool:
        """Whether this rank's thread has nothing left to write. ``finish`` waits for no thread when all ranks' are."""
        return self._flight is None or self._flight.written.done()

    def save(self, policy: Policy, shard: StoredShard | None, state: RunState) -> Path:
        """``begin`` and ``finish`` in one; the path of the checkpoint."""
        self.begin(policy, shard, state)
        path = self.finish()
        assert path is not None
        return path

    def begin(self, policy: Policy, shard: StoredShard | None, state: RunState) -> None:
        """Copy everything at this step boundary and start writing; ``shard`` is given on DP leaders.

        A save that is still in flight is finished first; if it fails, this one does not begin.
        """
        self.finish()
        try:
            self._begin(policy, shard, state)
        except CheckpointError:
            self._clean(state.step)
            raise

    def _begin(self, policy: Policy, shard: StoredShard | None, state: RunState) -> None:
        groups, partial = self._groups, partial_path(self.folder, state.step)
        with self._all_or_none(state.step):
            if groups.rank == 0:
                (make_partial(self.folder, state.step) / "model").mkdir()
        with self._all_or_none(state.step):
            sharded, common = save_preprocess(policy_to_save(policy))
            planner, plan = _plan_copies(sharded)
            del sharded
            files: dict[Path, Content] = {}
            if shard is not None:
                files[partial / f"shard-{groups.dp_rank}.npz"] = shard.state_columns()
            if groups.rank == 0:
                files[partial / "model" / "common.pt"] = _saved(common)
                files[partial / "run.json"] = msgspec.json.encode(state)
                if policy.log_z is not None:
                    files[partial / LOG_Z] = policy.log_z.state()
        storage = FileSystemWriter(partial / "model", per_thread_copy_ahead=0)
        plans: list[Any] = [None] * groups.info.world_size
        dist.gather_object(plan, plans if groups.rank == 0 else None, dst=0, group=groups.world)
        with self._all_or_none(state.step):
            metadata = planner.create_global_plan(plans)[1] if groups.rank == 0 else None
            plan = storage.prepare_global_plan([SavePlan([])] * groups.rank + [plan])[-1]  # files are named by rank
        thread = ThreadPoolExecutor(1, "save-checkpoint")
        self._flight = _Flight(
            step=state.step,
            storage=storage,
            metadata=metadata,
            written=thread.submit(_write, storage, plan, planner, files, shard),
        )
        thread.shutdown(wait=False)  # it ends when it has written

    def finish(self) -> Path | None:
        """Wait until every rank has written, then let the checkpoint count and the oldest leave; its path.

        None when no save was in flight.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        try:
            self._finish(flight)
        except CheckpointError:
            self._clean(flight.step)
            raise
        return final_path(self.folder, flight.step)

    def _finish(self, flight: _Flight) -> None:
        groups, model = self._groups, partial_path(self.folder, flight.step) / "model"
        self._wait_for_threads(flight)
        with self._all_or_none(flight.step):
            results = flight.written.result()
        everyone: list[Any] = [None] * groups.info.world_size
        dist.gather_object(results, everyone if groups.rank == 0 else None, dst=0, group=groups.world)
        with self._all_or_none(flight.step):
            if flight.metadata is not None:
                flight.storage.finish(flight.metadata, everyone)
                save_config(CheckpointingConfig("torch_dist", 1), str(model))
                for path in (model / "metadata.json", model, model.parent):
                    sync(path)
                complete(self.folder, flight.step, self._keep)

    def _wait_for_threads(self, flight: _Flight) -> None:
        """In short collectives: one that waited for the slowest disk would run into the group's timeout."""
        done = [False] * self._groups.info.world_size
        while not all(done):
            wait([flight.written], timeout=_POLL_S)
            dist.all_gather_object(done, flight.written.done(), group=self._groups.world)

    def _all_or_none(self, step: int) -> AllOrNone:
        return AllOrNone(f"cannot save step {step} in {self.folder}", self._groups.world)

    def _clean(self, step: int) -> None:
        """Every rank has stopped writing: what is there may hold the space that the disk lacks."""
        if self._groups.rank == 0:
            shutil.rmtree(partial_path(self.folder, step), ignore_errors=True)


def _plan_copies(sharded: Any) -> tuple[MCoreSavePlanner, SavePlan]:
    """What this rank writes, copied out of the reach of training, and the plan of it."""
    mine: dict[str, list[ShardedBase]] = defaultdict(list)
    for part in nested_values(sharded):
        if is_main_replica(part.replica_id):
            mine[part.unique_key if isinstance(part, ShardedObject) else part.key].append(part)
    for part in (part for parts in mine.values() for part in parts):
        # An object is serialised below, and what was gathered is nobody else's.
        if isinstance(part, ShardedTensor) and part.data is not None and not part.key.startswith(GATHERED):
            part.data = _private_copy(part.data)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(dict(mine)), is_coordinator=dist.get_rank() == 0)
    return planner, planner.create_local_plan()


def _private_copy(tensor: Tensor) -> Tensor:
    """``Tensor.cpu`` would hand out the living tensor itself where there is no GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _saved(value: Any) -> memoryview:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def _write(
    storage: FileSystemWriter,
    plan: SavePlan,
    planner: MCoreSavePlanner,
    files: Mapping[Path, Content],
    shard: StoredShard | None,
) -> list[WriteResult]:
    """In the thread: this rank's files, and the log that they refer to, safe on the disk."""
    if shard is not None:
        shard.sync()
    results = storage.write_data(plan, planner).wait()
    for path, content in files.items():
        with path.open("wb") as file:
            if isinstance(content, Mapping):
                np.savez(file, **content)  # type: ignore[arg-type]
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return results
