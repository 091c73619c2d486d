"""What every way of training builds from a configuration: the model, its reference, the run's attempts, the export."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tba_megatron.config import Config
from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.models.registry import read_model
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.model import Policy, build_chunks, build_policy
from tba_megatron.trainer.reference import Reference
from tba_megatron.trainer.step import HeadSettings
from tba_megatron.trainer.weights_io import export_hf, load_hf

ATTEMPTS = "attempts.json"  # the step at which each attempt began


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is built from the start model: the policy that learns and the reference that does not."""

    architecture: Architecture
    shape: ModelShape
    head: HeadSettings
    policy: Policy
    reference: Reference


def build_model(config: Config, groups: Groups) -> Model:
    trainer, folder = config.trainer, config.start_model
    architecture, shape = read_model(folder)
    head = HeadSettings(temperature=config.objective.temperature, vocab_size=shape.vocab_size)
    chunks = build_chunks(shape, trainer, groups)
    load_hf(chunks, architecture, shape, folder, groups)
    return Model(
        architecture=architecture,
        shape=shape,
        head=head,
        policy=build_policy(chunks, trainer, trainer.optimizer, trainer.steps),
        reference=Reference(architecture, shape, trainer, folder, head, groups),
    )


def begin_attempt(folder: Path, base_step: int) -> tuple[int, ...]:
    """Note in the run folder that an attempt begins at ``base_step``; the base steps of all attempts."""
    path = folder / ATTEMPTS
    before = json.loads(path.read_text()) if path.exists() else []
    attempts = (*before, base_step)
    partial = path.with_name(f".{ATTEMPTS}.partial")
    partial.write_text(json.dumps(attempts) + "\n")
    partial.rename(path)
    return attempts


def export_policy(config: Config, policy: Policy, groups: Groups, folder: Path) -> None:
    architecture, shape = read_model(config.start_model)
    export_hf(
        policy.chunks,
        architecture,
        shape,
        groups,
        folder=folder,
        template=config.start_model,
        dtype=config.trainer.dtype,
    )
    if groups.rank == 0 and folder.parent.name == "weights":
        for old in folder.parent.iterdir():
            if old != folder and not old.name.startswith("."):
                shutil.rmtree(old, ignore_errors=True)


def export_newest(config: Config, groups: Groups, folder: Path) -> int:
    """Write the newest checkpoint as a Hugging Face folder; its step. A collective over all ranks."""
    _, shape = read_model(config.start_model)
    chunks = build_chunks(shape, config.trainer, groups)
    policy = build_policy(chunks, config.trainer, config.trainer.optimizer, config.trainer.steps)
    found = checkpoint.checkpoints(config.run.folder / "checkpoints")
    if not found:
        raise CheckpointError(f"{config.run.folder / 'checkpoints'} holds no checkpoint; train first")
    step, path = found[-1]
    checkpoint.load_policy(path, policy)
    export_policy(config, policy, groups, folder)
    return step
