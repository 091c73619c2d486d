"""Metrics of what a step drew, of the shards, of their messages, and of the ledger."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

from tba_megatron.metrics import Histogram
from tba_megatron.trainer.notes import DrawFacts, MessageCounts
from tba_megatron.types import LedgerCounts, ShardReport

AGE_EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)


def age_histogram(ages: Mapping[int, int]) -> Histogram:
    """How many have which age, in optimizer steps; the last bin holds what is older too."""
    counts = [0] * (len(AGE_EDGES) - 1)
    for age, count in ages.items():
        counts[min(bisect_right(AGE_EDGES, age), len(counts)) - 1] += count
    return Histogram(edges=AGE_EDGES, counts=counts)


def quantile(counts: Mapping[int, int], q: float) -> int:
    """The smallest value at or below which a share ``q`` of the counted items lies; 0 for none."""
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= q * total:
            return value
    return 0


def draw_metrics(drawn: Sequence[DrawFacts], ages: Counter[int], seconds: float) -> dict[str, float]:
    """What the shards gave to one step; ``ages`` are those of all of them."""
    copies = max(1, ages.total() + sum(f.off_branch for f in drawn))
    return {
        "rollout/len_trained": sum(f.completion_tokens for f in drawn) / copies,
        "buffer/first_time_share": sum(f.first_time for f in drawn) / copies,
        "rollout/truncated_frac": sum(f.truncated for f in drawn) / copies,
        "rollout/empty_frac": sum(f.empty for f in drawn) / copies,
        "buffer/with_replacement_groups": sum(f.with_replacement for f in drawn),
        "buffer/equal_reward_groups": sum(f.equal_reward for f in drawn),
        "buffer/short_recent_prompts": max((f.short_recent for f in drawn), default=0),
        "buffer/repeated_prompts": max((f.repeated_prompts for f in drawn), default=0),
        "age/off_branch_frac": sum(f.off_branch for f in drawn) / copies,
        "age/p50": quantile(ages, 0.5),
        "age/p95": quantile(ages, 0.95),
        "age/max": max(ages, default=0),
        "throughput/train_tok_s": sum(f.tokens for f in drawn) / seconds,
    }


def shard_metrics(reports: Sequence[ShardReport], messages: Sequence[MessageCounts]) -> dict[str, float]:
    return {
        "buffer/rollouts": sum(report.n_rollouts for report in reports),
        "buffer/prompts": sum(report.n_prompts for report in reports),
        "buffer/exhausted_prompts": sum(report.n_exhausted for report in reports),
        "buffer/bytes": sum(report.bytes for report in reports),
        "buffer/waiting_bytes": sum(m.waiting_bytes for m in messages),
        "buffer/refused_total": sum(m.refused for m in messages),
        "buffer/corrupt_total": sum(m.corrupt for m in messages),
        "buffer/forgotten_total": sum(m.forgotten for m in messages),
        "buffer/sent_again_total": sum(m.duplicates + m.gaps for m in messages),
    }


def ledger_metrics(ledger: LedgerCounts, invalid_reasons: Mapping[str, int]) -> dict[str, float]:
    return {
        **{f"ledger/invalid_{reason}": n for reason, n in invalid_reasons.items()},
        "ledger/generated": ledger.generated,
        "ledger/in_flight": ledger.in_flight,
        "ledger/held_untrained": ledger.held_untrained,
        "ledger/trained": ledger.trained,
        "ledger/duplicate": ledger.duplicate,
        "ledger/evicted_untrained": ledger.evicted_untrained,
        "ledger/invalid": ledger.invalid,
        "ledger/lost": ledger.lost,
    }
