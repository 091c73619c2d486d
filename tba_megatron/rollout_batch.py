"""Rollouts as columns: the one form in which they travel, are stored, and are drawn.

A ``RolloutBatch`` is G groups of rollouts, S rollouts in all, as flat arrays: ``encode`` and ``decode`` are what a
searcher sends, what a segment file holds and what ranks exchange, without a Python object for each rollout.
T tokens of completions, B behaviour log-probs, P policy spans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tba_megatron.ragged import Ints, offsets, owners, ranges, split, take
from tba_megatron.types import (
    PolicySpan,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    RolloutId,
    StopReason,
    TrainGroup,
)
from tba_megatron.untrusted import decoded

STOP_REASONS = tuple(StopReason)
START_REFERENCE = 0  # the version of a reference that is the start model
NO_VERSION = -1  # of a reference log-prob that is not known; the log-prob itself is NaN then
MOST_SEQUENCE = 1 << 40  # rollouts of one searcher
NO_BEHAVIOUR = -1  # length of the behaviour log-probs of a rollout that has none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutBatch:
    """Columns; the suffix of a name is its length. Rollouts of one group lie together, groups in order.

    ``names`` is a table of searchers and sources, into which ``searcher_S`` and ``source_S`` point. ``copies_S`` counts
    how often a rollout was drawn; 1 where nothing was drawn.
    """

    prompt_ids: tuple[str, ...]  # [G]
    names: tuple[str, ...]
    lease_G: npt.NDArray[np.int64]  # -1 where nobody leases prompts
    size_G: npt.NDArray[np.int32]  # rollouts
    prompt_length_G: npt.NDArray[np.int32]
    prompt_tokens: npt.NDArray[np.int32]  # of all prompts, end to end
    searcher_S: npt.NDArray[np.int32]
    source_S: npt.NDArray[np.int32]
    sequence_S: npt.NDArray[np.int64]
    reward_S: npt.NDArray[np.float64]
    stop_reason_S: npt.NDArray[np.int8]  # index into STOP_REASONS
    copies_S: npt.NDArray[np.int32]
    length_S: npt.NDArray[np.int32]
    token_ids_T: npt.NDArray[np.int32]
    behaviour_length_S: npt.NDArray[np.int32]
    behaviour_B: npt.NDArray[np.float32]  # nats
    span_count_S: npt.NDArray[np.int32]
    spans_P: npt.NDArray[np.int64]  # [P, 4]: attempt, step, start, end
    reference_S: npt.NDArray[np.float64]  # nats
    reference_version_S: npt.NDArray[np.int64]

    @property
    def n_groups(self) -> int:
        return len(self.prompt_ids)

    @property
    def n_rollouts(self) -> int:
        return len(self.sequence_S)

    @property
    def n_tokens_G(self) -> Ints:
        """[G] tokens in packed microbatches: the prompt is repeated for each distinct completion."""
        lengths = np.bincount(owners(self.size_G), self.length_S, self.n_groups)
        return lengths.astype(np.int64) + self.prompt_length_G.astype(np.int64) * self.size_G

    def rollout_ids(self) -> list[RolloutId]:
        names = self.names
        pairs = zip(self.searcher_S.tolist(), self.sequence_S.tolist(), strict=True)
        return [RolloutId(names[searcher], sequence) for searcher, sequence in pairs]

    def without_reference(self) -> RolloutBatch:
        return replace(
            self,
            reference_S=np.full(self.n_rollouts, np.nan),
            reference_version_S=np.full(self.n_rollouts, NO_VERSION, np.int64),
        )

    def with_start_reference(self) -> RolloutBatch:
        """Without log-probs of a reference after a reset: each branch of a run has its own, under the same version."""
        later = self.reference_version_S > START_REFERENCE
        return replace(
            self,
            reference_S=np.where(later, np.nan, self.reference_S),
            reference_version_S=np.where(later, NO_VERSION, self.reference_version_S),
        )

    @staticmethod
    def of_groups(groups: Sequence[RolloutGroup]) -> RolloutBatch:
        """What a searcher made; every rollout once."""
        return _batch(groups, [group.lease for group in groups], None)

    @staticmethod
    def of_train_groups(groups: Sequence[TrainGroup]) -> RolloutBatch:
        """What was drawn, with its copies."""
        return _batch(groups, [-1] * len(groups), [copies for group in groups for copies in group.copies])

    def groups(self) -> list[RolloutGroup]:
        """The groups of ``of_groups``; their arrays are views of the columns."""
        return [
            RolloutGroup(prompt_id=prompt_id, prompt_token_ids=prompt, rollouts=rollouts, lease=lease)
            for (prompt_id, prompt, rollouts, _), lease in zip(self._parts(), self.lease_G.tolist(), strict=True)
        ]

    def train_groups(self) -> list[TrainGroup]:
        """The groups of ``of_train_groups``; their arrays are views of the columns."""
        return [
            TrainGroup(prompt_id=prompt_id, prompt_token_ids=prompt, rollouts=rollouts, copies=copies)
            for prompt_id, prompt, rollouts, copies in self._parts()
        ]

    def _parts(self) -> list[tuple[str, npt.NDArray[np.int32], tuple[Rollout, ...], tuple[int, ...]]]:
        rollouts, copies = self._rollouts(), self.copies_S.tolist()
        prompts = split(self.prompt_tokens, self.prompt_length_G)
        parts, start = [], 0
        for prompt_id, prompt, size in zip(self.prompt_ids, prompts, self.size_G.tolist(), strict=True):
            end = start + size
            parts.append((prompt_id, prompt, tuple(rollouts[start:end]), tuple(copies[start:end])))
            start = end
        return parts

    def _rollouts(self) -> list[Rollout]:
        ends = offsets(self.span_count_S).tolist()
        spans = [
            PolicySpan(version=PolicyVersion(attempt, step), start=start, end=end)
            for attempt, step, start, end in self.spans_P.tolist()
        ]
        names = self.names
        columns = zip(
            self.searcher_S.tolist(),
            self.sequence_S.tolist(),
            split(self.token_ids_T, self.length_S),
            self.reward_S.tolist(),
            self.stop_reason_S.tolist(),
            ends,
            ends[1:],
            self.source_S.tolist(),
            split(self.behaviour_B, np.maximum(self.behaviour_length_S, 0)),
            self.behaviour_length_S.tolist(),
            self.reference_S.tolist(),
            self.reference_version_S.tolist(),
            strict=False,  # there is one end more than there are rollouts
        )
        return [
            Rollout(
                rollout_id=RolloutId(names[searcher], sequence),
                token_ids=token_ids,
                reward=reward,
                stop_reason=STOP_REASONS[stop_reason],
                spans=tuple(spans[first:last]),
                source=names[source],
                behaviour_logprobs=None if behaviour_length == NO_BEHAVIOUR else behaviour,
                reference_logprob=None if version == NO_VERSION and reference != reference else reference,
                reference_version=None if version == NO_VERSION else version,
            )
            for (
                searcher,
                sequence,
                token_ids,
                reward,
                stop_reason,
                first,
                last,
                source,
                behaviour,
                behaviour_length,
                reference,
                version,
            ) in columns
        ]

    def select(self, group_indices: Sequence[int]) -> RolloutBatch:
        """Some of the groups, in the order of ``group_indices``; copies."""
        groups = np.asarray(group_indices, np.int64)
        rows = ranges(offsets(self.size_G)[groups], self.size_G[groups])
        return RolloutBatch(
            prompt_ids=tuple(self.prompt_ids[g] for g in groups.tolist()),
            names=self.names,
            **{name: getattr(self, name)[groups] for name in _PER_GROUP},
            **{name: getattr(self, name)[rows] for name in _PER_ROLLOUT},
            prompt_tokens=take(self.prompt_tokens, self.prompt_length_G, groups),
            token_ids_T=take(self.token_ids_T, self.length_S, rows),
            behaviour_B=take(self.behaviour_B, np.maximum(self.behaviour_length_S, 0), rows),
            spans_P=take(self.spans_P, self.span_count_S, rows),
        )


def _batch(
    groups: Sequence[RolloutGroup] | Sequence[TrainGroup], leases: list[int], copies: list[int] | None
) -> RolloutBatch:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ids, token_ids, rewards, stops, spans, sources, behaviour, references, reference_versions = (
        list(map(field, rollouts)) for field in _FIELDS
    )
    index: dict[str, int] = {}
    flat_spans = [
        number for each in spans for s in each for number in (s.version.attempt, s.version.step, s.start, s.end)
    ]
    prompts = [group.prompt_token_ids for group in groups]
    return RolloutBatch(
        prompt_ids=tuple(group.prompt_id for group in groups),
        lease_G=np.array(leases, np.int64),
        size_G=np.array([len(group.rollouts) for group in groups], np.int32),
        prompt_length_G=np.array(list(map(len, prompts)), np.int32),
        prompt_tokens=_joined(prompts, np.int32),
        searcher_S=np.array([index.setdefault(each.searcher, len(index)) for each in ids], np.int32),
        source_S=np.array([index.setdefault(source, len(index)) for source in sources], np.int32),
        sequence_S=np.array([each.sequence for each in ids], np.int64),
        reward_S=np.array(rewards, np.float64),
        stop_reason_S=np.array([_STOP_NUMBER[stop] for stop in stops], np.int8),
        copies_S=np.ones(len(rollouts), np.int32) if copies is None else np.array(copies, np.int32),
        length_S=np.array(list(map(len, token_ids)), np.int32),
        token_ids_T=_joined(token_ids, np.int32),
        behaviour_length_S=np.array([NO_BEHAVIOUR if b is None else len(b) for b in behaviour], np.int32),
        behaviour_B=_joined([b for b in behaviour if b is not None], np.float32),
        span_count_S=np.array(list(map(len, spans)), np.int32),
        spans_P=np.array(flat_spans, np.int64).reshape(-1, 4),
        reference_S=np.array([np.nan if r is None else r for r in references], np.float64),
        reference_version_S=np.array([NO_VERSION if v is None else v for v in reference_versions], np.int64),
        names=tuple(index),
    )


_FIELDS = tuple(
    map(
        attrgetter,
        (
            "rollout_id",
            "token_ids",
            "reward",
            "stop_reason",
            "spans",
            "source",
            "behaviour_logprobs",
            "reference_logprob",
            "reference_version",
        ),
    )
)
_STOP_NUMBER = {reason: number for number, reason in enumerate(STOP_REASONS)}


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else np.zeros(0, dtype)


# ---- bytes

_PER_GROUP = ("lease_G", "size_G", "prompt_length_G")
_PER_ROLLOUT = (
    "searcher_S",
    "source_S",
    "sequence_S",
    "reward_S",
    "stop_reason_S",
    "copies_S",
    "length_S",
    "behaviour_length_S",
    "span_count_S",
    "reference_S",
    "reference_version_S",
)
_DTYPES: dict[str, np.dtype[Any]] = {
    "lease_G": np.dtype("<i8"),
    "size_G": np.dtype("<i4"),
    "prompt_length_G": np.dtype("<i4"),
    "prompt_tokens": np.dtype("<i4"),
    "searcher_S": np.dtype("<i4"),
    "source_S": np.dtype("<i4"),
    "sequence_S": np.dtype("<i8"),
    "reward_S": np.dtype("<f8"),
    "stop_reason_S": np.dtype("i1"),
    "copies_S": np.dtype("<i4"),
    "length_S": np.dtype("<i4"),
    "token_ids_T": np.dtype("<i4"),
    "behaviour_length_S": np.dtype("<i4"),
    "behaviour_B": np.dtype("<f4"),
    "span_count_S": np.dtype("<i4"),
    "spans_P": np.dtype("<i8"),
    "reference_S": np.dtype("<f8"),
    "reference_version_S": np.dtype("<i8"),
}
assert set(_DTYPES) == {field.name for field in fields(RolloutBatch)} - {"prompt_ids", "names"}
_ALIGNED = 8  # bytes: where an array begins, so that a view of it is as fast as a copy
_HEAD_SIZE = struct.Struct("<Q")


class _Head(msgspec.Struct, frozen=True, array_like=True):
    format: int
    prompt_ids: list[str]
    names: list[str]
    lengths: list[int]  # elements of each array, in the order of _DTYPES


_FORMAT = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


def encode(batch: RolloutBatch) -> bytes:
    """``batch`` as bytes: the length of a msgspec head, the head, and the arrays, little-endian and aligned."""
    arrays = [getattr(batch, name).astype(dtype, copy=False) for name, dtype in _DTYPES.items()]
    head = _encoder.encode(_Head(_FORMAT, list(batch.prompt_ids), list(batch.names), [a.size for a in arrays]))
    parts: list[Any] = [_HEAD_SIZE.pack(len(head)), head, bytes(-len(head) % _ALIGNED)]
    for array in arrays:
        parts += [np.ascontiguousarray(array).data.cast("B") if array.size else b"", bytes(-array.nbytes % _ALIGNED)]
    return b"".join(parts)


def decode(data: bytes | memoryview) -> RolloutBatch:
    """The batch of ``encode``; its arrays are views of ``data``. ValueError when ``data`` is not one.

    What the columns say is checked as far as they have to fit each other; what a rollout says is not.
    """
    view = memoryview(data)
    if len(view) < _HEAD_SIZE.size:
        raise ValueError(f"{len(view)} bytes are too few for a batch of rollouts")
    (head_size,) = _HEAD_SIZE.unpack_from(view)
    start = _HEAD_SIZE.size + head_size
    if start > len(view):
        raise ValueError(f"a head of {head_size} bytes in a batch of {len(view)}")
    head = decoded(_decoder, view[_HEAD_SIZE.size : start])
    if head.format != _FORMAT or len(head.lengths) != len(_DTYPES) or min(head.lengths) < 0:
        raise ValueError(f"format {head.format} with {len(head.lengths)} arrays; this program reads format {_FORMAT}")
    start += -head_size % _ALIGNED
    columns: dict[str, npt.NDArray[Any]] = {}
    for (name, dtype), length in zip(_DTYPES.items(), head.lengths, strict=True):
        end = start + length * dtype.itemsize
        if end > len(view):
            raise ValueError(f"{name} ends at byte {end} of {len(view)}")
        columns[name] = np.frombuffer(view[start:end], dtype)
        start = end + -end % _ALIGNED
    if start != len(view):
        raise ValueError(f"{len(view) - start} bytes after the last array")
    if len(columns["spans_P"]) % 4:
        raise ValueError(f"{len(columns['spans_P'])} numbers are no spans of 4 each")
    columns["spans_P"] = columns["spans_P"].reshape(-1, 4)
    batch = RolloutBatch(prompt_ids=tuple(head.prompt_ids), names=tuple(head.names), **columns)
    _check(batch)
    return batch


def _check(batch: RolloutBatch) -> None:
    """ValueError where the columns do not fit each other."""
    for names, length in ((_PER_GROUP, batch.n_groups), (_PER_ROLLOUT, batch.n_rollouts)):
        for name in names:
            if len(getattr(batch, name)) != length:
                raise ValueError(f"{name} has {len(getattr(batch, name))} values, not {length}")
    behaviour_length_S = np.where(batch.behaviour_length_S == NO_BEHAVIOUR, 0, batch.behaviour_length_S)
    for name, lengths, flat in (
        ("size_G", batch.size_G, batch.sequence_S),
        ("prompt_length_G", batch.prompt_length_G, batch.prompt_tokens),
        ("length_S", batch.length_S, batch.token_ids_T),
        ("behaviour_length_S", behaviour_length_S, batch.behaviour_B),
        ("span_count_S", batch.span_count_S, batch.spans_P),
    ):
        if lengths.size and int(lengths.min()) < 0:
            raise ValueError(f"{name} holds {int(lengths.min())}")
        if (total := int(lengths.sum(dtype=np.int64))) != len(flat):
            raise ValueError(f"{name} sums to {total}, not to {len(flat)}")
    for name, most in (
        ("searcher_S", len(batch.names)),
        ("source_S", len(batch.names)),
        ("stop_reason_S", len(STOP_REASONS)),
        ("sequence_S", MOST_SEQUENCE),
    ):
        column = getattr(batch, name)
        if column.size and not (int(column.min()) >= 0 and int(column.max()) < most):
            raise ValueError(f"{name} holds {int(column.min())} to {int(column.max())}, not 0 to {most - 1}")
