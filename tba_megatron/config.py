"""The one configuration tree: every value a run depends on, written once, a section per room.

Importing this needs neither torch nor the environment. ``config_load`` makes a tree from YAML and overrides. Units
are in the names; where a value is a rate, its docstring says of what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
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


class LinearSchedule(Section):
    kind: Literal["linear"] = "linear"
    warmup_steps: CountOrZero = 0
    decay_steps: Count = 1000
    """The learning rate reaches ``final_fraction`` of its peak at this step and stays there."""
    final_fraction: Fraction = 0.0


class CosineSchedule(Section):
    kind: Literal["cosine"] = "cosine"
    warmup_steps: CountOrZero = 0
    decay_steps: Count = 1000
    final_fraction: Fraction = 0.0


Schedule = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="kind")]


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
    distributed_timeout_s: Positive = 600.0
    megatron_extra: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig for layout and memory alone; trainer/megatron_config.py lists them."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class TbVarGrad(Section):
    """Trajectory balance, VarGrad estimate of log Z (TBA, Eq. 5), times beta / 2."""

    kind: Literal["tb_vargrad"] = "tb_vargrad"
    beta: Positive
    """Reward units per nat of KL to the reference."""


class TbaPrime(Section):
    """TBA' (Eq. 7): - stop_grad(advantage) * log pi, with the KL to the reference in the reward."""

    kind: Literal["tba_prime"] = "tba_prime"
    beta: Positive
    """Reward units per nat of KL to the reference."""


Objective = Annotated[TbVarGrad | TbaPrime, Field(discriminator="kind")]


class ObjectiveConfig(Section):
    loss: Objective
    temperature: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Divides the logits of policy and reference in the objective, whatever a searcher sampled with."""
    truncated: Literal["keep", "drop", "penalise"] = "keep"
    """What happens to a completion without EOS; counted in each case. ``drop`` makes its rollout invalid."""
    truncated_penalty: NonNegative = 1.0
    """Taken from the reward with ``truncated: penalise``."""


class RewardRecencySampler(Section):
    """Per prompt: with ``recent_probability`` from its recent rollouts, else by reward from its whole pool."""

    kind: Literal["reward_recency"] = "reward_recency"
    recent_probability: Fraction = 0.95
    """m of the paper: the share of a step's prompts that are drawn as recent ones."""
    recent_age_steps: CountOrZero = 2
    """A rollout is recent while its newest policy is at most this many optimizer steps old, on this branch."""
    inverse_temperature: NonNegative = 0.0
    """Rollouts that are not drawn as recent have weight exp(this * reward) within their prompt; 0: uniform."""


class FifoSampler(Section):  # each rollout once, the oldest first
    kind: Literal["fifo"] = "fifo"


Sampler = Annotated[RewardRecencySampler | FifoSampler, Field(discriminator="kind")]


class BufferConfig(Section):
    capacity_rollouts: Count = 100_000
    """Distinct rollouts over all shards; the oldest leave first."""
    per_prompt_rollouts: Count = 100
    initial_groups: CountOrZero = 0
    """Training waits until this many prompts have rollouts. At least ``trainer.prompts_per_step`` are needed anyway."""
    fresh_prompts_per_step: CountOrZero = 0
    """Training waits until this many prompts have recent rollouts that were never trained on."""
    sampler: Sampler = RewardRecencySampler()


class WeightsConfig(Section):
    publish_every_steps: Count = 1
    bucket_bytes: Count = 64 << 20
    timeout_s: Positive = 60.0
    """Deadline of forming a group and of one bucket on the wire."""


class TransportConfig(Section):
    host: str = "127.0.0.1"
    """The address that searchers reach the trainer by."""
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: a free port; searchers read it from the rendezvous file of the run folder."""
    heartbeat_s: Positive = 1.0
    lease_s: Positive = 60.0
    """A searcher that says nothing for this long is lost; so is a trainer, for its searchers."""
    patience_s: Positive = 600.0
    """How long a searcher waits for a trainer to appear."""


class VllmEngineConfig(Section):
    kind: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_sequences: Count = 256
    """Completions that the engine works on at a time."""
    kv_cache_bytes: Count = 256 << 20
    threads: Count = 1
    """CPU threads of one engine; no effect on a GPU."""


class FakeEngineConfig(Section):  # deterministic and without a model, for tests of everything around it
    kind: Literal["fake"] = "fake"
    correct_fraction: Fraction = 0.5
    tokens_per_step: Count = 64


EngineConfig = Annotated[VllmEngineConfig | FakeEngineConfig, Field(discriminator="kind")]


class SearchConfig(Section):
    searchers: CountOrZero = 1
    """How many ``tba launch`` starts. More can join a living run from anywhere that sees the run folder."""
    engine: EngineConfig = VllmEngineConfig()
    completions_per_prompt: Count = 8
    """S of the paper: sampled for each visit of a prompt."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Within what vLLM takes as it is: it would raise a smaller one to 0.01 without a word."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    max_new_tokens: Count = 256
    prompts_in_engine: Count = 32
    """Prompts that a searcher keeps in its engine at a time."""
    max_ahead_steps: Positive = 2.0
    """Searchers may be this many optimizer steps of prompts ahead of the trainer; then they wait (back-pressure)."""
    behaviour_logprobs: bool = False
    """Store the engine's own log-probs. Trajectory balance does not need them."""


