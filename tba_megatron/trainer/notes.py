"""What ranks tell each other at the edges of a step: counts, never rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.ledger import ShardCounts
from tba_megatron.buffer.rows import RowColumns, version_of
from tba_megatron.rollout_batch import STOP_REASONS
from tba_megatron.types import PolicyHistory, ShardReport, StopReason

_LENGTH = STOP_REASONS.index(StopReason.LENGTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageCounts:
    """What came in to a shard and was no new batch of rollouts, in messages; and the bytes that wait to be taken in."""

    refused: int = 0  # not of this run, or no rollouts
    corrupt: int = 0  # with a wrong checksum; they are sent again
    duplicates: int = 0  # sent again although they had arrived
    gaps: int = 0  # ahead of one that was lost; they are sent again
    waiting_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A rank's word at the top of an iteration. Only DP leaders have a report."""

    signal: int = 0
    report: ShardReport | None = None
    counts: ShardCounts | None = None
    arrived: dict[int, int] = field(default_factory=dict)  # lease -> groups since the last note
    save_written: bool = False  # a save is in flight, and this rank has written its part
    received_rollouts: int = 0  # since the last note, whatever became of them
    received_tokens: int = 0  # of their completions
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


def draw_facts(draw: Draw, rows: RowColumns, history: PolicyHistory, step: int, tokens: int) -> DrawFacts:
    """The facts of a draw, which ``rows`` count as trained, for the policy that has made ``step`` steps."""
    batch = draw.batch
    ages: Counter[int] = Counter()
    off_branch = 0
    codes, owner = np.unique(rows.version[draw.rows], return_inverse=True)
    copies = np.bincount(owner, batch.copies_S, len(codes)).astype(np.int64)
    for code, n in zip(codes.tolist(), copies.tolist(), strict=True):
        age = history.age_steps(version_of(code), step)
        if age is None:
            off_branch += n
        else:
            ages[age] += n
    return DrawFacts(
        ages=ages,
        off_branch=off_branch,
        first_time=int(batch.copies_S[rows.uses[draw.rows] == 1].sum()),
        completion_tokens=int(np.dot(batch.copies_S.astype(np.int64), batch.length_S)),
        truncated=int(batch.copies_S[batch.stop_reason_S == _LENGTH].sum()),
        empty=int(batch.copies_S[batch.length_S == 0].sum()),
        with_replacement=draw.with_replacement,
        equal_reward=draw.equal_reward_groups,
        short_recent=draw.short_recent,
        repeated_prompts=draw.repeated_prompts,
        tokens=tokens,
    )
