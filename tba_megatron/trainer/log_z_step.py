"""The learned log Z within one optimizer step: features of its prompts, values for the loss, the sum of gradients.

S sequences, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.loss.base import LossOutput
from tba_megatron.trainer.log_z import LogZ, prompt_means
from tba_megatron.trainer.model import Batch


class LogZStep:
    """What one optimizer step sees of its prompts, and what log Z learns in it. Without a head it does nothing.

    Values are those before the step's update, whatever pass asks for them.
    """

    def __init__(self, head: LogZ | None, groups: Groups) -> None:
        self._head, self._groups = head, groups
        self._features: dict[int, Tensor] = {}  # id of the batch -> [S, H]
        self._gradient = self._zeros()

    @property
    def starts(self) -> bool:
        """Whether log Z has made no step yet, so that ``start`` comes first; the same on every rank."""
        return self._head is not None and self._head.steps == 0

    def see(self, hidden: Tensor, batch: Batch) -> None:
        """The last hidden states [T, H] of ``batch``, of all its positions."""
        if self._head is not None:
            self._features[id(batch)] = prompt_means(hidden.detach(), batch.host)

    def values(self, batch: Batch) -> Tensor | None:
        """float64 [S], once ``batch`` was seen; None without a head."""
        return None if self._head is None else self._head.values(self._features[id(batch)])

    def add(self, batches: Sequence[Batch], output: LossOutput) -> None:
        """The gradient of a loss over the sequences of ``batches``, in this order."""
        if self._head is not None:
            assert output.log_z_gradient_S is not None
            features_S = torch.cat([self._features[id(batch)] for batch in batches]).double()
            gradient_S = output.log_z_gradient_S
            self._gradient += torch.cat([gradient_S @ features_S, gradient_S.sum()[None]])

    def start(self) -> None:
        """The mean of the VarGrad estimates, from the gradient of the whole batch at log Z = 0; a collective.

        There the gradient of the bias is the mean over rollouts of log pi - log pi_ref - r / beta.
        """
        mean = -float(self._reduced()[-1])
        self._gradient = self._zeros()
        if self._head is not None and math.isfinite(mean):  # else this step is skipped, and the next one starts
            self._head.start(mean)

    def is_finite(self) -> bool:
        """Add the gradient up over all replicas; whether it is finite. A collective over all ranks."""
        self._gradient = self._reduced()
        return bool(self._gradient.isfinite().all())

    def finish(self, *, skipped: bool) -> None:
        """Update the head, after ``is_finite``. A step that is skipped leaves it as it was."""
        if self._head is None:
            return
        if not skipped:
            self._head.step(self._gradient)
        elif self.starts:
            self._head.start(0.0)

    def _zeros(self) -> Tensor:
        n = 0 if self._head is None else len(self._head.weight) + 1
        return torch.zeros(n, dtype=torch.float64, device=self._groups.device)

    def _reduced(self) -> Tensor:
        """The sum over the replicas' leaders, the same bits on all ranks of all stages."""
        if self._head is None:
            return self._gradient
        mine = self._gradient if self._groups.is_leader else self._zeros()
        total = mine.cpu()
        if self._groups.info.world_size > 1:
            dist.all_reduce(total, group=self._groups.world)
        return total.to(self._groups.device)
