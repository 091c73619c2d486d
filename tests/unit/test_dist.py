"""Who a process is depends on the variables of its launcher and on nothing else."""

from __future__ import annotations

import pytest

from tba_megatron.dist import (
    RankInfo,
    prepare_searcher_environment,
    prepare_trainer_environment,
    rank_from_environment,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "2"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}
ALONE = RankInfo(rank=0, world_size=1, local_rank=0, launcher="local")


def info(launcher: str, rank: int, world_size: int, local_rank: int) -> RankInfo:
    return RankInfo(rank=rank, world_size=world_size, local_rank=local_rank, launcher=launcher)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, info("torchrun", 3, 8, 1)),
        (SLURM, info("slurm", 5, 6, 2)),
        (FLUX, info("flux", 1, 2, 0)),
        (TORCHRUN | SLURM, info("torchrun", 3, 8, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, info("slurm", 0, 1, 0)),
    ],
    ids=["none", "torchrun", "slurm", "flux", "torchrun inside slurm", "slurm without a local id"],
)
def test_rank_by_launcher(environment, expected):
    assert rank_from_environment(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},
        # sbatch gives its script the variables of a first task, without a step of srun.
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"},
    ],
    ids=["salloc", "sbatch"],
)
def test_a_batch_shell_is_one_rank(environment):
    assert rank_from_environment(environment) == ALONE


def test_the_own_environment_is_the_default(monkeypatch):
    for name in (*TORCHRUN, *SLURM, *FLUX):
        monkeypatch.delenv(name, raising=False)
    assert rank_from_environment() == ALONE
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert rank_from_environment() == info("torchrun", 3, 8, 1)


def test_the_trainers_environment_keeps_what_a_user_has_set():
    environment = {"OMP_NUM_THREADS": "7", "OTHER": "x"}
    prepare_trainer_environment(2, environment)
    assert environment == {"OMP_NUM_THREADS": "7", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OTHER": "x"}
    fresh: dict[str, str] = {}
    prepare_trainer_environment(2, fresh)
    assert fresh["OMP_NUM_THREADS"] == "2"


def test_a_searcher_is_alone_offline_and_no_task_of_a_step():
    environment = {**SLURM, "PMI_RANK": "1", "PMIX_RANK": "1", "HF_HUB_OFFLINE": "0", "HOME": "/home/x"}
    prepare_searcher_environment(3, environment)
    assert not [name for name in environment if name.startswith(("SLURM_", "PMI_", "PMIX_"))]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "0"  # a user's own choice
    assert environment["HOME"] == "/home/x"
