"""Rollouts as numpy arrays and back, so that a shard can be written without pickle.

Ragged columns are one flat array and the offsets between which each row lies; strings are UTF-8 in such a
column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutId, StopReason

Columns = dict[str, npt.NDArray[Any]]
_STOP_REASONS = tuple(StopReason)


def put_ragged(columns: Columns, name: str, rows: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> None:
    columns[name] = np.concatenate(rows).astype(dtype, copy=False) if rows else np.zeros(0, dtype)
    columns[f"{name}_offsets"] = np.cumsum([0, *map(len, rows)], dtype=np.int64)


def get_ragged(columns: Mapping[str, npt.NDArray[Any]], name: str) -> list[npt.NDArray[Any]]:
    flat, offsets = columns[name], columns[f"{name}_offsets"].tolist()
    return [flat[start:end] for start, end in pairwise(offsets)]


def put_strings(columns: Columns, name: str, strings: Sequence[str]) -> None:
    put_ragged(columns, name, [np.frombuffer(s.encode(), np.uint8) for s in strings], np.uint8)


def get_strings(columns: Mapping[str, npt.NDArray[Any]], name: str) -> list[str]:
    return [row.tobytes().decode() for row in get_ragged(columns, name)]


def _put_names(columns: Columns, name: str, names: Sequence[str]) -> None:
    """A string column with few distinct values: each once, and an index."""
    table = list(dict.fromkeys(names))
    index = {value: i for i, value in enumerate(table)}
    put_strings(columns, f"{name}_table", table)
    columns[name] = np.array([index[value] for value in names], np.int32)


def _get_names(columns: Mapping[str, npt.NDArray[Any]], name: str) -> list[str]:
    table = get_strings(columns, f"{name}_table")
    return [table[i] for i in columns[name].tolist()]


def rollouts_to_columns(rollouts: Sequence[Rollout]) -> Columns:
    """All fields of ``rollouts``; exact."""
    columns: Columns = {}
    _put_names(columns, "searcher", [r.rollout_id.searcher for r in rollouts])
    _put_names(columns, "source", [r.source for r in rollouts])
    columns["sequence"] = np.array([r.rollout_id.sequence for r in rollouts], np.int64)
    columns["reward"] = np.array([r.reward for r in rollouts], np.float64)
    columns["stop_reason"] = np.array([_STOP_REASONS.index(r.stop_reason) for r in rollouts], np.int8)
    put_ragged(columns, "token_ids", [r.token_ids for r in rollouts], np.int32)

    behaviour = [r.behaviour_logprobs for r in rollouts]
    empty = np.zeros(0, np.float32)
    columns["has_behaviour"] = np.array([b is not None for b in behaviour], np.bool_)
    put_ragged(columns, "behaviour", [empty if b is None else b for b in behaviour], np.float32)

    columns["has_reference"] = np.array([r.reference_logprob is not None for r in rollouts], np.bool_)
    columns["reference_logprob"] = np.array([r.reference_logprob or 0.0 for r in rollouts], np.float64)
    columns["reference_version"] = np.array([r.reference_version or 0 for r in rollouts], np.int64)

    spans = [[(s.version.attempt, s.version.step, s.start, s.end) for s in r.spans] for r in rollouts]
    put_ragged(columns, "spans", [np.array(s, np.int64).reshape(-1, 4) for s in spans], np.int64)
    return columns


def rollouts_from_columns(columns: Mapping[str, npt.NDArray[Any]]) -> list[Rollout]:
    """The rollouts that ``rollouts_to_columns`` was given. Their arrays are views of the columns."""
    searchers, sources = _get_names(columns, "searcher"), _get_names(columns, "source")
    tokens, behaviours = get_ragged(columns, "token_ids"), get_ragged(columns, "behaviour")
    spans = get_ragged(columns, "spans")
    scalars = {
        name: columns[name].tolist()
        for name in (
            "sequence",
            "reward",
            "stop_reason",
            "has_behaviour",
            "has_reference",
            "reference_logprob",
            "reference_version",
        )
    }
    return [
        Rollout(
            rollout_id=RolloutId(searchers[i], scalars["sequence"][i]),
            token_ids=tokens[i],
            reward=scalars["reward"][i],
            stop_reason=_STOP_REASONS[scalars["stop_reason"][i]],
            spans=tuple(
                PolicySpan(version=PolicyVersion(attempt, step), start=start, end=end)
                for attempt, step, start, end in spans[i].tolist()
            ),
            source=sources[i],
            behaviour_logprobs=behaviours[i] if scalars["has_behaviour"][i] else None,
            reference_logprob=scalars["reference_logprob"][i] if scalars["has_reference"][i] else None,
            reference_version=scalars["reference_version"][i] if scalars["has_reference"][i] else None,
        )
        for i in range(len(tokens))
    ]
