"""The metrics that every optimizer step has, whatever its groups came from."""

from __future__ import annotations

from tba_megatron.trainer.step import Update


def update_metrics(done: Update, skipped_total: int) -> dict[str, float]:
    """By the names they have in every log."""
    statistics = done.statistics
    return {
        "reward/train_mean": statistics["reward"],
        "optim/loss": statistics["loss"],
        "optim/grad_norm": done.grad_norm,
        "optim/lr": done.learning_rate,
        "optim/skipped_total": skipped_total,
        "policy/kl_ref": statistics["kl"],
        "policy/log_z": statistics["log_z"],
        "policy/residual_square": statistics["residual_square"],
        "policy/abs_advantage": statistics["abs_advantage"],
        "reward/equal_groups_frac": statistics["equal_rewards"],
        "rollout/len_mean": statistics["completion_tokens"],
        "rollout/len_max": statistics["max_completion_tokens"],
    }
