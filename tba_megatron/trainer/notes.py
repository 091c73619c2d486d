"""What ranks tell each other at the edges of a step: counts, never rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.ledger import ShardCounts
from tba_megatron.buffer.rows import RowColumns, version_of
from tba_megatron.ragged import Ints
from tba_megatron.rollout_batch import STOP_REASONS, RolloutBatch
from tba_megatron.types import PolicyHistory, ShardReport, StopReason

_LENGTH = STOP_REASONS.index(StopReason.LENGTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageCounts:
    """What came in to a shard and was no new batch of rollouts, in messages; and the bytes that wait to be taken in."""

    refused: int = 0  # not of this run, or no rollouts
    corrupt: int = 0  # with a wrong checksum; they are sent again
    duplicates: int = 0  # sent again although they had arrived
    gaps: int = 0  # ahead of one that was lost; they are sent again
    forgotten: int = 0  # acknowledged by an earlier attempt, whose shard has lost them
    waiting_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """What came in from one source, whatever became of it."""

    rollouts: int = 0
    reward_sum: float = 0.0  # of finite rewards
    rewards: int = 0  # that are finite
    completion_tokens: int = 0

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(
            rollouts=self.rollouts + other.rollouts,
            reward_sum=self.reward_sum + other.reward_sum,
            rewards=self.rewards + other.rewards,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceDraw:
    """What one shard gave to a step from one source. Copies are counted."""

    rollouts: int
    reward_sum: float
    completion_tokens: int
    first_time: int  # of rollouts that were part of no step before
    off_branch: int
    ages: Counter[int]  # optimizer steps, of all others


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A rank's word at the top of an iteration. Only DP leaders have a report."""

    signal: int = 0
    report: ShardReport | None = None
    counts: ShardCounts | None = None
    arrived: dict[int, int] = field(default_factory=dict)  # lease -> groups since the last note
    save_written: bool = False  # a save is in flight, and this rank has written its part
    received_by_source: dict[str, SourceCounts] = field(default_factory=dict)  # since the last note
    messages: MessageCounts = MessageCounts()
    sending: bool = False  # the last snapshot of this rank has not left
    snapshot_s: float = 0.0  # how long training stood still for it
    probe_s: float = 0.0  # and for the probe
    probe: tuple[str, tuple[float, ...]] | None = None  # a version, and its log-probs of the probe
    failure: str = ""  # why this rank cannot go on; every rank ends with this line


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawFacts:
    """What one shard gave to a step. Copies are counted, so the numbers add up to K for each group."""

    ages: Counter[int]  # optimizer steps between the newest policy that wrote a rollout and the one that learns
    off_branch: int
    first_time: int  # of rollouts that were part of no step before
    completion_tokens: int
    truncated: int
    empty: int
    with_replacement: int  # groups
    equal_reward: int  # groups
    short_recent: int  # prompts of the whole step
    repeated_prompts: int  # of the whole step
    tokens: int  # in this replica's microbatches
    by_source: dict[str, SourceDraw] = field(default_factory=dict)


def received_by_source(batch: RolloutBatch) -> dict[str, SourceCounts]:
    """What ``batch`` brings, by source."""
    number_S = batch.source_S
    if not len(number_S):
        return {}
    finite_S = np.isfinite(batch.reward_S)
    reward_S = batch.reward_S if finite_S.all() else np.where(finite_S, batch.reward_S, 0.0)
    n = len(batch.names)
    rollouts = np.bincount(number_S, minlength=n)
    columns = zip(
        batch.names,
        rollouts.tolist(),
        np.bincount(number_S, reward_S, n).tolist(),
        np.bincount(number_S, finite_S, n).astype(np.int64).tolist(),
        np.bincount(number_S, batch.length_S, n).astype(np.int64).tolist(),
        strict=True,
    )
    return {
        name: SourceCounts(rollouts=count, reward_sum=reward, rewards=rewards, completion_tokens=tokens)
        for name, count, reward, rewards, tokens in columns
        if count
    }


def draw_facts(draw: Draw, rows: RowColumns, history: PolicyHistory, step: int, tokens: int) -> DrawFacts:
    """The facts of a draw, which ``rows`` count as trained, for the policy that has made ``step`` steps."""
    batch = draw.batch
    first_S = rows.uses[draw.rows] == 1
    age_S = _ages(rows.version[draw.rows], history, step)
    by_source = {
        batch.names[number]: _source_draw(batch, batch.source_S == number, first_S, age_S)
        for number in np.unique(batch.source_S).tolist()
    }
    ages: Counter[int] = Counter()
    for one in by_source.values():
        ages.update(one.ages)
    return DrawFacts(
        ages=ages,
        off_branch=sum(one.off_branch for one in by_source.values()),
        first_time=sum(one.first_time for one in by_source.values()),
        completion_tokens=sum(one.completion_tokens for one in by_source.values()),
        truncated=int(batch.copies_S[batch.stop_reason_S == _LENGTH].sum()),
        empty=int(batch.copies_S[batch.length_S == 0].sum()),
        with_replacement=draw.with_replacement,
        equal_reward=draw.equal_reward_groups,
        short_recent=draw.short_recent,
        repeated_prompts=draw.repeated_prompts,
        tokens=tokens,
        by_source=by_source,
    )


def _ages(codes: Ints, history: PolicyHistory, step: int) -> Ints:
    """[S] in optimizer steps; -1 off the branch."""
    versions, version_S = np.unique(codes, return_inverse=True)
    ages = [history.age_steps(version_of(code), step) for code in versions.tolist()]
    return np.array([-1 if age is None else age for age in ages], np.int64)[version_S]


def _source_draw(
    batch: RolloutBatch, own_S: npt.NDArray[np.bool_], first_S: npt.NDArray[np.bool_], age_S: Ints
) -> SourceDraw:
    """Of the rollouts ``own_S`` [S] of a draw."""
    copies_S, age_S = batch.copies_S[own_S].astype(np.int64), age_S[own_S]
    ages, owner = np.unique(age_S, return_inverse=True)
    by_age = dict(zip(ages.tolist(), np.bincount(owner, copies_S, len(ages)).astype(np.int64).tolist(), strict=True))
    return SourceDraw(
        rollouts=int(copies_S.sum()),
        reward_sum=float(np.dot(copies_S, batch.reward_S[own_S])),
        completion_tokens=int(np.dot(copies_S, batch.length_S[own_S])),
        first_time=int(copies_S[first_S[own_S]].sum()),
        off_branch=by_age.pop(-1, 0),
        ages=Counter(by_age),
    )
