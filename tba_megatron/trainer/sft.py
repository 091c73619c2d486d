"""The warm start: supervised steps on demonstrations, in the same model, optimizer and packed path as the main job."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tba_megatron.config import Config
from tba_megatron.dist import Groups
from tba_megatron.errors import TbaError
from tba_megatron.loss.supervised import SupervisedLoss
from tba_megatron.metrics import MetricLog
from tba_megatron.models.registry import read_model
from tba_megatron.packing import pack_demonstrations
from tba_megatron.trainer.model import build_chunks, build_policy, to_device
from tba_megatron.trainer.step import HeadSettings, update
from tba_megatron.trainer.weights_io import export_hf, load_hf, load_random
from tba_megatron.types import TokenIds

Demonstration = tuple[TokenIds, TokenIds]  # prompt, completion


def warm_start(
    config: Config,
    demonstrations: Callable[[np.random.Generator], Demonstration],
    groups: Groups,
    log: MetricLog | None,
) -> None:
    """``sft.steps`` steps from ``model.path``; the result is a Hugging Face folder, ``config.start_model``.

    Every rank draws the same demonstrations and trains its replica's share. ``log`` is given on rank 0.
    """
    sft, trainer = config.sft, config.trainer
    architecture, shape = read_model(config.model.path)
    chunks = build_chunks(shape, trainer, groups)
    if config.model.init == "pretrained":
        load_hf(chunks, architecture, shape, config.model.path, groups)
    else:
        load_random(chunks, architecture, shape, config.run.seed, groups)
    policy = build_policy(chunks, trainer, sft.optimizer, sft.steps)
    head = HeadSettings(temperature=1.0, vocab_size=shape.vocab_size)
    multiple_of = groups.tp_size if trainer.sequence_parallel else 1
    skipped = 0
    for step in range(1, sft.steps + 1):
        started = time.monotonic()
        rng = np.random.default_rng([config.run.seed, step])
        batch = [demonstrations(rng) for _ in range(sft.batch_size)]
        tokens = sum(len(completion) for _, completion in batch)
        mine = batch[groups.dp_rank :: groups.dp_size]
        packs = pack_demonstrations(mine, trainer.microbatch_tokens, multiple_of)
        batches = [to_device(pack.microbatch, groups.device) for pack in packs]
        done = update(policy, batches, SupervisedLoss(), float(tokens), head, groups)
        skipped += done.skipped
        if log is not None:
            log.log(
                step,
                {
                    "sft/nll": done.statistics["nll"],
                    "sft/learning_rate": done.learning_rate,
                    "sft/grad_norm": done.grad_norm,
                    "time/step_s": time.monotonic() - started,
                },
            )
    if skipped == sft.steps:
        raise TbaError(f"sft: all {skipped} steps had a non-finite gradient; lower sft.optimizer.learning_rate")
    export_hf(
        chunks,
        architecture,
        shape,
        groups,
        folder=config.start_model,
        template=config.model.path,
        dtype=trainer.dtype,
    )
