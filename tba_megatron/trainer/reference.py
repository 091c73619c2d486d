"""The reference: a second set of weights through the same packed path, asked once for each rollout.

It is the start model, or with ``objective.reference.reset_every_steps`` the policy of the last step that is a multiple
of it. A version is the step whose policy it was. Log-probs are kept with the rollout beside the version they are of,
so after a reset those of a rollout are computed anew when it is drawn again, and never before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.loss.base import ReferenceNeed
from tba_megatron.packing import Pack, unpack_sums
from tba_megatron.rollout_batch import START_REFERENCE
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.model import to_device
from tba_megatron.trainer.reference_files import ReferenceFiles
from tba_megatron.trainer.reference_weights import ReferenceWeights
from tba_megatron.trainer.step import sequence_logprobs, token_logprobs
from tba_megatron.types import RolloutId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRead:
    """Packs, which have the sums now where a loss reads them, and what is not in them."""

    packs: list[Pack]
    computed: Mapping[RolloutId, tuple[float, int]] = field(default_factory=dict)  # (log-prob sum, version) found now
    by_token: Sequence[Tensor] = ()  # [R] a pack, on the last stage, for a loss that reads tokens


class Reference:
    """``version`` names its weights: log-probs that were stored under another version are not used.

    ``policy`` are the chunks that it becomes at a reset, every ``reset_every_steps`` optimizer steps (0: never).
    """

    def __init__(
        self,
        weights: ReferenceWeights,
        policy: Sequence[GPTModel],
        files: ReferenceFiles,
        head: HeadSettings,
        groups: Groups,
        *,
        reset_every_steps: int = 0,
    ) -> None:
        self._weights, self._policy, self._files = weights, policy, files
        self._head, self._groups = head, groups
        self._every = reset_every_steps
        self.version = START_REFERENCE

    def fill(self, packs: Sequence[Pack]) -> tuple[list[Pack], dict[RolloutId, tuple[float, int]]]:
        """``packs`` with every reference log-prob known, and (log-prob, version) of those computed now.

        A collective over the replica: all its ranks hold the same packs. On other stages than the last the packs come
        back as they were, since nothing there reads them.
        """
        missing = [i for i, pack in enumerate(packs) if np.isnan(pack.microbatch.reference_logprob).any()]
        if not missing:
            return list(packs), {}
        batches = [to_device(packs[i].microbatch, self._groups.device) for i in missing]
        with self._weights.scoring() as chunks:
            sums = sequence_logprobs(chunks, batches, self._head, self._groups)
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
            with self._weights.scoring() as chunks:
                by_token = token_logprobs(chunks, batches, self._head, self._groups)
            return ReferenceRead(packs=list(packs), by_token=by_token)
        filled, computed = self.fill(packs)
        return ReferenceRead(packs=filled, computed=computed)

    # ---- resets

    def version_at(self, step: int) -> int:
        """The version after optimizer step ``step``."""
        return step // self._every * self._every if self._every else START_REFERENCE

    def step_made(self, step: int) -> None:
        """Become the policy, where ``step`` is one that resets."""
        if self.version_at(step) == self.version:
            return
        self._weights.take(self._policy)
        self.version = step
        if self._groups.rank == 0:
            _log.info("the reference is the policy of step %d from here on", step)

    def keep(self, step: int) -> None:
        """Write what a checkpoint of ``step`` needs beside itself; a collective over all ranks. The start model, and
        the policy of the checkpoint, are there anyway.
        """
        if self.version not in (START_REFERENCE, step):
            with self._weights.scoring() as chunks:
                self._files.write(chunks, self.version)

    def restore(self, step: int) -> None:
        """Be what it was after ``step``, when the policy is that of ``step`` already; a collective over all ranks.

        CheckpointError, the same on every rank, where the weights of then are not there.
        """
        if self._every:
            self._files.remove_after(step)
        version = self.version_at(step)
        if version == step != START_REFERENCE:
            self._weights.take(self._policy)
        elif version != START_REFERENCE:  # which it is as it was built
            with self._weights.scoring() as chunks:
                self._files.read(chunks, version)
        self.version = version

    def forget(self, checkpoints: Sequence[int]) -> None:
        """Remove the files that no checkpoint of ``checkpoints`` (steps) needs; for rank 0 alone."""
        self._files.remove_all_but({self.version_at(step) for step in checkpoints})
