"""Which rollouts a shard refuses, and why."""

from __future__ import annotations

import math

import numpy as np

from tba_megatron.types import PolicySpan, Rollout, StopReason


def invalid_reason(rollout: Rollout, *, drop_truncated: bool) -> str | None:
    """The name of the first law that ``rollout`` breaks, or None. The name is a key of the metrics."""
    n_tokens = len(rollout.token_ids)
    logprobs = rollout.behaviour_logprobs
    reference = rollout.reference_logprob
    if not math.isfinite(rollout.reward):
        return "reward_not_finite"
    if logprobs is not None and len(logprobs) != n_tokens:
        return "behaviour_logprobs_length"
    if logprobs is not None and not np.isfinite(logprobs).all():
        return "behaviour_logprobs_not_finite"
    if reference is not None and not math.isfinite(reference):
        return "reference_logprob_not_finite"
    if (reference is None) != (rollout.reference_version is None):
        return "reference_version_missing"
    if not _tiles(rollout.spans, n_tokens):
        return "spans"
    if rollout.stop_reason is StopReason.ABORT:
        return "aborted"
    if drop_truncated and rollout.stop_reason is StopReason.LENGTH:
        return "truncated"
    return None


def _tiles(spans: tuple[PolicySpan, ...], n_tokens: int) -> bool:
    """True if the spans cover 0..n_tokens in order. Only an empty completion has an empty span, its only one.

    A policy that wrote no token must not appear: it would make the rollout look younger than it is.
    """
    if n_tokens == 0:
        return [(s.start, s.end) for s in spans] == [(0, 0)]
    ends = [0, *(s.end for s in spans)]
    return ends[-1] == n_tokens and all(
        span.start == before < span.end for span, before in zip(spans, ends, strict=False)
    )
