"""Train groups to packed microbatches, and back.

A microbatch is a set of whole groups, or a part of one that is larger than a microbatch may be. Each distinct
completion is one sequence, prompt and completion, with the number of its copies as its weight. T tokens, S sequences,
G groups.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tba_megatron.types import (
    PackedMicrobatch,
    PolicySpan,
    PolicyVersion,
    Rollout,
    RolloutId,
    StopReason,
    TokenIds,
    TrainGroup,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A microbatch and the rollout that each of its sequences is."""

    microbatch: PackedMicrobatch
    rollout_ids: tuple[RolloutId, ...]  # [S]


def pack(
    groups: Sequence[TrainGroup],
    microbatch_tokens: int,
    multiple_of: int = 1,
    *,
    reference_version: int | None = None,
) -> list[Pack]:
    """``groups`` in few microbatches of at most ``microbatch_tokens``, each group whole in one of them.

    A group that is larger by itself is split over microbatches of its own, which ``split_group`` joins; a single
    sequence that is larger has one alone.
    """
    limit = max(multiple_of, microbatch_tokens // multiple_of * multiple_of)
    whole = [group for group in groups if group.n_tokens <= limit]
    n_microbatches = len(_parts([group.n_tokens for group in whole], limit))
    packs = pack_into(whole, n_microbatches, multiple_of, reference_version=reference_version)
    n_split = 0
    for group in (group for group in groups if group.n_tokens > limit):
        fragments = _split(group, limit)
        number = n_split if len(fragments) > 1 else -1
        packs += [_pack_one([part], multiple_of, reference_version, split_group=number) for part in fragments]
        n_split += len(fragments) > 1
    return packs


def pack_into(
    groups: Sequence[TrainGroup],
    n_microbatches: int,
    multiple_of: int = 1,
    *,
    reference_version: int | None = None,
) -> list[Pack]:
    """``groups`` in exactly ``n_microbatches``, balanced by tokens, none empty.

    The length of each is padded to a multiple of ``multiple_of``. A reference log-prob of another version
    than ``reference_version`` is left out; with None any version is taken. ValueError where there are fewer
    groups than microbatches, or a prompt without tokens.
    """
    if n_microbatches > len(groups) or (groups and n_microbatches < 1):
        raise ValueError(f"{len(groups)} groups cannot fill {n_microbatches} microbatches with at least one each")
    parts = _assign([group.n_tokens for group in groups], n_microbatches)
    return [_pack_one([groups[i] for i in part], multiple_of, reference_version) for part in parts]


def padding(n_tokens: int) -> PackedMicrobatch:
    """A microbatch of ``n_tokens`` of padding and no sequence."""
    none: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()}
    none.update(_token_arrays([], 1, n_tokens))
    return PackedMicrobatch(**none, n_groups=0)


def unpack_sums(pack: Pack, per_sequence_S: npt.ArrayLike) -> dict[RolloutId, float]:
    """The value of each sequence (for example its reference log-prob sum) by the rollout that it is."""
    values = np.asarray(per_sequence_S, np.float64)
    return dict(zip(pack.rollout_ids, values.tolist(), strict=True))


def demonstration_groups(pairs: Iterable[tuple[TokenIds, TokenIds]]) -> list[TrainGroup]:
    """(prompt ids, completion ids) as groups of one sequence, with reward 0, for supervised training."""
    return [
        TrainGroup(
            prompt_id=f"demonstration-{i}",
            prompt_token_ids=np.asarray(prompt, np.int32),
            rollouts=(_demonstration(i, np.asarray(completion, np.int32)),),
            copies=(1,),
        )
        for i, (prompt, completion) in enumerate(pairs)
    ]


def pack_demonstrations(
    pairs: Iterable[tuple[TokenIds, TokenIds]], microbatch_tokens: int, multiple_of: int = 1
) -> list[Pack]:
    """Supervised (prompt ids, completion ids), packed like groups of one rollout."""
    return pack(demonstration_groups(pairs), microbatch_tokens, multiple_of)


def _demonstration(i: int, token_ids: TokenIds) -> Rollout:
    return Rollout(
        rollout_id=RolloutId("demonstration", i),
        token_ids=token_ids,
        reward=0.0,
        stop_reason=StopReason.EOS,
        spans=(PolicySpan(version=PolicyVersion(0, 0), start=0, end=len(token_ids)),),
        source="demonstration",
    )


def _split(group: TrainGroup, limit: int) -> list[TrainGroup]:
    """``group`` as groups of some of its rollouts each, of at most ``limit`` tokens or of one rollout."""
    sizes = [len(group.prompt_token_ids) + len(rollout.token_ids) for rollout in group.rollouts]
    return [
        replace(group, rollouts=tuple(group.rollouts[i] for i in part), copies=tuple(group.copies[i] for i in part))
        for part in _parts(sizes, limit)
    ]


