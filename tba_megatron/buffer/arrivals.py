"""What of an arriving batch a shard keeps: exact de-duplication against what it holds and within the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.content_index import content_hashes
from tba_megatron.buffer.prompts import prompt_key
from tba_megatron.buffer.rows import RowColumns, precedences, version_codes
from tba_megatron.ragged import Ints, offsets, owners
from tba_megatron.rollout_batch import NO_VERSION, RolloutBatch


class Incoming:
    """The valid rollouts of a batch, V of them; ``valid`` are their numbers in the batch.

    ``prompt_G`` are the numbers of the batch's prompts in the shard, -1 where it holds nothing of one.
    """

    def __init__(self, batch: RolloutBatch, valid: Ints, prompt_G: Ints) -> None:
        self.batch, self.valid = batch, valid
        self.group = owners(batch.size_G)[valid]  # [V]
        self.prompt = prompt_G[self.group]
        self.length = batch.length_S[valid]
        self.version = _newest_versions(batch)[valid]
        ends = 4 * offsets(batch.length_S)
        self._starts, self._ends = ends[:-1][valid].tolist(), ends[1:][valid].tolist()
        self._bytes = np.ascontiguousarray(batch.token_ids_T).view(np.uint8).data
        self.prompt_keys = keys = [prompt_key(prompt_id) for prompt_id in batch.prompt_ids]  # [G]
        self.content = content_hashes(self._bytes, self._starts, self._ends, [keys[g] for g in self.group.tolist()])

    def tokens(self, i: int) -> memoryview:
        """Of the valid rollout ``i``, as bytes."""
        return self._bytes[self._starts[i] : self._ends[i]]


def _newest_versions(batch: RolloutBatch) -> Ints:
    """[S] the newest policy that wrote a part of each rollout; for an empty one, the policy that chose to stop."""
    codes_P = version_codes(batch.spans_P[:, :2])
    if len(codes_P) == batch.n_rollouts and (batch.span_count_S == 1).all():
        return codes_P
    newest_S = np.full(batch.n_rollouts, -1, np.int64)
    np.maximum.at(newest_S, owners(batch.span_count_S), codes_P)
    return newest_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What becomes rows (K of the V valid rollouts, in order) and what that does to rows that are held."""

    indices: Ints  # [K] among the valid ones
    copies: npt.NDArray[np.int32]  # [K]
    reference: npt.NDArray[np.float64]  # [K]
    reference_version: npt.NDArray[np.int64]  # [K]
    replaced: Ints  # held rows that leave: an equal completion of a version that goes before takes their place
    repeated: Ints  # held rows that were generated again by their own policy, once for each time


def deduplicate(incoming: Incoming, found: Ints, rows: RowColumns) -> Kept:
    """Rollouts in order: an equal completion of a version that goes before (``precedences``: a newer one) replaces, of
    the same version counts as a copy, of any other is left out. ``found`` [V] is the held row of the same content, or
    -1.
    """
    n = len(incoming.valid)
    keep = np.ones(n, np.bool_)
    copies = np.ones(n, np.int32)
    reference = incoming.batch.reference_S[incoming.valid]
    reference_version = incoming.batch.reference_version_S[incoming.valid]
    replaced: list[int] = []
    repeated: list[int] = []
    ordered = np.sort(incoming.content)
    suspects = found >= 0
    if (ordered[1:] == ordered[:-1]).any():
        _, inverse, counts = np.unique(incoming.content, return_inverse=True, return_counts=True)
        suspects |= counts[inverse] > 1
    holders: dict[tuple[str, bytes], int] = {}  # by content: a rollout of this batch, or ~row of a held one
    for i in np.flatnonzero(suspects).tolist():
        content = (incoming.batch.prompt_ids[incoming.group[i]], incoming.tokens(i).tobytes())
        holder = holders.get(content, ~int(found[i]) if found[i] >= 0 else None)
        if holder is None:
            holders[content] = i
            continue
        held = holder < 0
        version = rows.version[~holder] if held else incoming.version[holder]
        if precedences(incoming.version[i]) > precedences(version):
            known = rows.reference_version[~holder] if held else reference_version[holder]
            if reference_version[i] == NO_VERSION and known != NO_VERSION:
                # The reference's log-prob belongs to the tokens, so a newer copy need not compute it again.
                reference[i] = rows.reference[~holder] if held else reference[holder]
                reference_version[i] = known
            if held:
                replaced.append(~holder)
            else:
                keep[holder] = False
            holders[content] = i
            continue
        keep[i] = False
        if incoming.version[i] == version and held:
            repeated.append(~holder)
        elif incoming.version[i] == version:
            copies[holder] += 1
    indices = np.flatnonzero(keep)
    return Kept(
        indices=indices,
        copies=copies[indices],
        reference=reference[indices],
        reference_version=reference_version[indices],
        replaced=np.array(replaced, np.int64),
        repeated=np.array(repeated, np.int64),
    )
