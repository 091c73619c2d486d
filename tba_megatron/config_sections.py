"""The sections of the configuration tree, one for each room: every value with its unit and its meaning.

Units are in the names; where a value is a rate, its docstring says of what. ``config.py`` joins them to one tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
# Of waits in torch and in threads, which count nanoseconds in 64 bits: one of three hundred years overflows and fails
# at once. A week is far below that, and below the 24 days that 32 bits of milliseconds hold.
MOST_WAIT_S = 7 * 24 * 3600.0
Wait = Annotated[float, Field(gt=0.0, le=MOST_WAIT_S)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Constant(Section):
    """A value that is the same in every step."""

    kind: Literal["constant"] = "constant"

    def value_at(self, start: float, step: int) -> float:
        return start

    def ends(self, start: float) -> tuple[float, float]:
        return start, start


class Line(Section):
    """From a value at step 1 in a straight line; ``stop_step`` before ``target_step`` ends it with a jump.

    A function of the optimizer step alone, counted from 1, so a resumed run goes on where it was. Whose value it is
    says what may be its target.
    """

    kind: Literal["linear"] = "linear"
    target: float
    target_step: Count
    """The line would reach ``target`` one step after it."""
    stop_step: Count
    """From here on the value is ``target``."""

    def value_at(self, start: float, step: int) -> float:
        """Of a value that is ``start`` at step 1."""
        if step >= self.stop_step:
            return self.target
        return start + (self.target - start) * min(1.0, (step - 1) / self.target_step)

    def ends(self, start: float) -> tuple[float, float]:
        """The first value and the last, between which all others lie."""
        return self.value_at(start, 1), self.target


class RunConfig(Section):
    folder: Path
    """Where everything of this run is kept. A folder that holds another configuration is refused."""
    seed: CountOrZero = 0
    """Seeds the model, the task, the sampler and the searchers."""


class ModelConfig(Section):
    path: Path
    """A Hugging Face folder: config.json, the tokenizer, and safetensors unless ``init`` is ``random``."""
    init: Literal["pretrained", "random"] = "pretrained"
    """``random`` starts from seeded random weights; only ``tba sft`` makes sense after that."""
    max_length: Count = 1024
    """Prompt and completion together, in tokens. A longer prompt is dropped when the task is loaded, and counted."""


class ArithmeticTask(Section):
    kind: Literal["arithmetic"] = "arithmetic"
    max_left: Count = 999
    """Left operands are 0 to this."""
    max_right: Count = 9
    """Right operands are 0 to this."""
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The share of all problems that is never trained on, chosen by a hash of the problem."""
    wrong_fraction: Fraction = 0.4
    """The share of demonstrations with a wrong answer (for ``tba sft``)."""


class CopyTask(Section):
    kind: Literal["copy"] = "copy"
    length: Annotated[int, Field(ge=1, le=6)] = 4
    """Digits to repeat: the simplest task there is."""


TaskConfig = Annotated[ArithmeticTask | CopyTask, Field(discriminator="kind")]


class ConstantSchedule(Section):
    kind: Literal["constant"] = "constant"
    warmup_steps: CountOrZero = 0


class Decay(Section):
    """What comes down to ``final_fraction`` of its peak after a warm-up."""

    warmup_steps: CountOrZero = 0
    decay_steps: Count = 1000
    """The learning rate reaches ``final_fraction`` of its peak at this step and stays there."""
    final_fraction: Fraction = 0.0

    @model_validator(mode="after")
    def _begins_to_decay(self) -> Self:
        if self.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) reaches decay_steps ({self.decay_steps}), so nothing would decay; "
                f"raise decay_steps to at least {self.warmup_steps + 1}"
            )
        return self


class LinearSchedule(Decay):
    kind: Literal["linear"] = "linear"


class CosineSchedule(Decay):
    kind: Literal["cosine"] = "cosine"


class WsdSchedule(Decay):
    """Warm-up, stable, decay: the peak is kept until ``anneal_steps`` before ``decay_steps``."""

    kind: Literal["wsd"] = "wsd"
    anneal_steps: Count = 500
    """Length of the last phase, which ends at ``decay_steps`` with ``final_fraction``."""
    anneal: Literal["cosine", "linear"] = "cosine"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.warmup_steps + self.anneal_steps > self.decay_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and anneal_steps ({self.anneal_steps}) are more than decay_steps "
                f"({self.decay_steps}); raise decay_steps to at least {self.warmup_steps + self.anneal_steps}"
            )
        return self