def _parts(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of ``tokens`` in as few parts as ``_assign`` keeps within ``limit``; what is larger is alone."""
    too_large = [n for n in tokens if n > limit]
    n_parts = len(too_large)
    if len(tokens) > n_parts:
        n_parts += max(1, math.ceil((sum(tokens) - sum(too_large)) / limit))
    while True:
        parts = _assign(tokens, n_parts)
        if all(len(part) <= 1 or sum(tokens[i] for i in part) <= limit for part in parts):
            return parts
        n_parts += 1


def _assign(tokens: Sequence[int], n_parts: int) -> list[list[int]]:
    """Longest processing time first: the next largest group goes to the lightest part. Indices ascend.

    With one more part the lightest is never heavier at any moment, so what fits in n parts fits in n + 1.
    """
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    # The number of groups comes before the index so that groups of no tokens spread too.
    lightest = [(0, 0, part) for part in range(n_parts)]
    for i in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        load, n_groups, part = lightest[0]
        parts[part].append(i)
        heapq.heapreplace(lightest, (load + tokens[i], n_groups + 1, part))
    return [sorted(part) for part in parts]


@dataclass(frozen=True, slots=True)
class _Sequence:
    group_index: int
    prompt: TokenIds
    rollout: Rollout
    copies: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.rollout.token_ids)


def _pack_one(
    groups: Sequence[TrainGroup], multiple_of: int, reference_version: int | None, split_group: int = -1
) -> Pack:
    for group in groups:
        if len(group.prompt_token_ids) == 0:
            raise ValueError(f"prompt {group.prompt_id} has no tokens, so nothing predicts its completions")
    sequences = [
        _Sequence(g, group.prompt_token_ids, rollout, copies)
        for g, group in enumerate(groups)
        for rollout, copies in zip(group.rollouts, group.copies, strict=True)
    ]
    # Attention batches runs of equal length.
    sequences.sort(key=len)
    rollouts = [s.rollout for s in sequences]
    return Pack(
        microbatch=PackedMicrobatch(
            **_token_arrays(sequences, multiple_of),
            group_index=np.array([s.group_index for s in sequences], np.int32),
            copies=np.array([s.copies for s in sequences], np.float32),
            reward=np.array([r.reward for r in rollouts], np.float32),
            reference_logprob=np.array([_reference(r, reference_version) for r in rollouts], np.float64),
            n_groups=len(groups),
            split_group=split_group,
        ),
        rollout_ids=tuple(r.rollout_id for r in rollouts),
    )


def _token_arrays(sequences: Sequence[_Sequence], multiple_of: int, at_least: int = 0) -> dict[str, npt.NDArray]:
    """The [T] arrays and ``cu_seqlens``."""
    ends = np.cumsum([0, *map(len, sequences)])
    n_tokens = int(ends[-1])
    padded = max(math.ceil(n_tokens / multiple_of) * multiple_of, at_least)
    tokens, labels, positions = (np.zeros(padded, np.int32) for _ in range(3))
    response = np.zeros(padded, np.bool_)
    sequence_index = np.full(padded, -1, np.int32)
    behaviour = np.full(padded, np.nan, np.float32)
    for i, (sequence, start, end) in enumerate(zip(sequences, ends[:-1], ends[1:], strict=True)):
        first = start + len(sequence.prompt)
        tokens[start:first] = sequence.prompt
        tokens[first:end] = sequence.rollout.token_ids
        labels[first - 1 : end - 1] = sequence.rollout.token_ids
        response[first - 1 : end - 1] = True
        if sequence.rollout.behaviour_logprobs is not None:
            behaviour[first - 1 : end - 1] = sequence.rollout.behaviour_logprobs
        positions[start:end] = np.arange(end - start)
        sequence_index[start:end] = i
    positions[n_tokens:] = np.arange(padded - n_tokens)
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": positions,
        "response": response,
        "sequence_index": sequence_index,
        "behaviour_logprob": behaviour,
        "cu_seqlens": np.array([*ends, padded] if padded > n_tokens else ends, np.int32),
    }


def _reference(rollout: Rollout, version: int | None) -> float:
    known = rollout.reference_logprob is not None and version in (None, rollout.reference_version)
    return rollout.reference_logprob if known and rollout.reference_logprob is not None else math.nan


# The wire format between the ranks of one replica: every array is flat and has one dtype, so bytes are
# enough.
_DTYPES: dict[str, npt.DTypeLike] = {
    "tokens": np.int32,
    "labels": np.int32,
    "positions": np.int32,
    "response": np.bool_,
    "sequence_index": np.int32,
    "cu_seqlens": np.int32,
    "group_index": np.int32,
    "copies": np.float32,
    "reward": np.float32,
    "reference_logprob": np.float64,
    "behaviour_logprob": np.float32,
}


class _WirePack(msgspec.Struct, array_like=True):
    n_groups: int
    split_group: int
    searchers: list[str]
    sequences: list[int]
    # bytearray: arrays made of bytes would be read-only, and torch warns about those.
    arrays: list[bytearray]


_decoder = msgspec.msgpack.Decoder(list[_WirePack])


def encode(packs: Sequence[Pack]) -> bytes:
    """``packs`` as bytes for a peer that runs the same program."""
    return msgspec.msgpack.encode(
        [
            _WirePack(
                n_groups=pack.microbatch.n_groups,
                split_group=pack.microbatch.split_group,
                searchers=[r.searcher for r in pack.rollout_ids],
                sequences=[r.sequence for r in pack.rollout_ids],
                arrays=[
                    bytearray(getattr(pack.microbatch, name).astype(dtype, copy=False).tobytes())
                    for name, dtype in _DTYPES.items()
                ],
            )
            for pack in packs
        ]
    )


def decode(data: bytes) -> list[Pack]:
    """What ``encode`` was given; msgspec.DecodeError or ValueError for anything else."""
    return [
        Pack(
            microbatch=PackedMicrobatch(
                n_groups=wire.n_groups,
                split_group=wire.split_group,
                **{
                    name: np.frombuffer(array, dtype)
                    for (name, dtype), array in zip(_DTYPES.items(), wire.arrays, strict=True)
                },
            ),
            rollout_ids=tuple(map(RolloutId, wire.searchers, wire.sequences)),
        )
        for wire in _decoder.decode(data)
    ]
