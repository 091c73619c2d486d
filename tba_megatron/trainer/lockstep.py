"""``weights.mode: sync``, the baseline: train and search in turn, in lock-step, as TBA's released code does.

Every searcher takes a version; together they write the prompts of the steps until the next one, and wait; then those
steps are made, and the searchers wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tba_megatron.config import Config
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.registry import Member
from tba_megatron.types import PolicyVersion


class LockStep:
    """Rank 0's turns. Owns what the control server may lease."""

    def __init__(self, config: Config, control: ControlServer) -> None:
        self._every, self._prompts = config.weights.publish_every_steps, config.trainer.prompts_per_step
        self._control = control
        self._turn: PolicyVersion | None = None  # whose prompts are out
        self._goal = 0
        control.allow(0)

    def may_train(self, version: PolicyVersion, members: Sequence[Member], visits: int) -> bool:
        """Whether the step after ``version`` may be made; ``visits``: groups that have arrived since the run began."""
        if version.step % self._every and self._turn is not None:
            return True
        if self._turn != version:
            searching = [member for member in members if not member.evaluating]
            if not searching or any(member.version != version for member in searching):
                return False
            prompts = self._every * self._prompts
            self._turn, self._goal = version, visits + prompts
            self._control.allow(prompts)
        return visits >= self._goal

    def extend(self, visits: int) -> None:
        """What the turn has brought is not enough for its step: visits without anything new, or too few prompts."""
        self._goal = visits + self._prompts
        self._control.allow(self._prompts)