Schedule = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule, Field(discriminator="kind")]


class OptimizerSection(Section):
    learning_rate: Positive
    schedule: Schedule = ConstantSchedule()
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0  # never applied to norms and biases
    clip_grad_norm: NonNegative = 1.0  # of the global norm; 0 does not clip


class TaskDemonstrations(Section):
    kind: Literal["task"] = "task"


class FileDemonstrations(Section):
    """A file with a JSON object a line: the texts ``prompt`` and ``completion``. An EOS is put behind each."""

    kind: Literal["jsonl"] = "jsonl"
    path: Path
    held_out_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """The share of all prompts that is never trained on, chosen by a hash of the prompt."""


DemonstrationData = Annotated[TaskDemonstrations | FileDemonstrations, Field(discriminator="kind")]


class SftConfig(Section):
    steps: CountOrZero = 0
    """0: no warm start, training begins from ``model.path``."""
    data: DemonstrationData = TaskDemonstrations()
    batch_size: Count = 128  # demonstrations per step
    held_out: CountOrZero = 0
    """Held-out demonstrations whose loss is measured before the first step, at intervals and at the end; 0: none."""
    held_out_every_steps: Count = 100
    save_every_steps: CountOrZero = 0  # 0: only on a signal
    optimizer: OptimizerSection = OptimizerSection(learning_rate=1e-3)


class SearcherData(Section):
    kind: Literal["searchers"] = "searchers"
    record: bool = False
    """Keep every train group, in ``recording`` of the run folder, so that another run can train on the same stream."""


class RecordedData(Section):
    """Train on the recording of another run, without searchers: the same groups at the same steps."""

    kind: Literal["recording"] = "recording"
    folder: Path


TrainData = Annotated[SearcherData | RecordedData, Field(discriminator="kind")]


class TrainerConfig(Section):
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    virtual_pipeline: Count = 1
    """Chunks of layers a pipeline stage holds (interleaved 1F1B); 1: plain 1F1B."""
    data_parallel: Count = 1
    sequence_parallel: bool = False
    layers: Literal["fastest", "torch"] = "fastest"
    """``fastest``: Transformer Engine's layers where it is installed and has a GPU, else plain torch."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: ``selective`` those of attention, ``full`` every layer's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    data: TrainData = SearcherData()
    steps: CountOrZero = 100
    """Optimizer steps of the whole run, those before a resume counted in."""
    prompts_per_step: Count = 8  # over all data-parallel replicas
    rollouts_per_prompt: Annotated[int, Field(ge=2)] = 8
    """K of the paper; a group of one has no baseline."""
    microbatch_tokens: Count = 4096
    """A packed microbatch holds at most this many. A larger group is split and trained in two exact passes."""
    optimizer: OptimizerSection = OptimizerSection(learning_rate=1e-5)
    save_every_steps: CountOrZero = 0  # 0: only at the end and on a signal
    keep_checkpoints: Count = 2
    async_save: bool = True
    """Periodic checkpoints are written while training goes on, from one more copy of the state in host memory."""
    threads: Count = 1  # of the CPU, in one rank
    distributed_timeout_s: Wait = 600.0
    megatron_extra: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig for layout and memory alone; trainer/megatron_config.py lists them."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class LinearProbability(Line):
    target: Fraction


ProbabilitySchedule = Annotated[Constant | LinearProbability, Field(discriminator="kind")]


class RewardRecencySampler(Section):
    """Per prompt: with ``recent_probability`` from its recent rollouts, else by reward from its whole pool."""

    kind: Literal["reward_recency"] = "reward_recency"
    recent_probability: Fraction = 0.95
    """m of the paper: the share of a step's prompts that are drawn as recent ones."""
    recent_probability_schedule: ProbabilitySchedule = Constant()
    recent_age_steps: CountOrZero = 2
    """A rollout is recent while its newest policy is at most this many optimizer steps old, on this branch."""
    inverse_temperature: NonNegative = 0.0
    """Rollouts that are not drawn as recent have weight exp(this * reward) within their prompt; 0: uniform."""

    def recent_probability_at(self, step: int) -> float:
        """m of optimizer step ``step``, counted from 1."""
        return self.recent_probability_schedule.value_at(self.recent_probability, step)

    @property
    def only_recent(self) -> bool:
        """Whether no step draws anything else."""
        return self.recent_probability_schedule.ends(self.recent_probability) == (1.0, 1.0)


