"""What a searcher needs of an engine beyond generating: taking new weights while it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tba_megatron.transport.messages import Offer
from tba_megatron.types import Engine


class ReceiveState(StrEnum):
    NONE = "none"  # nothing was offered
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

    def begin_receive(self, offer: Offer, timeout_s: float) -> None: ...

    def poll_receive(self) -> ReceiveStatus: ...

    def apply(self) -> None:
        """Generate with the staged version from the next token on. EngineError: the engine is unusable."""
        ...

    def close(self) -> None: ...
