"""Training on the recording of another run: the training half alone, without searchers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tba_megatron.config import Config
from tba_megatron.config_sections import RecordedData
from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError, TbaError
from tba_megatron.metrics import MetricLog
from tba_megatron.models.architecture import ModelShape
from tba_megatron.packing import Pack, pack
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.build import build_model, export_policy, open_run_log
from tba_megatron.trainer.checkpoint_writer import CheckpointWriter
from tba_megatron.trainer.exchange import assign_replicas, share_packs
from tba_megatron.trainer.offline import OfflineLoop, Saving, StepData, restore
from tba_megatron.trainer.recording import Recording
from tba_megatron.trainer.result import RunResult, write_result
from tba_megatron.trainer.step import Update
from tba_megatron.trainer.step_metrics import update_histograms, update_metrics
from tba_megatron.types import TrainGroup


def train_on_recording(config: Config, data: RecordedData, groups: Groups) -> int:
    """Run this rank until ``trainer.steps`` are made or a signal stops it; the exit code."""
    with AllOrNone("", groups.world):
        recording = _open(config, data.folder) if groups.is_leader else None
    model = build_model(config, groups)
    folder = config.run.folder
    state = restore(folder / "checkpoints", model.policy, groups)
    if model.reference is not None:
        model.reference.restore(state.step)
    log = open_run_log(config, state.step) if groups.rank == 0 else None
    trainer = config.trainer
    loop = OfflineLoop(
        groups=groups,
        policy=model.policy,
        reference=model.reference,
        loss_at=model.loss_at,
        head=model.head,
        source=_Recorded(config, model.shape, recording, groups, log, state.skipped_steps),
        saving=Saving(
            writer=CheckpointWriter(folder / "checkpoints", groups, trainer.keep_checkpoints),
            every_steps=trainer.save_every_steps,
            at_end=True,
            beside=trainer.async_save,
        ),
        state=state,
    )
    stopped_by = loop.run(trainer.steps)
    if log is not None:
        log.close()
    if trainer.steps and loop.state.skipped_steps == trainer.steps:
        raise TbaError(f"all {trainer.steps} steps had a non-finite gradient; lower trainer.optimizer.learning_rate")
    complete = loop.state.step >= trainer.steps
    if complete:
        export_policy(config, model.policy.chunks, groups, folder / "hf")
    if groups.rank == 0:
        result = RunResult(
            complete=complete,
            stopped_by_signal=stopped_by,
            steps=loop.state.step,
            skipped_steps=loop.state.skipped_steps,
        )
        write_result(folder, result)
    return 128 + stopped_by if stopped_by else 0


def _open(config: Config, folder: Path) -> Recording:
    recording = Recording(folder)
    if recording.n_steps < config.trainer.steps:
        raise CheckpointError(
            f"trainer.steps: {config.trainer.steps} is more than the {recording.n_steps} whole steps of {folder} (what "
            f"follows is missing or damaged); lower it, or copy the recording again"
        )
    return recording


class _Recorded:
    """A recording as the source of an offline loop. ``recording`` is given on DP leaders, ``log`` on rank 0."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        recording: Recording | None,
        groups: Groups,
        log: MetricLog | None,
        skipped: int,
    ) -> None:
        self._vocab_size, self._max_length = shape.vocab_size, config.model.max_length
        self._needs_behaviour = config.objective.needs_behaviour
        self._trainer, self._recording, self._groups, self._log = config.trainer, recording, groups, log
        self._multiple_of = groups.tp_size if config.trainer.sequence_parallel else 1
        self._skipped = skipped

    def data(self, step: int) -> StepData:
        trainer, packs = self._trainer, None
        with AllOrNone("", self._groups.world):
            if self._recording is not None:
                packs = self._packs(self._recording, step)
        normaliser = float(trainer.prompts_per_step * trainer.rollouts_per_prompt)
        return StepData(packs=share_packs(packs, self._groups), normaliser=normaliser)

    def _packs(self, recording: Recording, step: int) -> list[Pack]:
        """This replica's share of what the recorded step was trained on."""
        recorded = recording.groups(step)
        for group in recorded:
            self._check(group, step)
        if len(recorded) != self._trainer.prompts_per_step:
            raise CheckpointError(
                f"step {step} of the recording has {len(recorded)} prompts; set trainer.prompts_per_step (now "
                f"{self._trainer.prompts_per_step}) to that"
            )
        replicas = assign_replicas([group.n_tokens for group in recorded], self._groups.dp_size)
        mine = [group for group, to in zip(recorded, replicas, strict=True) if to == self._groups.dp_rank]
        return pack(mine, self._trainer.microbatch_tokens, self._multiple_of)

    def _check(self, group: TrainGroup, step: int) -> None:
        """CheckpointError for a group that this run's sizes or this model cannot train on."""
        what, trainer = f"step {step} of the recording: prompt {group.prompt_id}", self._trainer
        if sum(group.copies) != trainer.rollouts_per_prompt:
            raise CheckpointError(
                f"{what} has {sum(group.copies)} rollouts; set trainer.rollouts_per_prompt (now "
                f"{trainer.rollouts_per_prompt}) to that"
            )
        for rollout in group.rollouts:
            if self._needs_behaviour and rollout.behaviour_logprobs is None:
                raise CheckpointError(
                    f"{what} has a completion without the log-probs of who wrote it, which the objective reads; record "
                    f"with search.behaviour_logprobs, or train with another objective.loss"
                )
            tokens = np.concatenate([group.prompt_token_ids, rollout.token_ids])
            outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if len(outside):
                raise CheckpointError(
                    f"{what} has token id {outside[0]}, but the model has {self._vocab_size}; was it recorded with "
                    f"another model?"
                )
            if len(tokens) > self._max_length or not len(group.prompt_token_ids):
                raise CheckpointError(
                    f"{what} has {len(group.prompt_token_ids)} tokens, {len(tokens)} with a completion; a prompt needs "
                    f"at least one, and model.max_length is {self._max_length}"
                )

    def done(self, step: int, update: Update, seconds: float) -> None:
        self._skipped += update.skipped
        if self._log is not None:
            self._log.log(step, {**update_metrics(update, self._skipped), "time/step_s": seconds})
            self._log.histograms(step, update_histograms(update))
