"""Who am I, and which process groups exist.

``rank_from_environment`` reads torchrun's, Slurm's or Flux's variables; ``join_world`` starts torch.distributed.
Device and backend come from here and from nowhere else. All control traffic (plans, counts, packs) goes over gloo
groups, on GPUs too; only training collectives use nccl. The environment is read and set here and by ops and cli only.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

STORE_FILE = "TBA_STORE_FILE"  # set by ``tba launch``: ranks on one machine meet in a file, so no port can be taken


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """One rank of the trainer. ``launcher`` says which variables were read."""

    rank: int
    world_size: int
    local_rank: int
    launcher: str


def rank_from_environment(environment: Mapping[str, str] | None = None) -> RankInfo:
    """This process's rank: torchrun's variables first, then Slurm's, then Flux's; one rank where there are none."""
    environment = os.environ if environment is None else environment
    families = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    }
    for launcher, (rank, world_size, local_rank) in families.items():
        # sbatch gives its script SLURM_NTASKS, and SLURM_PROCID 0 too; only srun's tasks have the size of a step.
        if rank in environment and world_size in environment:
            return RankInfo(
                rank=int(environment[rank]),
                world_size=int(environment[world_size]),
                local_rank=int(environment.get(local_rank, "0")),
                launcher=launcher,
            )
    return RankInfo(rank=0, world_size=1, local_rank=0, launcher="local")


def device_and_backend(local_rank: int) -> tuple[torch.device, str]:
    """The device of this rank and the backend of its training collectives."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), "nccl"
    return torch.device("cpu"), "gloo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The process groups of the trainer. Rank order inside a replica is Megatron's (tp, then dp, then pp)."""

    info: RankInfo
    device: torch.device
    backend: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    world: dist.ProcessGroup  # gloo, all ranks
    replica: dist.ProcessGroup  # gloo, the tp x pp ranks of this data-parallel replica
    leaders: dist.ProcessGroup  # gloo, the DP leaders, by dp rank (a group of others on ranks that are none)
    replica_ranks: tuple[int, ...]
    leader_ranks: tuple[int, ...]  # global rank of each replica's DP leader

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def is_leader(self) -> bool:
        """The DP leader: tensor rank 0 of the last pipeline stage, where log-probs and rewards live."""
        return self.rank == self.leader_ranks[self.dp_rank]

    @property
    def is_stage_leader(self) -> bool:
        """Tensor rank 0 of a stage of replica 0: the ranks that send weights."""
        return self.tp_rank == 0 and self.dp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def join_world(info: RankInfo, backend: str, timeout_s: float) -> None:
    """Start torch.distributed once, by a file, in memory (one rank) or by MASTER_ADDR and MASTER_PORT."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore, HashStore

    if dist.is_initialized():
        return
    # "cpu:gloo,cuda:nccl" keeps object collectives of Megatron's checkpoints on the CPU.
    chosen = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
    common = {"rank": info.rank, "world_size": info.world_size, "timeout": timedelta(seconds=timeout_s)}
    if STORE_FILE in os.environ:
        store = FileStore(os.environ[STORE_FILE], info.world_size)
        dist.init_process_group(chosen, store=store, **common)
    elif info.world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(chosen, store=HashStore(), **common)
    else:
        dist.init_process_group(chosen, init_method="env://", **common)


def prepare_trainer_environment(threads: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Variables that must be set before torch is imported in a trainer rank."""
    target = os.environ if environment is None else environment
    target.setdefault("OMP_NUM_THREADS", str(threads))
    # Megatron's tensor-parallel overlap asks for it; harmless elsewhere.
    target.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def prepare_searcher_environment(threads: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Variables that must be set before vLLM is imported in a searcher.

    The engine runs in this process (weights are applied between two of its steps), never asks a hub, and never
    reports usage. On CPU, OpenMP threads are not bound to cores, since several engines may share them.
    """
    target = os.environ if environment is None else environment
    target["OMP_NUM_THREADS"] = str(threads)
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "120",  # a worker whose step takes longer hangs
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",  # then SIGTERM: a worker has nothing to save
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        # The engine runs eagerly; the few helpers that vLLM compiles all the same (log-probs, for one) would ask for
        # a C++ compiler on this machine, and fail without.
        "TORCH_COMPILE_DISABLE": "1",
    }
    for name, value in defaults.items():
        target.setdefault(name, value)
    # vLLM takes a Slurm or PMI step for an MPI launch of its own.
    for name in [n for n in target if n.startswith(("SLURM_", "PMI_", "PMIX_"))]:
        del target[name]


def prepare_weight_groups(environment: MutableMapping[str, str] | None = None) -> None:
    """Variables that must be set before a group for weights is formed, and after all other groups of this process.

    torch reads it when a group is made: one that waits itself has no watchdog thread, which would end this process when
    a searcher is lost.
    """
    target = os.environ if environment is None else environment
    target["TORCH_NCCL_BLOCKING_WAIT"] = "1"


def run_environment() -> Mapping[str, str]:
    """The environment of this process, for the roles that start others."""
    return dict(os.environ)


def die_with_parent() -> bool:
    """This process is killed when its parent ends, however that ends; whether the kernel can be told so (Linux).

    For processes without anything to save. The parent is the thread that started this process.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
