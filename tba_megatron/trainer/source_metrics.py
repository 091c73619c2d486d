"""Metrics that tell the sources of rollouts apart: what each sent, and what of it is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tba_megatron.trainer.buffer_metrics import quantile
from tba_megatron.trainer.notes import DrawFacts, Note, SourceCounts, SourceDraw


class SourceMetrics:
    """Rank 0's sums over ranks and notes between two reports."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._received: dict[str, SourceCounts] = {}

    def absorb(self, notes: Iterable[Note]) -> None:
        for note in notes:
            for source, counts in note.received_by_source.items():
                self._received[source] = self._received.get(source, SourceCounts()) + counts

    def metrics(self, drawn: Sequence[DrawFacts]) -> dict[str, float]:
        """``source/NAME/...`` of one step and of what came in since the last call, which is forgotten.

        Empty while only one source was ever seen: metrics of all rollouts say the same then. A mean of nothing is left
        out, and so is the age of what has none: of a fixed policy, and of an abandoned branch.
        """
        received, self._received = self._received, {}
        by_source: dict[str, list[SourceDraw]] = {}
        for facts in drawn:
            for source, draw in facts.by_source.items():
                by_source.setdefault(source, []).append(draw)
        self._seen |= received.keys() | by_source.keys()
        if len(self._seen) < 2:
            return {}
        copies = sum(draw.rollouts for draws in by_source.values() for draw in draws)
        metrics: dict[str, float] = {}
        for source in sorted(self._seen):
            named = {
                **_received(received.get(source, SourceCounts())),
                **_trained(by_source.get(source, ()), copies),
            }
            metrics |= {f"source/{source}/{name}": value for name, value in named.items()}
        return metrics


def _received(counts: SourceCounts) -> dict[str, float]:
    metrics: dict[str, float] = {"received": counts.rollouts}
    if counts.rewards:
        metrics["reward_received"] = counts.reward_sum / counts.rewards
    if counts.rollouts:
        metrics["len_received"] = counts.completion_tokens / counts.rollouts
    return metrics


def _trained(draws: Sequence[SourceDraw], copies: int) -> dict[str, float]:
    """``copies`` are those of all sources."""
    own = sum(draw.rollouts for draw in draws)
    if not own:
        return {"drawn_share": 0.0}
    ages: Counter[int] = Counter()
    for draw in draws:
        ages.update(draw.ages)
    metrics: dict[str, float] = {
        "drawn_share": own / copies,
        "reward_trained": sum(draw.reward_sum for draw in draws) / own,
        "len_trained": sum(draw.completion_tokens for draw in draws) / own,
        "first_time_share": sum(draw.first_time for draw in draws) / own,
        "off_branch_frac": sum(draw.off_branch for draw in draws) / own,
    }
    if ages:
        metrics["age_p50"] = quantile(ages, 0.5)
    return metrics
