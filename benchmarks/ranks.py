"""What the benchmarks of the trainer share: forked ranks, and the policy of a made-up model on each of them.

Imports are paid once, by the parent. It joins no process group and starts no thread of torch's, so a fork is safe.
"""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_megatron.config_sections import TrainerConfig
from tba_megatron.dist import STORE_FILE, Groups, prepare_trainer_environment

if TYPE_CHECKING:
    from tba_megatron.models.architecture import Architecture, ModelShape
    from tba_megatron.trainer.head import HeadSettings
    from tba_megatron.trainer.model import Policy


def prepare() -> None:
    """Patches first, then everything that a rank imports; one thread a process."""
    warnings.simplefilter("ignore")
    prepare_trainer_environment(threads=1)
    import megatron_patches

    megatron_patches.apply()
    import torch

    torch.set_num_threads(1)
    import tba_megatron.trainer.load_hf
    import tba_megatron.trainer.step  # noqa: F401


def run_ranks(function: Callable[..., Any], trainer: TrainerConfig, *args: Any, limit_s: float = 600.0) -> list[Any]:
    """``function(groups, trainer, *args)`` on all ranks of ``trainer``; what each returned, by rank.

    RuntimeError when they have not ended within ``limit_s``; the traceback of a rank that failed is raised as torch's
    ProcessRaisedException. No rank is left running.
    """
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), time.monotonic() + limit_s
        context = start_processes(
            _rank, (function, trainer, args, folder), trainer.world_size, join=False, start_method="fork"
        )
        assert context is not None
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{trainer.world_size} ranks did not end within {limit_s} s")
        finally:
            processes: list[Any] = context.processes
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [pickle.loads((folder / f"out{rank}").read_bytes()) for rank in range(trainer.world_size)]


def _rank(rank: int, function: Callable[..., Any], trainer: TrainerConfig, args: tuple, folder: Path) -> None:
    from tba_megatron.trainer.parallel import close_process_groups, open_process_groups

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(trainer.world_size), LOCAL_RANK=str(rank))
    os.environ[STORE_FILE] = str(folder / "store")
    groups = open_process_groups(
        tensor_parallel=trainer.tensor_parallel,
        pipeline_parallel=trainer.pipeline_parallel,
        data_parallel=trainer.data_parallel,
        virtual_pipeline=trainer.virtual_pipeline,
        seed=0,
        timeout_s=300.0,
    )
    (folder / f"out{rank}").write_bytes(pickle.dumps(function(groups, trainer, *args)))
    close_process_groups()


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The policy of one rank, with weights that are the same for every layout."""

    architecture: Architecture
    shape: ModelShape
    head: HeadSettings
    policy: Policy

    @property
    def n_parameters(self) -> int:
        """Of the whole model, those that are tied counted once."""
        return sum(math.prod(size) for size in self.architecture.tensor_shapes(self.shape).values())


def build_model(groups: Groups, trainer: TrainerConfig, hf_config: Mapping[str, Any]) -> Model:
    """The model of a config.json, as ``tba_megatron/trainer/build.py`` builds it from a folder."""
    from tba_megatron.models.registry import ARCHITECTURES
    from tba_megatron.trainer.head import HeadSettings
    from tba_megatron.trainer.load_hf import load_random
    from tba_megatron.trainer.model import build_chunks, build_policy

    architecture = ARCHITECTURES[hf_config["architectures"][0]]
    shape = architecture.read(hf_config)
    chunks = build_chunks(shape, trainer, groups)
    load_random(chunks, architecture, shape, 0, groups)
    return Model(
        architecture=architecture,
        shape=shape,
        head=HeadSettings(temperature=1.0, vocab_size=shape.vocab_size),
        policy=build_policy(chunks, trainer, trainer.optimizer, trainer.steps),
    )


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} CPU cores"
