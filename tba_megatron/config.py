"""The one configuration tree: every value a run depends on, written once, a section per room.

Importing this needs neither torch nor the environment. ``config_load`` makes a tree from YAML and overrides; the
sections are in ``config_sections``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import model_validator

from tba_megatron.config_objective import KimiK15, ObjectiveConfig, OnlineDpo, PpoClip, ProximalRloo
from tba_megatron.config_search import (
    MAIN_SOURCE,
    AddressRendezvous,
    EvaluationConfig,
    FakeEngineConfig,
    FixedPolicy,
    LaunchConfig,
    NewestPolicy,
    SearchConfig,
    TransportConfig,
    VllmEngineConfig,
)
from tba_megatron.config_sections import (
    BufferConfig,
    Constant,
    MetricsConfig,
    ModelConfig,
    RecordedData,
    RewardRecencySampler,
    RunConfig,
    Section,
    SftConfig,
    TaskConfig,
    TrainerConfig,
    WeightsConfig,
)

_FULL_MESSAGE_BYTES = 8 << 20  # at which a searcher sends what it has


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
    launch: LaunchConfig = LaunchConfig()

    @property
    def start_model(self) -> Path:
        """The Hugging Face folder that training starts from: the warm start's, where there is one."""
        return self.run.folder / "sft" if self.sft.steps else self.model.path

    @property
    def max_ahead_groups(self) -> int:
        """Prompts that may be leased or held untrained before searchers have to wait."""
        return max(1, round(self.search.max_age_steps * self.trainer.prompts_per_step))

    @property
    def probe_length(self) -> int:
        """Tokens of the sequence that is scored with every version; 0: none, or an engine without a model."""
        is_real = isinstance(self.search.engine, VllmEngineConfig)
        return min(self.weights.probe_tokens, self.model.max_length - 1) if is_real else 0

    @property
    def most_message_bytes(self) -> int:
        """Of a message of rollouts: a full one and one more group, with as much again for what is counted loosely."""
        return 2 * (_FULL_MESSAGE_BYTES + self._bytes_of_prompts(1))

    def _bytes_of_prompts(self, n: int) -> int:
        """What ``n`` prompts and their completions take at most in the shards, from one visit of each."""
        search = self.search
        numbers = search.completions_per_prompt * search.max_new_tokens * (1 + search.behaviour_logprobs)
        return 4 * n * (self.model.max_length + numbers)

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
                b.capacity_bytes < self._bytes_of_prompts(needed),
                f"buffer.capacity_bytes: {b.capacity_bytes} cannot hold {needed} prompts of {s.completions_per_prompt} "
                f"completions of search.max_new_tokens ({s.max_new_tokens}); raise it to at least "
                f"{self._bytes_of_prompts(needed)}",
            ),
            (
                b.fresh_prompts_per_step > self.max_ahead_groups,
                f"buffer.fresh_prompts_per_step: {b.fresh_prompts_per_step} can never be reached, because "
                f"search.max_age_steps lets searchers be {self.max_ahead_groups} prompts ahead; lower the first "
                f"or raise the second",
            ),
            (
                needed > self.max_ahead_groups,
                f"search.max_age_steps: {s.max_age_steps} lets searchers fill {self.max_ahead_groups} prompts, "
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
                s.in_flight == "keep_kv" and s.behaviour_logprobs,
                "search.in_flight: keep_kv gives log-probs that are no version's own, which search.behaviour_logprobs "
                "would store; choose recompute or drain, or leave behaviour_logprobs false",
            ),
            *self._objective_rules(),
            *self._transport_rules(),
            *self._source_rules(),
            (
                self.model.init == "random" and self.sft.steps == 0,
                "model.init: random weights with sft.steps 0 leave nothing to sharpen; set sft.steps or "
                "model.init to pretrained",
            ),
        ]

    def _objective_rules(self) -> list[tuple[bool, str]]:
        o, s = self.objective, self.search
        reads_behaviour = (
            f"objective.loss: {o.loss.kind}"
            if o.guards.lost_negative_ratio == 0.0
            else "objective.guards.lost_negative_ratio: it"
        ) + " reads the log-probs of the policy that wrote a completion"
        samples = not isinstance(self.trainer.data, RecordedData)  # else ``search`` says nothing of what is trained on
        as_objective = all(source.samples_as(o.temperature) for source in (s.main_source, *s.sources.values()))
        by_searchers = "objective.reference.placement: searcher"
        return [
            (
                o.needs_reference and o.reads_reference == "tokens",
                f"{by_searchers} gives one log-prob a completion, and objective.loss ({o.loss.kind} with beta) reads "
                f"one a token; choose device or host",
            ),
            (
                o.needs_reference and o.reference.reset_every_steps > 0,
                f"{by_searchers} holds the start model and cannot follow objective.reference.reset_every_steps "
                f"({o.reference.reset_every_steps}); set that to 0, or choose device or host",
            ),
            (
                o.needs_reference and not samples,
                f"{by_searchers} cannot be, because a recording (trainer.data) has no log-probs of the reference; "
                f"choose device or host",
            ),
            (
                samples and o.needs_behaviour and not s.behaviour_logprobs,
                f"{reads_behaviour}; set search.behaviour_logprobs to true",
            ),
            (
                samples and o.needs_behaviour and not as_objective,
                f"{reads_behaviour}, which are comparable only where it was sampled as objective.temperature "
                f"({o.temperature:g}) says, in every step; set search.temperature to it, temperature_schedule to "
                f"constant, top_p to 1, and those of search.sources",
            ),
            (
                samples and o.needs_behaviour and s.behaviour_logprobs and isinstance(s.engine, FakeEngineConfig),
                f"{reads_behaviour}, which the fake engine has not; choose vllm",
            ),
            (
                isinstance(o.loss, OnlineDpo) and o.guards != type(o.guards)(),
                "objective.guards: online_dpo compares completions and has no advantages to guard; leave guards out",
            ),
            (
                o.reads_reference == "none" and o.reference.reset_every_steps > 0,
                f"objective.reference.reset_every_steps: {o.reference.reset_every_steps} has no effect, because "
                f"objective.loss ({o.loss.kind}) reads no reference; leave it out",
            ),
            (
                o.reads_reference == "none" and o.reference.placement != "device",
                f"objective.reference.placement: {o.reference.placement} has no effect, because objective.loss "
                f"({o.loss.kind}) reads no reference; leave it out",
            ),
            (
                isinstance(o.loss, KimiK15) and o.reference.reset_every_steps == 0,
                "objective.reference.reset_every_steps: kimi_k15 is held to the policy of the last reset, and 0 never "
                "resets; set it to the steps of an iteration, or choose tb_vargrad",
            ),
            (
                o.guards.by_token and o.guards.lost_negative_ratio == 0.0,
                "objective.guards.by_token: it has no effect without lost_negative_ratio; set that or leave this out",
            ),
            (
                isinstance(o.loss, ProximalRloo) and o.guards.by_token,
                "objective.guards.by_token: proximal_rloo has one ratio for a whole completion; set it to false",
            ),
            (
                isinstance(o.loss, PpoClip) and 0.0 < o.loss.dual_clip <= 1.0,
                "objective.loss.dual_clip: at 1 or less it bounds what is not clipped; set it above 1, or 0 for none",
            ),
        ]

    def _transport_rules(self) -> list[tuple[bool, str]]:
        t = self.transport
        return [
            (
                t.sockets == "ipc" and t.control_port != 0,
                f"transport.control_port: {t.control_port} has no effect with transport.sockets ipc; set "
                f"transport.sockets to tcp or leave the port out",
            ),
            (
                isinstance(t.rendezvous, AddressRendezvous) and (t.sockets == "ipc" or t.control_port == 0),
                "transport.rendezvous: with kind address searchers dial transport.host and transport.control_port; set "
                "transport.sockets to tcp and transport.control_port to a port",
            ),
            (
                t.heartbeat_s > t.lease_s / 3,
                f"transport.heartbeat_s: {t.heartbeat_s:g} is more than a third of transport.lease_s ({t.lease_s:g}), "
                f"so that two late heartbeats would lose a searcher; lower it to at most {t.lease_s / 3:g}",
            ),
            (
                t.patience_s < t.lease_s,
                f"transport.patience_s: {t.patience_s:g} is below transport.lease_s ({t.lease_s:g}), so that a "
                f"searcher would give up as soon as it misses its trainer; raise it to at least {t.lease_s:g}",
            ),
        ]

    def _source_rules(self) -> list[tuple[bool, str]]:
        s, sampler = self.search, self.buffer.sampler
        fixed = [name for name, source in s.sources.items() if isinstance(source.policy, FixedPolicy)]
        moving = [name for name in fixed if not isinstance(s.sources[name].temperature_schedule, Constant)]
        lags = [name for name, source in s.sources.items() if not isinstance(source.policy, NewestPolicy)]
        return [
            (
                s.source != MAIN_SOURCE and s.source not in s.sources,
                f"search.source: {s.source} is none of search.sources ({', '.join(s.sources) or 'which is empty'}); "
                f"name one of them, or {MAIN_SOURCE}",
            ),
            (
                MAIN_SOURCE in s.sources,
                f"search.sources: {MAIN_SOURCE} is the name of those that search.searchers counts; choose another",
            ),
            (
                self.weights.mode == "sync" and bool(lags),
                f"weights.mode: sync waits until every searcher runs the newest version, which {', '.join(lags)} of "
                f"search.sources never does; choose async, or leave the policy of that source out",
            ),
            (
                bool(fixed) and isinstance(sampler, RewardRecencySampler) and sampler.only_recent,
                f"buffer.sampler.recent_probability: 1 in every step draws nothing but recent rollouts, which those of "
                f"{', '.join(fixed)} of search.sources never are; lower it to learn from them",
            ),
            (
                bool(moving),
                f"search.sources: {', '.join(moving)} has a temperature_schedule, which goes by the optimizer step of "
                f"the policy that a searcher runs, but a fixed policy has none; give it a temperature alone",
            ),
            (
                s.absent_warning_s > s.absent_limit_s,
                f"search.absent_warning_s: {s.absent_warning_s:g} comes after search.absent_limit_s "
                f"({s.absent_limit_s:g}), when the run has ended; lower the first",
            ),
        ]
