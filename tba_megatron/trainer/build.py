"""What every way of training builds from a configuration: the model, its reference, the run's attempts, the export."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel

from tba_megatron.config import Config
from tba_megatron.config_objective import TbLearnedZ
from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError, ModelError
from tba_megatron.loss.base import LossAt, ReferenceNeed
from tba_megatron.loss.registry import make_loss
from tba_megatron.metrics import MetricLog, open_metric_log
from tba_megatron.models.architecture import Architecture, ModelShape, check_length
from tba_megatron.models.registry import read_model
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.export_hf import export_hf
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.load_hf import load_hf, read_headers
from tba_megatron.trainer.log_z import LogZ
from tba_megatron.trainer.model import Policy, build_chunks, build_policy
from tba_megatron.trainer.reference import Reference
from tba_megatron.trainer.reference_files import FOLDER as REFERENCE
from tba_megatron.trainer.reference_files import ReferenceFiles
from tba_megatron.trainer.reference_weights import OnDevice, OnHost
from tba_megatron.trainer.run_state import ATTEMPTS, read_attempts


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is built from the start model: the policy that learns, and the reference that does not, where the loss reads
    one and no searcher holds it."""

    architecture: Architecture
    shape: ModelShape
    head: HeadSettings
    policy: Policy
    loss_at: LossAt
    reference: Reference | None


def build_model(config: Config, groups: Groups) -> Model:
    trainer, folder = config.trainer, config.start_model
    architecture, shape = read_model_together(config, folder, groups)
    head = HeadSettings(temperature=config.objective.temperature, vocab_size=shape.vocab_size, entropy=True)
    chunks = build_chunks(shape, trainer, groups)
    load_hf(chunks, architecture, shape, folder, groups)
    policy = build_policy(chunks, trainer, trainer.optimizer, trainer.steps)
    loss_at = partial(make_loss, config.objective, config.search.max_new_tokens)
    model = Model(
        architecture=architecture,
        shape=shape,
        head=head,
        policy=replace(policy, log_z=_log_z(config, shape, groups)),
        loss_at=loss_at,
        reference=None,
    )
    if loss_at(1).needs.reference is ReferenceNeed.NONE or config.objective.reference.placement == "searcher":
        return model
    return replace(model, reference=_build_reference(config, model, groups))


def _build_reference(config: Config, model: Model, groups: Groups) -> Reference:
    """``model.policy`` is the start model yet."""
    settings, policy = config.objective.reference, model.policy.chunks
    if settings.placement == "host":
        weights = OnHost(policy)
    else:
        chunks = build_chunks(model.shape, config.trainer, groups)
        load_hf(chunks, model.architecture, model.shape, config.start_model, groups)
        weights = OnDevice(chunks)
    files = ReferenceFiles(
        folder=config.run.folder / REFERENCE,
        template=config.start_model,
        dtype=config.trainer.dtype,
        architecture=model.architecture,
        shape=model.shape,
        groups=groups,
    )
    return Reference(weights, policy, files, model.head, groups, reset_every_steps=settings.reset_every_steps)


def _log_z(config: Config, shape: ModelShape, groups: Groups) -> LogZ | None:
    """What an objective learns beside the policy, None for those that learn nothing."""
    loss = config.objective.loss
    return LogZ(shape.hidden_size, loss.log_z_learning_rate, groups.device) if isinstance(loss, TbLearnedZ) else None


def read_model_together(config: Config, folder: Path, groups: Groups) -> tuple[Architecture, ModelShape]:
    """``read_model`` on every rank, or its error on every rank; a collective over the world.

    Rank 0 holds the headers of the weights, where there are any, against config.json: a wrong size must not first
    build a model that fills the memory.
    """
    with AllOrNone("", groups.world, raised=ModelError):
        architecture, shape = read_model(folder)
        check_length(shape, config.model.max_length)
        if groups.rank == 0 and (folder != config.model.path or config.model.init == "pretrained"):
            read_headers(folder, architecture, shape)
        return architecture, shape


def begin_attempt(folder: Path, base_step: int, restored: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Note in the run folder that an attempt begins at ``base_step``; the base steps of all attempts.

    ``restored``: those that the checkpoint knows, which count where the file is missing.
    """
    path = folder / ATTEMPTS
    before = read_attempts(folder, restored)
    attempts = (*before, base_step)
    partial = path.with_name(f".{ATTEMPTS}.partial")
    partial.write_text(json.dumps(attempts) + "\n")
    partial.rename(path)
    return attempts


def open_run_log(config: Config, step: int) -> MetricLog:
    """The logs of a run that goes on after ``step``; for rank 0."""
    return open_metric_log(
        config.metrics,
        config.run.folder,
        first_step=step + 1 if step else 0,
        total_steps=config.trainer.steps,
        stream=sys.stdout,
    )


def export_policy(config: Config, chunks: Sequence[GPTModel], groups: Groups, folder: Path) -> None:
    """Write the policy as a Hugging Face folder."""
    architecture, shape = read_model_together(config, config.start_model, groups)
    export_hf(
        chunks,
        architecture,
        shape,
        groups,
        folder=folder,
        template=config.start_model,
        dtype=config.trainer.dtype,
    )


def export_newest(config: Config, groups: Groups, folder: Path) -> int:
    """Write the newest checkpoint as a Hugging Face folder; its step. A collective over all ranks."""
    found = checkpoint.checkpoints(config.run.folder / "checkpoints")
    if not found:
        raise CheckpointError(f"{config.run.folder / 'checkpoints'} holds no checkpoint; train first")
    step, path = found[-1]
    _, shape = read_model_together(config, config.start_model, groups)
    chunks = build_chunks(shape, config.trainer, groups)
    checkpoint.load_weights(path, chunks)
    export_policy(config, chunks, groups, folder)
    return step
