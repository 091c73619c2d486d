"""Which rollouts a shard refuses, and why."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.rows import MOST_ATTEMPT, MOST_STEP
from tba_megatron.ragged import offsets, owners
from tba_megatron.rollout_batch import NO_BEHAVIOUR, NO_VERSION, STOP_REASONS, RolloutBatch
from tba_megatron.types import StopReason

# In the order in which they are looked for; metrics are named by them, ``ledger/invalid_spans`` for one.
REASONS = (
    "prompt_empty",  # nothing would predict the first token of the completion
    "prompt_differs",  # the sender has another tokenizer or template
    "reward_not_finite",
    "behaviour_logprobs_missing",
    "behaviour_logprobs_length",
    "behaviour_logprobs_not_finite",
    "reference_logprob_missing",
    "reference_logprob_not_finite",
    "reference_version_missing",
    "spans",
    "token_negative",
    "token_unknown",  # the model has no row for it; a model with more rows than this one can write such
    "aborted",
    "truncated",
)
VALID = -1
ANY_TOKEN = np.iinfo(np.int32).max  # as a vocabulary size
_ABORT, _LENGTH = STOP_REASONS.index(StopReason.ABORT), STOP_REASONS.index(StopReason.LENGTH)

Reasons_S = npt.NDArray[np.int8]


def invalid_reasons(
    batch: RolloutBatch,
    *,
    drop_truncated: bool,
    vocab_size: int = ANY_TOKEN,
    needs_behaviour: bool = False,
    needs_reference: bool = False,
) -> Reasons_S:
    """[S] the first law that each rollout breaks, as an index into ``REASONS``, or ``VALID``.

    The laws about prompts are the shard's: it knows which prompts it holds.
    """
    reference_known = ~np.isnan(batch.reference_S)
    has_version = batch.reference_version_S != NO_VERSION
    broken = {
        "reward_not_finite": ~np.isfinite(batch.reward_S),
        "behaviour_logprobs_missing": needs_behaviour & (batch.behaviour_length_S == NO_BEHAVIOUR),
        "behaviour_logprobs_length": (batch.behaviour_length_S != NO_BEHAVIOUR)
        & (batch.behaviour_length_S != batch.length_S),
        "behaviour_logprobs_not_finite": _not_finite(batch),
        "reference_logprob_missing": needs_reference & ~reference_known & ~has_version,
        "reference_logprob_not_finite": np.where(reference_known, np.isinf(batch.reference_S), has_version),
        "reference_version_missing": reference_known & ~has_version,
        "spans": ~_tiled(batch),
        "token_negative": _has_token(batch, -(1 << 31), -1),
        "token_unknown": _has_token(batch, vocab_size, ANY_TOKEN),
        "aborted": batch.stop_reason_S == _ABORT,
        "truncated": (batch.stop_reason_S == _LENGTH) & drop_truncated,
    }
    reasons_S = np.full(batch.n_rollouts, VALID, np.int8)
    for reason, broken_S in reversed(broken.items()):
        reasons_S[broken_S] = REASONS.index(reason)
    return reasons_S


def _not_finite(batch: RolloutBatch) -> npt.NDArray[np.bool_]:
    wrong = np.flatnonzero(~np.isfinite(batch.behaviour_B))
    broken_S = np.zeros(batch.n_rollouts, np.bool_)
    if len(wrong):
        ends = offsets(np.maximum(batch.behaviour_length_S, 0))[1:]
        broken_S[np.searchsorted(ends, wrong, side="right")] = True
    return broken_S


def _has_token(batch: RolloutBatch, low: int, high: int) -> npt.NDArray[np.bool_]:
    """[S] whether a completion has a token of ``low`` to ``high``."""
    tokens, has_S = batch.token_ids_T, np.zeros(batch.n_rollouts, np.bool_)
    if tokens.size and int(tokens.min()) <= high and int(tokens.max()) >= low:
        wrong = np.flatnonzero((tokens >= low) & (tokens <= high))
        has_S[np.searchsorted(offsets(batch.length_S)[1:], wrong, side="right")] = True
    return has_S


def _tiled(batch: RolloutBatch) -> npt.NDArray[np.bool_]:
    """[S] true if the spans cover 0..n_tokens in order. Only an empty completion has an empty span, its only one.

    A policy that wrote no token must not appear: it would make the rollout look younger than it is.
    """
    start_P, end_P = batch.spans_P[:, 2], batch.spans_P[:, 3]
    if (batch.span_count_S == 1).all():
        return (start_P == 0) & (end_P == batch.length_S) & _is_version(batch.spans_P)
    ends = offsets(batch.span_count_S)
    has_S = batch.span_count_S > 0
    owner_P = owners(batch.span_count_S)
    before_P = np.concatenate([np.zeros(1, np.int64), end_P])[:-1]
    before_P[ends[:-1][has_S]] = 0
    empty_P = (batch.length_S[owner_P] == 0) & (start_P == 0) & (end_P == 0)
    right_P = _is_version(batch.spans_P) & (empty_P | ((start_P == before_P) & (start_P < end_P)))
    tiled_S = has_S & (np.bincount(owner_P, ~right_P, batch.n_rollouts) == 0)
    tiled_S[has_S] &= end_P[ends[1:][has_S] - 1] == batch.length_S[has_S]
    return tiled_S & ((batch.length_S > 0) | (batch.span_count_S == 1))


def _is_version(spans_P: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    attempt, step = spans_P[:, 0], spans_P[:, 1]
    return (attempt >= 0) & (attempt < MOST_ATTEMPT) & (step >= 0) & (step < MOST_STEP)
