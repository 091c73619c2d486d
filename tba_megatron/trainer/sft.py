"""The warm start: supervised steps on demonstrations, in the same model, optimizer and packed path as the main job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from tba_megatron.config import Config
from tba_megatron.dist import Groups
from tba_megatron.errors import TbaError
from tba_megatron.loss.supervised import SupervisedLoss
from tba_megatron.metrics import MetricLog
from tba_megatron.packing import pack_demonstrations
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.build import read_model_together
from tba_megatron.trainer.checkpoint_writer import CheckpointWriter
from tba_megatron.trainer.export_hf import export_hf
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.load_hf import load_hf, load_random
from tba_megatron.trainer.model import Policy, build_chunks, build_policy, to_device
from tba_megatron.trainer.offline import OfflineLoop, Saving, StepData, restore
from tba_megatron.trainer.step import Update, sequence_logprobs
from tba_megatron.types import TokenIds

Demonstration = tuple[TokenIds, TokenIds]  # prompt, completion


class Demonstrations(Protocol):
    """A batch for every step and a list that is never trained on, the same on every rank."""

    def batch(self, step: int) -> list[Demonstration]: ...

    def held_out(self, n: int) -> list[Demonstration]: ...


def first_step(config: Config) -> int:
    """The step that a warm start in this run folder will log first."""
    found = checkpoint.checkpoints(_folder(config))
    return found[-1][0] + 1 if found else 0


def _folder(config: Config) -> Path:
    return config.run.folder / "sft-checkpoints"


def warm_start(config: Config, demonstrations: Demonstrations, groups: Groups, log: MetricLog | None) -> int:
    """``sft.steps`` steps from ``model.path``; the result is a Hugging Face folder, ``config.start_model``.

    0, or the signal that stopped it: then a checkpoint is there and the next call goes on from it. Every rank draws
    the same demonstrations and trains its replica's share. ``log`` is given on rank 0.
    """
    sft, trainer = config.sft, config.trainer
    architecture, shape = read_model_together(config, config.model.path, groups)
    chunks = build_chunks(shape, trainer, groups)
    if config.model.init == "pretrained":
        load_hf(chunks, architecture, shape, config.model.path, groups)
    else:
        load_random(chunks, architecture, shape, config.run.seed, groups)
    policy = build_policy(chunks, trainer, sft.optimizer, sft.steps)
    head = HeadSettings(temperature=1.0, vocab_size=shape.vocab_size)
    state = restore(_folder(config), policy, groups)
    source = _Demonstrations(config, demonstrations, policy, head, groups, log)
    if state.step == 0:
        source.measure_held_out(0)
    loop = OfflineLoop(
        groups=groups,
        policy=policy,
        reference=None,
        loss_at=lambda _: SupervisedLoss(),
        head=head,
        source=source,
        saving=Saving(
            writer=CheckpointWriter(_folder(config), groups, trainer.keep_checkpoints),
            every_steps=sft.save_every_steps,
            at_end=False,
            beside=trainer.async_save,
        ),
        state=state,
    )
    stopped_by = loop.run(sft.steps)
    if stopped_by and loop.state.step < sft.steps:
        return stopped_by
    if loop.state.skipped_steps == sft.steps:
        raise TbaError(f"sft: all {sft.steps} steps had a non-finite gradient; lower sft.optimizer.learning_rate")
    export_hf(
        chunks,
        architecture,
        shape,
        groups,
        folder=config.start_model,
        template=config.model.path,
        dtype=trainer.dtype,
    )
    return stopped_by


class _Demonstrations:
    """Demonstrations as the source of an offline loop; prompts are masked, completions are trained."""

    def __init__(
        self,
        config: Config,
        demonstrations: Demonstrations,
        policy: Policy,
        head: HeadSettings,
        groups: Groups,
        log: MetricLog | None,
    ) -> None:
        self._sft, self._microbatch_tokens = config.sft, config.trainer.microbatch_tokens
        self._demonstrations, self._policy, self._head, self._groups, self._log = (
            demonstrations,
            policy,
            head,
            groups,
            log,
        )
        self._multiple_of = groups.tp_size if config.trainer.sequence_parallel else 1
        self._held_out = demonstrations.held_out(config.sft.held_out)

    def data(self, step: int) -> StepData:
        batch = self._demonstrations.batch(step)
        tokens = sum(len(completion) for _, completion in batch)
        mine = batch[self._groups.dp_rank :: self._groups.dp_size]
        packs = pack_demonstrations(mine, self._microbatch_tokens, self._multiple_of)
        return StepData(packs=packs, normaliser=float(tokens))

    def done(self, step: int, update: Update, seconds: float) -> None:
        if self._log is not None:
            self._log.log(
                step,
                {
                    "sft/nll": update.statistics["nll"],
                    "sft/learning_rate": update.learning_rate,
                    "sft/grad_norm": update.grad_norm,
                    "sft/skipped": float(update.skipped),
                    "time/step_s": seconds,
                },
            )
        if step % self._sft.held_out_every_steps == 0 or step == self._sft.steps:
            self.measure_held_out(step)

    def measure_held_out(self, step: int) -> None:
        """Log the mean negative log-likelihood of held-out completions, in nats a token; collective."""
        if not self._held_out:
            return
        nll = held_out_nll(self._policy, self._held_out, self._microbatch_tokens, self._head, self._groups)
        if self._log is not None:
            self._log.log(step, {"sft/held_out_nll": nll})


def held_out_nll(
    policy: Policy, held_out: Sequence[Demonstration], microbatch_tokens: int, head: HeadSettings, groups: Groups
) -> float:
    """Mean negative log-likelihood of the completions, in nats a token. Every replica takes its share; collective."""
    packs = pack_demonstrations(held_out[groups.dp_rank :: groups.dp_size], microbatch_tokens, groups.tp_size)
    batches = [to_device(pack.microbatch, groups.device) for pack in packs]
    sums = sequence_logprobs(policy.ddp, batches, head, groups) if batches else []
    total = torch.tensor(sum(float(sums_S.sum()) for sums_S in sums) if groups.is_leader else 0.0).double()
    dist.all_reduce(total, group=groups.world)
    return -float(total) / sum(len(completion) for _, completion in held_out)