class UniformSampler(Section):  # prompts and their rollouts with equal probability
    kind: Literal["uniform"] = "uniform"


class PrioritisedSampler(Section):
    """By reward over all rollouts, whatever their prompt: for few prompts with many rollouts each."""

    kind: Literal["prioritised"] = "prioritised"
    inverse_temperature: NonNegative = 1.0
    """A rollout has weight exp(this * reward), and a prompt the sum of its rollouts' weights."""


class FifoSampler(Section):  # each rollout once, the oldest first
    kind: Literal["fifo"] = "fifo"


Sampler = Annotated[
    RewardRecencySampler | UniformSampler | PrioritisedSampler | FifoSampler, Field(discriminator="kind")
]


class SegmentsConfig(Section):
    """What a shard has acknowledged, on disk: append-only files in ``replay`` of the run folder."""

    kind: Literal["files"] = "files"
    segment_bytes: Annotated[int, Field(ge=1 << 12)] = 64 << 20
    """A file that has reached this size is followed by the next; files whose rollouts have all left are deleted."""
    fsync_every_s: Annotated[float, Field(ge=0.0, le=MOST_WAIT_S)] = 30.0
    """The most that a failure of the machine (not of a process) can cost; 0: safe on the disk at checkpoints only."""


class NoSegments(Section):
    """Rollouts in memory only: a checkpoint holds them all, and a killed trainer loses those since then."""

    kind: Literal["none"] = "none"


Segments = Annotated[SegmentsConfig | NoSegments, Field(discriminator="kind")]


class BufferConfig(Section):
    capacity_rollouts: Count = 100_000
    """Distinct rollouts over all shards; the oldest leave first."""
    capacity_bytes: Count = 16 << 30
    """Bytes of prompts, completions and log-probs over all shards; the oldest rollouts leave first."""
    per_prompt_rollouts: Count = 100
    initial_groups: CountOrZero = 0
    """Training waits until this many prompts have rollouts. At least ``trainer.prompts_per_step`` are needed anyway."""
    fresh_prompts_per_step: CountOrZero = 0
    """Training waits until this many prompts have a recent visit after which nothing of them was trained on."""
    max_reuse: CountOrZero = 0
    """A rollout is part of at most this many optimizer steps; 0: no limit."""
    sampler: Sampler = RewardRecencySampler()
    segments: Segments = SegmentsConfig()


class WeightsConfig(Section):
    mode: Literal["async", "sync"] = "async"
    """``sync``: lock-step, the baseline. Searchers take each version, write what its steps need, and wait meanwhile."""
    publish_every_steps: Count = 1
    transport: Literal["broadcast", "files"] = "broadcast"
    """``files``: each version is a folder in ``weights`` of the run folder, on a disk that all share; no groups."""
    cohort_size: Count = 64
    """Searchers of one broadcast group. When one is lost, its own group alone is formed anew."""
    bucket_bytes: Count = 64 << 20
    timeout_s: Wait = 60.0
    """Deadline of each wait: for a group to form, for searchers to get ready, for one bucket, for a version to be
    applied. Then the group is given up, who was late is named, and training goes on."""
    probe_tokens: CountOrZero = 16
    """Length of a fixed sequence that trainer and searcher score with every version, cut to what fits; 0: no probe."""
    probe_gap_nats: Positive = 0.05
    """Mean difference of their log-probs above which an alert is raised and the version is sent again. Float32 engines
    agree to 1e-6 on CPU; bfloat16 is off by 0.02."""


class MetricsConfig(Section):
    tensorboard: bool = True
    sample_rollouts_every_steps: CountOrZero = 50
    """A table of rollouts in TensorBoard; 0: never."""
    sample_rollouts: Count = 8
    histograms_every_steps: CountOrZero = 20
    """How residuals (advantages, where an objective has none) and ages are spread, in TensorBoard and in
    ``metrics.jsonl``; 0: never."""
    log_every_steps: Count = 10
    """A line on an output that is no terminal; other logs get every step."""
