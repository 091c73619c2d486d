"""The metrics that every optimizer step has, whatever its groups came from."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tba_megatron.loss.statistics import EDGES
from tba_megatron.metrics import Histogram
from tba_megatron.trainer.step import Update

# Metric: the statistic of the loss that it is. What an objective does not read, it does not report.
_STATISTICS = {
    "reward/train_mean": "reward",
    "reward/equal_groups_frac": "equal_rewards",
    "optim/loss": "loss",
    "optim/tau": "tau",
    "policy/entropy": "entropy",
    "policy/kl_ref": "kl",
    "policy/kl_ref_per_token": "kl_per_token",
    "policy/log_z": "log_z",
    "policy/residual_square": "residual_square",
    "policy/abs_advantage": "abs_advantage",
    "policy/clip_frac": "clipped",
    "policy/preferred_frac": "preferred",
    "rollout/len_mean": "completion_tokens",
    "rollout/len_max": "max_completion_tokens",
}


def update_metrics(done: Update, skipped_total: int) -> dict[str, float]:
    """By the names they have in every log."""
    statistics = done.statistics
    metrics = {name: statistics[statistic] for name, statistic in _STATISTICS.items() if statistic in statistics}
    metrics |= {"optim/grad_norm": done.grad_norm, "optim/lr": done.learning_rate, "optim/skipped_total": skipped_total}
    spreads = {"policy/log_z_std": "log_z", "policy/kl_ref_std": "kl"}
    metrics |= {name: _spread(statistics, of) for name, of in spreads.items() if f"{of}_square" in statistics}
    if "log_z_error_square" in statistics:
        metrics["policy/log_z_error"] = math.sqrt(statistics["log_z_error_square"])
    return metrics | _drift_metrics(statistics)


def update_histograms(done: Update) -> dict[str, Histogram]:
    """Of each rollout of the step: ``policy/residual_nats``, or where an objective has none ``policy/advantage``."""
    return {f"policy/{name}": Histogram(edges=EDGES, counts=tuple(counts)) for name, counts in done.histograms.items()}


def _spread(statistics: Mapping[str, float], of: str) -> float:
    """The standard deviation of what has the means ``of`` and, of its square, ``of``_square."""
    return math.sqrt(max(0.0, statistics[f"{of}_square"] - statistics[of] ** 2))


def _drift_metrics(statistics: Mapping[str, float]) -> dict[str, float]:
    """How far the policy is from those that wrote what it learns from; empty where no rollout says what they thought.

    ``policy/ess_frac`` is the effective sample size over the number of samples, were each weighed by pi / mu.
    """
    if not statistics.get("drift_rollouts"):
        return {}
    metrics = {
        "policy/drift": statistics["drift"],
        "policy/drift_std": _spread(statistics, "drift"),
        "policy/drift_per_token": statistics["drift_per_token"],
        "policy/abs_drift": statistics["abs_drift"],
        "policy/ess_frac": statistics["ratio"] ** 2 / statistics["ratio_square"],
    }
    if statistics["negative_push"]:
        metrics["policy/lost_push_frac"] = statistics["lost_push"] / statistics["negative_push"]
    return metrics
