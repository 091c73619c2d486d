"""The metrics that every optimizer step has, whatever its groups came from."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tba_megatron.trainer.step import Update

# Metric: the statistic of the loss that it is. What an objective does not read, it does not report.
_STATISTICS = {
    "reward/train_mean": "reward",
    "reward/equal_groups_frac": "equal_rewards",
    "optim/loss": "loss",
    "optim/tau": "tau",
    "policy/kl_ref": "kl",
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
    if "log_z_square" in statistics:
        variance = statistics["log_z_square"] - statistics["log_z"] ** 2
        metrics["policy/log_z_std"] = math.sqrt(max(0.0, variance))
    if "log_z_error_square" in statistics:
        metrics["policy/log_z_error"] = math.sqrt(statistics["log_z_error_square"])
    return metrics | _drift_metrics(statistics)


def _drift_metrics(statistics: Mapping[str, float]) -> dict[str, float]:
    """How far the policy is from those that wrote what it learns from; empty where no rollout says what they thought.

    ``policy/ess_frac`` is the effective sample size over the number of samples, were each weighed by pi / mu.
    """
    if not statistics.get("drift_rollouts"):
        return {}
    metrics = {
        "policy/drift": statistics["drift"],
        "policy/abs_drift": statistics["abs_drift"],
        "policy/ess_frac": statistics["ratio"] ** 2 / statistics["ratio_square"],
    }
    if statistics["negative_push"]:
        metrics["policy/lost_push_frac"] = statistics["lost_push"] / statistics["negative_push"]
    return metrics
