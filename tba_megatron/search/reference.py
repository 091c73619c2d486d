"""The reference's log-probs of what a searcher has written, where the trainer does not hold the reference itself.

``objective.reference.placement: searcher``. Groups wait here between the engine that wrote them and the wire; without a
scorer none waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tba_megatron.search.rollout_maker import RolloutMaker, Visit
from tba_megatron.transport.rollouts import RolloutOutbox
from tba_megatron.types import Completion, PolicyVersion, TokenIds

_Written = tuple[Visit, Sequence[Completion]]


class ReferenceScorer(Protocol):
    """Scores completions under the start model. It goes on step by step, so that its searcher hears and is heard."""

    @property
    def n_unfinished(self) -> int:
        """Requests that ``step`` has not answered yet."""
        ...

    def submit(self, request_id: str, prompt_token_ids: TokenIds, completions: Sequence[TokenIds]) -> None: ...

    def step(self) -> Sequence[tuple[str, tuple[float, ...]]]:
        """Compute some more; of each request that is finished now, a log-prob sum for each completion.

        In nats at ``objective.temperature``, over all tokens of a completion: its EOS counts, an empty one has 0. NaN
        where the reference does not know a token.
        """
        ...

    def close(self) -> None: ...


class WrittenGroups:
    """What the engine has finished, until it is sent."""

    def __init__(self, maker: RolloutMaker, scorer: ReferenceScorer | None) -> None:
        self._maker, self._scorer = maker, scorer
        self._ready: list[tuple[_Written, Sequence[float] | None]] = []  # and the reference's log-prob sums
        self._in_scorer: dict[str, _Written] = {}  # by request id
        self._requests = 0

    @property
    def n_waiting(self) -> int:
        return len(self._ready) + len(self._in_scorer)

    def add(self, visit: Visit, completions: Sequence[Completion]) -> None:
        if self._scorer is None:
            self._ready.append(((visit, completions), None))
            return
        self._requests += 1
        request_id = f"{self._requests}"
        self._in_scorer[request_id] = visit, completions
        self._scorer.submit(request_id, visit.prompt.token_ids, [c.token_ids for c in completions])

    def send(self, outbox: RolloutOutbox, newest: PolicyVersion) -> None:
        """Take one step of the scorer, and make rollouts of what waits for nothing more."""
        if self._scorer is not None and self._in_scorer:
            for request_id, sums in self._scorer.step():
                self._ready.append((self._in_scorer.pop(request_id), sums))
        for (visit, completions), sums in self._ready:
            outbox.send(self._maker.make(visit, completions, newest, sums))
        self._ready.clear()

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