class EvaluationConfig(Section):
    problems: CountOrZero = 256
    """Held-out problems; 0: no evaluation."""
    samples_per_problem: Count = 1
    temperature: NonNegative = 1.0
    """0: greedy."""


class MetricsConfig(Section):
    tensorboard: bool = True
    sample_rollouts_every_steps: CountOrZero = 50
    """A table of rollouts in TensorBoard; 0: never."""
    sample_rollouts: Count = 8
    log_every_steps: Count = 10
    """A line on an output that is no terminal; other logs get every step."""


class Config(Section):
    """The whole tree."""

    run: RunConfig
    model: ModelConfig
    task: TaskConfig
    sft: SftConfig = SftConfig()
    trainer: TrainerConfig
    objective: ObjectiveConfig
    buffer: BufferConfig = BufferConfig()
    weights: WeightsConfig = WeightsConfig()
    transport: TransportConfig = TransportConfig()
    search: SearchConfig = SearchConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def start_model(self) -> Path:
        """The Hugging Face folder that training starts from: the warm start's, where there is one."""
        return self.run.folder / "sft" if self.sft.steps else self.model.path

    @property
    def max_ahead_groups(self) -> int:
        """Prompts that may be leased or held untrained before searchers have to wait."""
        return max(1, round(self.search.max_ahead_steps * self.trainer.prompts_per_step))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [message for bad, message in self._rules() if bad]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _rules(self) -> list[tuple[bool, str]]:
        """(violated, message) for each rule that spans sections. The path in front of ":" locates the line."""
        t, s, b = self.trainer, self.search, self.buffer
        needed = max(t.prompts_per_step, b.initial_groups)
        return [
            (
                t.prompts_per_step % t.data_parallel != 0,
                f"trainer.prompts_per_step: {t.prompts_per_step} is not divisible by trainer.data_parallel "
                f"({t.data_parallel}); choose a multiple of {t.data_parallel}",
            ),
            (
                b.capacity_rollouts < needed * s.completions_per_prompt,
                f"buffer.capacity_rollouts: {b.capacity_rollouts} cannot hold {needed} prompts of "
                f"{s.completions_per_prompt} completions; raise it to at least {needed * s.completions_per_prompt}",
            ),
            (
                b.fresh_prompts_per_step > self.max_ahead_groups,
                f"buffer.fresh_prompts_per_step: {b.fresh_prompts_per_step} can never be reached, because "
                f"search.max_ahead_steps lets searchers be {self.max_ahead_groups} prompts ahead; lower the first "
                f"or raise the second",
            ),
            (
                needed > self.max_ahead_groups,
                f"search.max_ahead_steps: {s.max_ahead_steps} lets searchers fill {self.max_ahead_groups} prompts, "
                f"but training starts with {needed}; raise it to at least {needed / t.prompts_per_step:g}",
            ),
            (
                s.max_new_tokens >= self.model.max_length,
                f"search.max_new_tokens: {s.max_new_tokens} leaves no room for a prompt in model.max_length "
                f"({self.model.max_length}); lower the first or raise the second",
            ),
            (
                t.sequence_parallel and t.tensor_parallel == 1,
                "trainer.sequence_parallel: true has no effect with trainer.tensor_parallel 1; set it to false",
            ),
            (
                t.microbatch_tokens < self.model.max_length,
                f"trainer.microbatch_tokens: {t.microbatch_tokens} cannot hold one sequence of model.max_length "
                f"({self.model.max_length}); raise it to at least {self.model.max_length}",
            ),
            (
                self.sft.steps > 0 and self.sft.batch_size < t.data_parallel,
                f"sft.batch_size: {self.sft.batch_size} leaves some of the trainer.data_parallel ({t.data_parallel}) "
                f"replicas without a demonstration; raise it to at least {t.data_parallel}",
            ),
            (
                t.virtual_pipeline > 1 and t.pipeline_parallel == 1,
                f"trainer.virtual_pipeline: {t.virtual_pipeline} needs at least two pipeline stages; set "
                f"trainer.pipeline_parallel or leave virtual_pipeline at 1",
            ),
            (
                self.model.init == "random" and self.sft.steps == 0,
                "model.init: random weights with sft.steps 0 leave nothing to sharpen; set sft.steps or "
                "model.init to pretrained",
            ),
        ]
