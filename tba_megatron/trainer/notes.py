"""What ranks tell each other at the edges of a step: counts, never rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.ledger import ShardCounts
from tba_megatron.buffer.rows import version_of
from tba_megatron.rollout_batch import STOP_REASONS, Ints
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
    messages: MessageCounts = MessageCounts()
    failure: str = ""  # why this rank cannot go on; every rank ends with this line


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawFacts:
    """What one shard gave to a step. Copies are counted, so the numbers add up to K for each group."""

    ages: Counter[int]  # optimizer steps between the newest policy that wrote a rollout and the one that learns
    off_branch: int
    truncated: int
    empty: int
    with_replacement: int  # groups
    equal_reward: int  # groups
    short_recent: int  # prompts of the whole step
    repeated_prompts: int  # of the whole step
    tokens: int  # in this replica's microbatches


def draw_facts(draw: Draw, versions: Ints, history: PolicyHistory, step: int, tokens: int) -> DrawFacts:
    """The facts of a draw for the policy that has made ``step`` steps; ``versions`` [S] are ``version_code``s."""
    batch = draw.batch
    ages: Counter[int] = Counter()
    off_branch = 0
    codes, owner = np.unique(versions, return_inverse=True)
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
        truncated=int(batch.copies_S[batch.stop_reason_S == _LENGTH].sum()),
        empty=int(batch.copies_S[batch.length_S == 0].sum()),
        with_replacement=draw.with_replacement,
        equal_reward=draw.equal_reward_groups,
        short_recent=draw.short_recent,
        repeated_prompts=draw.repeated_prompts,
        tokens=tokens,
    )
