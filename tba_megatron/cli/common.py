"""What the roles share at their start."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tba_megatron.config import Config
from tba_megatron.dist import Groups, prepare_trainer_environment


def start_logging() -> None:
    """One plain line a record on stderr; the chatter of libraries at their start is left out."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S", force=True)
    for noisy in ("megatron", "transformers", "vllm", "torch", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    warnings.simplefilter("ignore")


@contextmanager
def trainer_groups(config: Config) -> Iterator[Groups]:
    """The trainer's process groups around a role: patches first, then torch, then the world."""
    trainer = config.trainer
    prepare_trainer_environment(trainer.threads)
    import megatron_patches

    megatron_patches.apply()
    import torch

    torch.set_num_threads(trainer.threads)
    from tba_megatron.trainer.parallel import close_process_groups, open_process_groups

    groups = open_process_groups(
        tensor_parallel=trainer.tensor_parallel,
        pipeline_parallel=trainer.pipeline_parallel,
        data_parallel=trainer.data_parallel,
        seed=config.run.seed,
        timeout_s=trainer.distributed_timeout_s,
        virtual_pipeline=trainer.virtual_pipeline,
    )
    yield groups
    # Only after success: a rank that failed must not wait here for peers that still work.
    close_process_groups()
