"""Who is asked to measure which version, and what came of it: the first policy of a run, and the last."""

from __future__ import annotations

from collections.abc import Sequence

from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.messages import Evaluate, Evaluated
from tba_megatron.transport.registry import Member
from tba_megatron.types import PolicyVersion


class Evaluations:
    """Of one attempt. ``before`` and ``after`` are accuracies, None while they are not known."""

    def __init__(self, control: ControlServer, problems: int, before: float | None) -> None:
        self._control, self._problems = control, problems
        self.before, self.after = before, None
        self._asked: dict[PolicyVersion, tuple[str, int]] = {}  # who was asked, and how many questions it had lost
        self._final: PolicyVersion | None = None

    @property
    def measured(self) -> bool:
        """The last policy is, or nobody wants it to be."""
        return self.after is not None or not self._problems

    def lacks_first(self, step: int) -> bool:
        return self.before is None and step == 0 and self._problems > 0

    def ask_first(self, version: PolicyVersion, members: Sequence[Member]) -> None:
        self._ask(version, members)

    def ask_final(self, version: PolicyVersion, members: Sequence[Member]) -> None:
        self._final = version
        self._ask(version, members)

    def take(self) -> list[Evaluated]:
        """The answers that have come to what was asked."""
        answers = []
        for answer in self._control.take_evaluations():
            version = PolicyVersion.parse(answer.version)
            if version not in self._asked:
                continue  # an earlier attempt wanted to know
            if version == self._final:
                self.after = answer.accuracy
            if version.step == 0:
                self.before = answer.accuracy
            answers.append(answer)
        return answers

    def _ask(self, version: PolicyVersion, members: Sequence[Member]) -> None:
        """Once for each version, of the first searcher that runs it; again when that one is gone or never heard it."""
        asked = self._asked.get(version)
        if asked is not None and asked in {(m.searcher, m.evaluations_lost) for m in members}:
            return
        for member in members:
            if member.version == version and not member.evaluating:
                self._asked[version] = (member.searcher, member.evaluations_lost)
                self._control.send(member.searcher, Evaluate(version=str(version)))
                return
