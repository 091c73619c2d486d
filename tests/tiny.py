"""Tiny random models as Hugging Face folders, rollouts for them, and a short training run on the ranks of a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tba_megatron.config_sections import OptimizerSection, TrainerConfig
from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutId, StopReason, TrainGroup

VOCAB = 19
BETA = 0.1
# A large epsilon: Adam turns rounding noise of vanishing gradients into whole steps otherwise.
OPTIMIZER = OptimizerSection(learning_rate=1e-2, adam_eps=1e-3, weight_decay=0.1, clip_grad_norm=1.0)


def hf_config(kind: str, *, tied: bool, layers: int = 2, **changes):
    """The transformers configuration of a tiny model; ``changes`` are fields of it."""
    from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen2Config, Qwen3Config

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    gated = {**sizes, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    config_class, fields = {
        "qwen2": (Qwen2Config, gated),
        "qwen3": (Qwen3Config, {**gated, "head_dim": 12}),
        "llama": (LlamaConfig, gated),
        # Heads of 16 columns, of which the quarter that is rotated has two frequencies.
        "gpt_neox": (GPTNeoXConfig, {**sizes, "hidden_size": 64, "rotary_pct": 0.25}),
        "gpt2": (GPT2Config, {"n_embd": 32, "n_inner": 48, "n_layer": layers, "n_head": 4, "n_positions": 64}),
    }[kind]
    config = config_class(vocab_size=VOCAB, tie_word_embeddings=tied, use_cache=False, **(fields | changes))
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 1, 0, None
    return config


def hf_model(kind: str, *, tied: bool, layers: int = 2, seed: int = 0, **changes):
    """A model of 19 tokens whose every parameter is random, biases and norms included; logits of order 1 to 10."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(kind, tied=tied, layers=layers, **changes)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    return model


def save_model(
    folder: Path, kind: str = "qwen2", *, tied: bool = True, layers: int = 2, seed: int = 0, **changes
) -> Path:
    hf_model(kind, tied=tied, layers=layers, seed=seed, **changes).save_pretrained(folder)
    return folder


def load_hf_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def train_groups(n: int, k: int = 3, *, seed: int = 0, vocab: int = VOCAB) -> list[TrainGroup]:
    """``n`` groups of up to ``k`` distinct completions of different lengths, with copies that sum to 2 ``k``."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(n):
        rollouts = tuple(
            rollout(g * k + i, rng.integers(2, vocab, rng.integers(1, 7)), float(rng.normal())) for i in range(k)
        )
        groups.append(
            TrainGroup(
                prompt_id=f"p{g}",
                prompt_token_ids=rng.integers(2, vocab, rng.integers(2, 6)).astype(np.int32),
                rollouts=rollouts,
                copies=(k + 1, *[1] * (k - 1)),
            )
        )
    return groups


def rollout(sequence: int, token_ids, reward: float, *, step: int = 0) -> Rollout:
    tokens = np.asarray(token_ids, np.int32)
    return Rollout(
        rollout_id=RolloutId("s", sequence),
        token_ids=tokens,
        reward=reward,
        stop_reason=StopReason.EOS,
        spans=(PolicySpan(version=PolicyVersion(0, step), start=0, end=len(tokens)),),
        source="test",
        behaviour_logprobs=-3.0 - np.random.default_rng(sequence).random(len(tokens), np.float32),
    )


def trainer_config(tp: int = 1, pp: int = 1, dp: int = 1, vpp: int = 1, **fields) -> TrainerConfig:
    return TrainerConfig(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        virtual_pipeline=vpp,
        **({"optimizer": OPTIMIZER, "microbatch_tokens": 64} | fields),
    )


@dataclass(kw_only=True)
class Trained:
    """What a training run left on one rank. ``weights`` under Hugging Face's names, from stage leaders only."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    statistics: list[dict[str, float]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # after each step
    logprobs: dict[int, float] = field(default_factory=dict)  # by rollout sequence, before the first step
    local: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's shards, at the end


