"""The vocabulary of the system: what a prompt, a rollout, a group, a version and a step plan are.

Everything here is frozen and made of plain Python and numpy, so that each room can be imported, tested and read
without torch. Shapes in names: T tokens, S sequences, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


FOREIGN_ATTEMPT = 1 << 21  # no run has so many attempts: those from here on mark versions of another policy


@dataclass(frozen=True, order=True, slots=True)
class PolicyVersion:
    """The policy after optimizer step ``step`` of attempt ``attempt``; ordered, and never re-used.

    A resumed run is a new attempt, so the steps after the restored one exist once for each attempt.
    """

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}"

    @staticmethod
    def parse(text: str) -> PolicyVersion:
        """The version whose ``str`` is ``text``; ValueError for anything else."""
        attempt, _, step = text.partition(".")
        return PolicyVersion(int(attempt), int(step))

    @property
    def is_foreign(self) -> bool:
        """Written by a policy that was never trained here, while the trainer's newest version was ``era``."""
        return self.attempt >= FOREIGN_ATTEMPT

    @property
    def era(self) -> PolicyVersion:
        """The trainer's version of that time; of its own versions, themselves."""
        return PolicyVersion(self.attempt % FOREIGN_ATTEMPT, self.step)

    def as_foreign(self) -> PolicyVersion:
        return PolicyVersion(FOREIGN_ATTEMPT + self.era.attempt, self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyHistory:
    """Which versions lie on the history of the living run.

    ``base_steps[a]`` is the step at which attempt ``a`` began: 0 for a new run, the restored step for a resumed one.
    """

    base_steps: tuple[int, ...]

    @property
    def attempt(self) -> int:
        return len(self.base_steps) - 1

    def holds(self, version: PolicyVersion) -> bool:
        """True unless the version belongs to a branch that a later attempt abandoned."""
        return version.attempt <= self.attempt and all(
            version.step <= base for base in self.base_steps[version.attempt + 1 :]
        )

    def age_steps(self, version: PolicyVersion, step: int) -> int | None:
        """Optimizer steps from ``version`` to ``step`` on this history; None off the branch, and for a version of a
        step that is still to come, which nobody can have run.
        """
        return step - version.step if version.step <= step and self.holds(version) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question. ``prompt_id`` is the same in every epoch and after every restart.

    ``payload`` is what the task needs to score an answer; it never leaves the searcher.
    """

    prompt_id: str
    task: str
    token_ids: TokenIds
    payload: Mapping[str, str] = field(default_factory=dict)


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # one of the end-of-sequence ids; the id is the last token of the completion
    LENGTH = "length"  # truncated by ``max_new_tokens`` or by the model's length
    ABORT = "abort"  # the engine gave up on it; never becomes a rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpan:
    """Tokens ``start`` (included) to ``end`` (excluded) of a completion were written by ``version``."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine returns for one sample of a prompt."""

    token_ids: TokenIds
    stop_reason: StopReason
    spans: tuple[PolicySpan, ...]
    behaviour_logprobs: Floats | None = None


@dataclass(frozen=True, order=True, slots=True)
class RolloutId:
    """Unique for ever: the searcher's incarnation (a new one for each start) and a sequence number within it."""

    searcher: str
    sequence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One scored completion: the stored unit.

    ``token_ids`` is the completion alone, the EOS included. ``behaviour_logprobs`` (nats, one a token) is present
    only where a searcher was asked for it. ``reference_logprob`` is the sum over the completion in nats at the
    objective's temperature, valid for ``reference_version`` only.
    """

    rollout_id: RolloutId
    token_ids: TokenIds
    reward: float
    stop_reason: StopReason
    spans: tuple[PolicySpan, ...]
    source: str
    behaviour_logprobs: Floats | None = None
    reference_logprob: float | None = None
    reference_version: int | None = None

    @property
    def version(self) -> PolicyVersion:
        """The newest policy that wrote a part of it; for an empty completion, the policy that chose to stop."""
        return max(span.version for span in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """What a searcher sends: all its completions of one prompt from one visit."""

    prompt_id: str
    prompt_token_ids: TokenIds
    rollouts: tuple[Rollout, ...]
    lease: int = -1  # the lease that the visit belongs to; -1 where nobody leases prompts


@dataclass(frozen=True, order=True, slots=True)
class LogPosition:
    """A place between two records of a shard's log: a segment file's number and a byte offset in it."""

    segment: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainGroup:
    """K rollouts drawn from one prompt's pool: the atom of training.

    Equal completions are drawn as copies of one rollout: ``copies[i]`` says how often ``rollouts[i]`` was drawn, and
    the copies sum to K. Training on one rollout of weight 3 equals training on three equal ones.
    """

    prompt_id: str
    prompt_token_ids: TokenIds
    rollouts: tuple[Rollout, ...]
    copies: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens in the packed microbatch: the prompt is repeated for each distinct completion."""
        return sum(len(self.prompt_token_ids) + len(r.token_ids) for r in self.rollouts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicrobatch:
    """Sequences laid end to end. It carries its own index, so no order of rows is implied.

    Position t of sequence s predicts token t + 1 of the same sequence: ``labels[t] = tokens[t + 1]`` where
    ``response[t]`` is true (token t + 1 belongs to the completion), 0 elsewhere. The last entry of ``cu_seqlens`` may
    close a run of padding that belongs to no sequence (``sequence_index`` = -1).
    """

    tokens: TokenIds  # [T]
    labels: TokenIds  # [T]
    positions: TokenIds  # [T] index within its sequence
    response: npt.NDArray[np.bool_]  # [T]
    sequence_index: TokenIds  # [T] in 0..S-1, or -1
    cu_seqlens: TokenIds  # [S + 1], or [S + 2] with padding
    group_index: TokenIds  # [S] in 0..G-1
    copies: Floats  # [S]
    reward: Floats  # [S]
    reference_logprob: npt.NDArray[np.float64]  # [S] nats, NaN where it is not known
    behaviour_logprob: Floats  # [T] nats, of ``labels[t]``; NaN where it is not known or nothing is predicted
    n_groups: int
    split_group: int = -1  # >= 0: a part of one group; the microbatches of equal number hold it whole

    @property
    def n_sequences(self) -> int:
        return len(self.group_index)


class Action(StrEnum):
    """What all ranks do next."""

    TRAIN = "train"
    WAIT = "wait"
    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortPlan:
    """The broadcast group that brings a version to a cohort of searchers: who sends, who receives."""

    epoch: int  # the number of the group; grows whenever a membership changes, and is never used again
    replica: int  # the data-parallel replica whose stage leaders send
    searchers: tuple[str, ...]
    workers: tuple[int, ...]  # of each searcher's engine; world size of the group = senders + their sum


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishPlan:
    """One round of bringing a version to searchers, and the store where its members meet."""

    round: int  # never used again
    host: str
    port: int
    cohorts: tuple[CohortPlan, ...]  # a replica serves its own one after another
    epochs: tuple[int, ...]  # of all groups that stand; who is in another leaves it


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Rank 0's decision for one iteration of the loop; every rank follows it and decides nothing itself."""

    action: Action
    step: int  # the optimizer step that a ``train`` action will complete
    seed: int
    save: bool = False  # save after this step
    finish_save: bool = False  # every rank has written its part of the save in flight: let it count
    publish: PublishPlan | None = None  # publish the policy as it is, before the action
    exit_code: int = 0  # with ``stop``
    complete: bool = False  # with ``stop``: the run is at its end, not this attempt alone


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """What a shard tells before a plan is made: counts only, never rollouts."""

    n_prompts: int  # prompts with at least one rollout that may be drawn
    n_recent: int  # of them, prompts with a recent rollout
    n_fresh: int  # prompts with a visit as recent, by whatever policy, after which nothing of them was trained on
    n_rollouts: int
    bytes: int
    n_exhausted: int = 0  # other prompts: all their rollouts were part of ``buffer.max_reuse`` steps


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """Where every rollout is. ``generated`` is counted by the searchers before they send.

    generated = in_flight + held_untrained + trained + discarded + lost, always.
    """

    generated: int
    in_flight: int
    held_untrained: int
    trained: int
    duplicate: int
    evicted_untrained: int
    invalid: int
    lost: int

    @property
    def discarded(self) -> int:
        return self.duplicate + self.evicted_untrained + self.invalid

    @property
    def gap(self) -> int:
        """0 when the ledger adds up."""
        return self.generated - (self.in_flight + self.held_untrained + self.trained + self.discarded + self.lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
    """How a searcher samples one prompt."""

    n: int
    temperature: float
    top_p: float
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    seed: int | None = None


class Engine(Protocol):
    """An inference engine: submit prompts, step, collect groups of completions.

    ``step`` returns the prompts whose n completions have all finished, as (request id, completions in sample order).
    """

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def n_unfinished(self) -> int:
        """Prompts that were submitted and are neither returned nor aborted."""
        ...

    def submit(self, request_id: str, prompt_token_ids: TokenIds, sampling: SamplingSettings) -> None: ...

    def step(self) -> Sequence[tuple[str, tuple[Completion, ...]]]: ...

    def abort_all(self) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back, without adding special tokens of its own."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> TokenIds: ...

    def decode(self, token_ids: TokenIds) -> str:
        """The text of ``token_ids`` without end-of-sequence and padding tokens."""
        ...
