"""Where every rollout is: each id in exactly one state, and the sum over the states is what was generated.

A shard counts what it received; ``combine`` adds the shards up and finds, by subtraction from the searchers'
own counts, what is still in flight and what was lost with its sender.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from tba_megatron.types import LedgerCounts


class RolloutState(StrEnum):
    """The state of a rollout that a shard has received."""

    HELD_UNTRAINED = "held_untrained"
    TRAINED = "trained"  # for ever, also when the rollout has left the shard
    DUPLICATE = "duplicate"
    EVICTED_UNTRAINED = "evicted_untrained"
    INVALID = "invalid"


_S = RolloutState
_MOVES = {
    (_S.HELD_UNTRAINED, _S.TRAINED),
    (_S.HELD_UNTRAINED, _S.DUPLICATE),
    (_S.HELD_UNTRAINED, _S.EVICTED_UNTRAINED),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounts:
    """One shard's part of the ledger. ``received`` is by searcher incarnation and sums to the five states."""

    received: Mapping[str, int]
    held_untrained: int
    trained: int
    duplicate: int
    evicted_untrained: int
    invalid: int
    invalid_reasons: Mapping[str, int]


class ShardLedger:
    """The counters of one shard."""

    def __init__(self) -> None:
        self._received: Counter[str] = Counter()
        self._states: Counter[RolloutState] = Counter()
        self._invalid_reasons: Counter[str] = Counter()

    def receive(
        self,
        searchers: Mapping[str, int],
        states: Mapping[RolloutState, int],
        invalid_reasons: Mapping[str, int] | None = None,
    ) -> None:
        """Rollouts arrived: so many of each searcher, so many went into each state. ValueError: the sums differ."""
        if sum(searchers.values()) != sum(states.values()):
            raise ValueError(f"{sum(searchers.values())} rollouts arrived and {sum(states.values())} have a state")
        self._received.update(searchers)
        self._states.update(states)
        self._invalid_reasons.update(invalid_reasons or {})

    def move(self, old: RolloutState, new: RolloutState, n: int = 1) -> None:
        """``n`` rollouts go from ``old`` to ``new``; ValueError where the law forbids it."""
        if (old, new) not in _MOVES:
            raise ValueError(f"a rollout cannot go from {old} to {new}")
        if self._states[old] < n:
            raise ValueError(f"{self._states[old]} rollouts are {old}, so {n} cannot become {new}")
        self._states[old] -= n
        self._states[new] += n

    def counts(self) -> ShardCounts:
        return ShardCounts(
            received=dict(self._received),
            invalid_reasons=dict(self._invalid_reasons),
            **{state.value: self._states[state] for state in RolloutState},
        )

    def state(self) -> dict[str, Any]:
        """Plain dictionaries of integers and strings, for ``from_state``."""
        return {
            "received": dict(self._received),
            "states": {state.value: self._states[state] for state in RolloutState},
            "invalid_reasons": dict(self._invalid_reasons),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        ledger = cls()
        ledger._received.update(state["received"])
        ledger._states.update({RolloutState(name): n for name, n in state["states"].items()})
        ledger._invalid_reasons.update(state["invalid_reasons"])
        return ledger

    # A run that goes on with another number of shards

    @classmethod
    def total(cls, ledgers: Iterable[Self]) -> Self:
        """One ledger that counts what all of ``ledgers`` count."""
        total = cls()
        for ledger in ledgers:
            total._received.update(ledger._received)
            total._states.update(ledger._states)
            total._invalid_reasons.update(ledger._invalid_reasons)
        return total

    @classmethod
    def of_held(cls, untrained: Mapping[str, int]) -> Self:
        """The ledger of a shard that only ever received what it holds, all ``untrained``; by searcher."""
        ledger = cls()
        ledger._received.update(untrained)
        ledger._states[RolloutState.HELD_UNTRAINED] = sum(untrained.values())
        return ledger

    def without_held(self, untrained: Mapping[str, int]) -> Self:
        """This ledger without ``untrained`` rollouts that another shard holds; ValueError where it has fewer."""
        rest = type(self).total([self])
        rest._received.subtract(untrained)
        rest._states[RolloutState.HELD_UNTRAINED] -= sum(untrained.values())
        if min(*rest._received.values(), rest._states[RolloutState.HELD_UNTRAINED], 0) < 0:
            raise ValueError("a shard counts fewer untrained rollouts than there are")
        rest._received = +rest._received
        return rest


def combine(reported: Mapping[str, int], lost: Set[str], shards: Sequence[ShardCounts]) -> LedgerCounts:
    """The ledger of the whole run.

    ``reported`` is what each searcher incarnation says it generated, ``lost`` those that were declared lost.
    Reports and rollouts travel apart, so a shard may have received more than was reported: the larger number
    counts. What a lost searcher sent and arrives late leaves ``lost`` by itself, because ``lost`` is a
    difference.
    """
    received: Counter[str] = Counter()
    for shard in shards:
        received.update(shard.received)
    generated = {s: max(reported.get(s, 0), received[s]) for s in reported.keys() | received.keys()}
    missing = {s: n - received[s] for s, n in generated.items()}
    return LedgerCounts(
        generated=sum(generated.values()),
        in_flight=sum(n for s, n in missing.items() if s not in lost),
        held_untrained=sum(shard.held_untrained for shard in shards),
        trained=sum(shard.trained for shard in shards),
        duplicate=sum(shard.duplicate for shard in shards),
        evicted_untrained=sum(shard.evicted_untrained for shard in shards),
        invalid=sum(shard.invalid for shard in shards),
        lost=sum(n for s, n in missing.items() if s in lost),
    )
