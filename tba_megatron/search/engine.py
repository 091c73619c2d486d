"""What a searcher needs of an engine beyond generating: taking new weights while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from tba_megatron.transport.messages import Offer
from tba_megatron.types import Engine, Floats, TokenIds

InFlight = Literal["recompute", "keep_kv", "drain"]  # search.in_flight


class ReceiveState(StrEnum):
    NONE = "none"  # nothing was offered, or what was is called off
    JOINING = "joining"  # the broadcast group is being formed
    POSTED = "posted"  # in the group, waiting for buckets
    STAGED = "staged"  # the whole version lies beside the engine, verified
    FAILED = "failed"  # the engine keeps its old weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveStatus:
    state: ReceiveState
    reason: str = ""


class SearchEngine(Engine, Protocol):
    """``begin_receive`` returns at once; ``poll_receive`` says how it stands; ``apply`` is the only pause."""

    @property
    def workers(self) -> int:
        """How many members of a broadcast group the engine is."""
        ...

    @property
    def paused_s(self) -> float:
        """Seconds spent in ``apply`` so far."""
        ...

    @property
    def recompute_s(self) -> float:
        """Seconds spent so far on computing again what ``apply`` threw away of requests in flight.

        Of each step after an update this is the share of its tokens that had been computed before: an estimate, which
        takes all tokens of a step for equally dear.
        """
        ...

    def score(self, sequences: Sequence[TokenIds]) -> list[Floats]:
        """log p of each token but the first given those before it, at temperature 1 in nats; [T - 1] a sequence.

        Possible at any time. What is in the engine goes on as it would have; what finishes meanwhile comes out of the
        next ``step``.
        """
        ...

    def begin_receive(self, offer: Offer, timeout_s: float) -> None: ...

    def poll_receive(self) -> ReceiveStatus: ...

    def apply(self) -> None:
        """Generate with the staged version from the next token on. EngineError: the engine is unusable.

        Where in-flight completions are drained, nothing may be in the engine (``n_unfinished``): an EngineError too.
        """
        ...

    def close(self) -> None: ...
