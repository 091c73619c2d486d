"""The frozen reference: a second set of weights through the same packed path, asked once for each rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from tba_megatron.config_sections import TrainerConfig
from tba_megatron.dist import Groups
from tba_megatron.loss.base import ReferenceNeed
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.packing import Pack, unpack_sums
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.load_hf import load_hf
from tba_megatron.trainer.model import build_chunks, to_device
from tba_megatron.trainer.step import sequence_logprobs, token_logprobs
from tba_megatron.types import RolloutId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRead:
    """Packs, which have the sums now where a loss reads them, and what is not in them."""

    packs: list[Pack]
    computed: Mapping[RolloutId, tuple[float, int]] = field(default_factory=dict)  # (log-prob sum, version) found now
    by_token: Sequence[Tensor] = ()  # [R] a pack, on the last stage, for a loss that reads tokens


class Reference:
    """``version`` names its weights: log-probs that were stored under another version are not used."""

    version = 0

    def __init__(
        self,
        architecture: Architecture,
        shape: ModelShape,
        trainer: TrainerConfig,
        folder: Path,
        head: HeadSettings,
        groups: Groups,
    ) -> None:
        self._chunks = build_chunks(shape, trainer, groups)
        load_hf(self._chunks, architecture, shape, folder, groups)
        for chunk in self._chunks:
            chunk.requires_grad_(False)
            chunk.eval()
        self._head = head
        self._groups = groups

    def fill(self, packs: Sequence[Pack]) -> tuple[list[Pack], dict[RolloutId, tuple[float, int]]]:
        """``packs`` with every reference log-prob known, and (log-prob, version) of those computed now.

        A collective over the replica: all its ranks hold the same packs. On other stages than the last the packs come
        back as they were, since nothing there reads them.
        """
        missing = [i for i, pack in enumerate(packs) if np.isnan(pack.microbatch.reference_logprob).any()]
        if not missing:
            return list(packs), {}
        batches = [to_device(packs[i].microbatch, self._groups.device) for i in missing]
        sums = sequence_logprobs(self._chunks, batches, self._head, self._groups)
        filled, computed = list(packs), {}
        for i, sums_S in zip(missing, sums, strict=False):  # no sums on other stages
            pack, values_S = packs[i], sums_S.cpu().numpy()
            unknown = np.isnan(pack.microbatch.reference_logprob)
            known_S = np.where(unknown, values_S, pack.microbatch.reference_logprob)
            filled[i] = replace(pack, microbatch=replace(pack.microbatch, reference_logprob=known_S))
            by_id = unpack_sums(pack, values_S)
            new = (rollout_id for rollout_id, is_new in zip(pack.rollout_ids, unknown, strict=True) if is_new)
            computed.update({rollout_id: (by_id[rollout_id], self.version) for rollout_id in new})
        return filled, computed

    def read(self, packs: Sequence[Pack], need: ReferenceNeed) -> ReferenceRead:
        """What a loss that needs ``need`` reads of the reference. A collective over the replica: all its ranks hold the
        same packs."""
        if need is ReferenceNeed.TOKENS:
            batches = [to_device(pack.microbatch, self._groups.device) for pack in packs]
            by_token = token_logprobs(self._chunks, batches, self._head, self._groups)
            return ReferenceRead(packs=list(packs), by_token=by_token)
        filled, computed = self.fill(packs)
        return ReferenceRead(packs=filled, computed=computed)