class Rank:
    """The policy, reference and loss of one rank, as ``entry.train`` builds them."""

    def __init__(
        self,
        groups,
        trainer: TrainerConfig,
        folder: Path,
        reference_folder: Path | None = None,
        *,
        placement: str = "device",
        reset_every_steps: int = 0,
    ) -> None:
        from tba_megatron.loss.guards import Guards
        from tba_megatron.loss.regression import TbVarGrad
        from tba_megatron.models.registry import read_model
        from tba_megatron.trainer.head import HeadSettings
        from tba_megatron.trainer.load_hf import load_hf
        from tba_megatron.trainer.model import build_chunks, build_policy
        from tba_megatron.trainer.reference import Reference
        from tba_megatron.trainer.reference_files import ReferenceFiles
        from tba_megatron.trainer.reference_weights import OnDevice, OnHost

        self.groups, self.trainer, self.folder = groups, trainer, folder
        self.architecture, self.shape = read_model(folder)
        self.head = HeadSettings(temperature=1.0, vocab_size=self.shape.vocab_size)
        chunks = build_chunks(self.shape, trainer, groups)
        load_hf(chunks, self.architecture, self.shape, folder, groups)
        self.policy = build_policy(chunks, trainer, trainer.optimizer, trainer.steps)
        twin = build_chunks(self.shape, trainer, groups)
        load_hf(twin, self.architecture, self.shape, reference_folder or folder, groups)
        if placement == "host":
            weights = OnHost(chunks)
            weights.take(twin)
        else:
            weights = OnDevice(twin)
        files = ReferenceFiles(
            folder=folder / "reference",
            template=folder,
            dtype=trainer.dtype,
            architecture=self.architecture,
            shape=self.shape,
            groups=groups,
        )
        self.reference = Reference(
            weights, self.policy.chunks, files, self.head, groups, reset_every_steps=reset_every_steps
        )
        self.steps = 0
        self.loss = TbVarGrad(BETA, Guards())

    def packs(self, train_groups: Sequence[TrainGroup]):
        from tba_megatron.packing import pack

        mine = train_groups[self.groups.dp_rank :: self.groups.dp_size]
        multiple_of = self.groups.tp_size if self.trainer.sequence_parallel else 1
        version = self.reference.version
        packs = pack(mine, self.trainer.microbatch_tokens, multiple_of, reference_version=version)
        return self.reference.fill(packs)[0]

    def logprobs(self, train_groups: Sequence[TrainGroup]) -> dict[int, float]:
        """Sum of each completion's log-probs by rollout sequence; empty where this rank is not of the last stage."""
        from tba_megatron.trainer.model import to_device
        from tba_megatron.trainer.step import sequence_logprobs

        packs = self.packs(train_groups)
        batches = [to_device(pack.microbatch, self.groups.device) for pack in packs]
        sums = sequence_logprobs(self.policy.chunks, batches, self.head, self.groups)
        return {
            rollout_id.sequence: float(value)
            for pack, sums_S in zip(packs, sums, strict=False)
            for rollout_id, value in zip(pack.rollout_ids, sums_S, strict=True)
        }

    def step(self, train_groups: Sequence[TrainGroup]):
        from tba_megatron.loss.base import ReferenceNeed
        from tba_megatron.trainer.model import to_device
        from tba_megatron.trainer.step import update

        normaliser = float(sum(sum(group.copies) for group in train_groups))
        packs, by_token = self.packs(train_groups), ()
        if self.loss.needs.reference is ReferenceNeed.TOKENS:
            by_token = self.reference.read(packs, ReferenceNeed.TOKENS).by_token
        batches = [to_device(pack.microbatch, self.groups.device) for pack in packs]
        done = update(self.policy, batches, self.loss, normaliser, self.head, self.groups, reference_logprobs=by_token)
        self.steps += 1
        self.reference.step_made(self.steps)
        return done

    def weights(self) -> dict[str, torch.Tensor]:
        from tba_megatron.trainer.stream_hf import stream_hf

        named = dict(stream_hf(self.policy.chunks, self.architecture, self.shape, self.groups, torch.float32))
        return named if self.groups.is_stage_leader else {}

    def train(self, batches: Sequence[Sequence[TrainGroup]]) -> Trained:
        """One optimizer step for each entry of ``batches``."""
        trained = Trained(logprobs=self.logprobs(batches[0]) if batches else {})
        for batch in batches:
            done = self.step(batch)
            trained.losses.append(done.statistics.get("loss", float("nan")))
            trained.norms.append(done.grad_norm)
            trained.rates.append(done.learning_rate)
            trained.skipped.append(done.skipped)
            trained.statistics.append(dict(done.statistics))
            trained.weights.append(self.weights())
        trained.local = {name: p.detach().clone() for name, p in self.policy.chunks[0].named_parameters()}
        return trained


def train_on_rank(groups, trainer, folder, reference_folder, batches) -> Trained:
    return Rank(groups, trainer, folder, reference_folder).train(batches)


def whole(weights: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parts of the stages, which must not overlap, as one."""
    joined: dict[str, torch.Tensor] = {}
    for part in weights:
        assert not joined.keys() & part.keys()
        joined.update(part)
    return joined


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
