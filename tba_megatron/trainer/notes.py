"""What ranks tell each other at the edges of a step: counts, never rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tba_megatron.buffer.ledger import ShardCounts
from tba_megatron.buffer.sampler import Draw
from tba_megatron.types import PolicyHistory, ShardReport, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A rank's word at the top of an iteration. Only DP leaders have a report."""

    signal: int = 0
    report: ShardReport | None = None
    counts: ShardCounts | None = None
    arrived: dict[int, int] = field(default_factory=dict)  # lease -> groups since the last note
    save_written: bool = False  # a save is in flight, and this rank has written its part
    refused: int = 0  # messages that were no rollouts of this run


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawFacts:
    """What one shard gave to a step. Copies are counted, so the numbers add up to K for each group."""

    ages: Counter[int]  # optimizer steps between the newest policy that wrote a rollout and the one that learns
    off_branch: int
    truncated: int
    empty: int
    with_replacement: int  # groups
    tokens: int  # in this replica's microbatches


def draw_facts(draw: Draw, history: PolicyHistory, step: int, tokens: int) -> DrawFacts:
    """The facts of a draw for the policy that has made ``step`` steps."""
    ages: Counter[int] = Counter()
    off_branch = truncated = empty = 0
    for group in draw.groups:
        for rollout, copies in zip(group.rollouts, group.copies, strict=True):
            age = history.age_steps(rollout.version, step)
            if age is None:
                off_branch += copies
            else:
                ages[age] += copies
            truncated += copies * (rollout.stop_reason is StopReason.LENGTH)
            empty += copies * (len(rollout.token_ids) == 0)
    return DrawFacts(
        ages=ages,
        off_branch=off_branch,
        truncated=truncated,
        empty=empty,
        with_replacement=draw.with_replacement,
        tokens=tokens,
    )
