"""The sections of the configuration about searchers: where they meet the trainer, who they are, how they search.

As in ``config_sections``: units are in the names, and every value has its meaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tba_megatron.config_sections import Constant, Count, CountOrZero, Fraction, Line, NonNegative, Positive, Section

MAIN_SOURCE = "searcher"  # the source of those that ``search.searchers`` counts
_Temperature = Annotated[float, Field(ge=0.01, le=2.0)]
_TopP = Annotated[float, Field(gt=0.0, le=1.0)]


class FolderRendezvous(Section):
    """Searchers find the trainer through ``rendezvous.json`` of the run folder, which holds the run's secret."""

    kind: Literal["folder"] = "folder"


class AddressRendezvous(Section):
    """Searchers dial ``transport.host`` and ``transport.control_port``; nobody writes the secret anywhere.

    The weights that a searcher starts from are still read in the run folder.
    """

    kind: Literal["address"] = "address"
    key_file: Path
    """64 hexadecimal digits, in a file that its owner alone can read: the secret of trainer and searchers."""


RendezvousConfig = Annotated[FolderRendezvous | AddressRendezvous, Field(discriminator="kind")]


class TransportConfig(Section):
    sockets: Literal["ipc", "tcp"] = "ipc"
    """How searchers reach the trainer's control channel and shards. ``ipc``: sockets in a folder that their owner alone
    can enter, on one host. ``tcp``: encrypted and authenticated (CURVE), also across hosts."""
    host: str = "127.0.0.1"
    """The address of the trainer's host: that searchers dial, and that weights are sent from without encryption."""
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of ``tcp`` sockets. 0: a free port; searchers read it from the rendezvous file of the run folder."""
    rendezvous: RendezvousConfig = FolderRendezvous()
    heartbeat_s: Positive = 1.0
    lease_s: Positive = 60.0
    """A searcher that says nothing for this long is lost, and its prompts go to others. A searcher that hears nothing
    for this long looks for another trainer."""
    patience_s: Positive = 600.0
    """How long a searcher waits for a trainer to appear, at its start or when it has lost one."""
    window_bytes: Annotated[int, Field(ge=1 << 12)] = 256 << 20
    """Rollouts that may be under way to a shard or wait in it, over all searchers; beyond it they stop generating."""
    resend_s: Positive = 10.0
    """A message that was not acknowledged for this long is sent again."""

    @property
    def silent_s(self) -> float:
        """A searcher that says nothing for this long is left out of the next version; it keeps its prompts."""
        return min(self.lease_s / 2, max(5 * self.heartbeat_s, self.lease_s / 4))


class VllmEngineConfig(Section):
    kind: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_sequences: Count = 256
    """Completions that the engine works on at a time."""
    kv_cache_bytes: Count = 256 << 20
    threads: Count = 1
    """CPU threads of one engine; no effect on a GPU."""
    tensor_parallel: Annotated[int, Field(ge=1, le=4096)] = 1
    """Workers that share one engine; more than one are processes of their own."""


class FakeEngineConfig(Section):  # deterministic and without a model, for tests of everything around it
    kind: Literal["fake"] = "fake"
    correct_fraction: Fraction = 0.5
    tokens_per_step: Count = 64


EngineConfig = Annotated[VllmEngineConfig | FakeEngineConfig, Field(discriminator="kind")]


class NewestPolicy(Section):
    """The trained policy, each version as it comes."""

    kind: Literal["newest"] = "newest"


class LaggingPolicy(Section):
    """The trained policy as it was some steps ago: a version is taken once it is ``steps`` newer than the last."""

    kind: Literal["lagging"] = "lagging"
    steps: Annotated[int, Field(ge=1, le=1 << 20)]


class FixedPolicy(Section):
    """Another model with the same tokenizer, a teacher for example. It never takes weights, and is never recent."""

    kind: Literal["fixed"] = "fixed"
    path: Path
    """A Hugging Face folder."""


SourcePolicy = Annotated[NewestPolicy | LaggingPolicy | FixedPolicy, Field(discriminator="kind")]


class LinearTemperature(Line):
    target: _Temperature


TemperatureSchedule = Annotated[Constant | LinearTemperature, Field(discriminator="kind")]


class SourceConfig(Section):
    """Searchers that sample in another way, or another policy; all else is as in ``search``. Each has metrics."""

    searchers: CountOrZero = 1
    """How many ``tba launch`` starts beside those of ``search.searchers``."""
    temperature: _Temperature = 1.0
    temperature_schedule: TemperatureSchedule = Constant()
    top_p: _TopP = 1.0
    policy: SourcePolicy = NewestPolicy()

    def temperature_at(self, step: int) -> float:
        """What a searcher samples with that runs the policy after optimizer step ``step``; 0: what training began from,
        which counts as 1."""
        return self.temperature_schedule.value_at(self.temperature, max(1, step))

    def samples_as(self, temperature: float) -> bool:
        """Whether all that it writes is sampled with ``temperature`` from the whole distribution."""
        return self.top_p == 1.0 and self.temperature_schedule.ends(self.temperature) == (temperature, temperature)


SourceName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class SearchConfig(Section):
    searchers: CountOrZero = 1
    """How many ``tba launch`` starts. More can join a living run from anywhere that sees the run folder."""
    source: SourceName = MAIN_SOURCE
    """Which of ``sources`` a ``tba search`` is; ``searcher``: none of them."""
    sources: dict[SourceName, SourceConfig] = Field(default_factory=dict)
    """Further kinds of searchers by name. Trajectory balance learns from whatever anybody sampled."""
    engine: EngineConfig = VllmEngineConfig()
    completions_per_prompt: Count = 8
    """S of the paper: sampled for each visit of a prompt."""
    temperature: _Temperature = 1.0
    """Within what vLLM takes as it is: it would raise a smaller one to 0.01 without a word."""
    temperature_schedule: TemperatureSchedule = Constant()
    """Of the optimizer step of the policy that a searcher runs when a completion begins."""
    top_p: _TopP = 1.0
    max_new_tokens: Count = 256
    prompts_in_engine: Annotated[int, Field(ge=1, le=1 << 16)] = 32
    """Prompts that a searcher keeps in its engine at a time."""
    epochs: CountOrZero = 0
    """Visits of each prompt, after which the data has ended and so does training, once nothing is left that a step
    could use; 0: no end."""
    max_age_steps: Positive = 2.0
    """A soft bound on the age of what is trained on: searchers wait while this many optimizer steps of prompts are
    leased or not trained on yet (back-pressure). Nothing is thrown away for its age."""
    absent_warning_s: Positive = 60.0
    """A warning after so long without any searcher, and again after as long."""
    absent_limit_s: Positive = 3600.0
    """After so long without any searcher the run is saved and ends with exit code 69."""
    in_flight: Literal["recompute", "keep_kv", "drain"] = "recompute"
    """What happens to completions that are half written when new weights come. ``recompute``: their keys and values are
    computed again, so that each token is the newest policy's. ``keep_kv``: they go on with those of the old weights,
    which costs nothing; nobody could compute such log-probs again. ``drain``: they are finished first, and no new ones
    are begun."""
    behaviour_logprobs: bool = False
    """Store the engine's own log-probs. Trajectory balance does not need them."""

    @property
    def main_source(self) -> SourceConfig:
        """How those of ``searchers`` sample."""
        return SourceConfig(
            searchers=self.searchers,
            temperature=self.temperature,
            temperature_schedule=self.temperature_schedule,
            top_p=self.top_p,
        )

    @property
    def this_source(self) -> SourceConfig:
        """How a searcher of ``source`` samples."""
        return self.main_source if self.source == MAIN_SOURCE else self.sources[self.source]


class EvaluationConfig(Section):
    problems: CountOrZero = 256
    """Held-out problems; 0: no evaluation."""
    samples_per_problem: Count = 1
    temperature: NonNegative = 1.0
    """0: greedy."""


class LaunchConfig(Section):
    """What ``tba launch`` does about a role that fails. After exit code 2 (bad configuration) none is started again."""

    searcher_restarts: CountOrZero = 3
    """Of one searcher within ``window_s``; with one failure more the run ends."""
    trainer_restarts: CountOrZero = 0
    """Of all trainer ranks together within ``window_s``, from the newest checkpoint while the searchers live on."""
    window_s: Positive = 600.0
