"""What fails on one rank fails on all, in one line: none waits for a rank that has left."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from tba_megatron.errors import CheckpointError, TbaError

_log = logging.getLogger(__name__)

SHOWN = 3  # different reasons in one line


class AllOrNone:
    """If the region fails on one rank, every rank raises the same ``raised``: ``what``, why and where, ``advice``.

    A region is a collective over ``group`` (gloo; None: the world) and holds local work, or collectives that raise on
    all ranks. Any exception counts; one that no file caused keeps its traceback in the log of its rank.
    """

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup | None = None,
        *,
        raised: type[TbaError] = CheckpointError,
        advice: str = "",
    ) -> None:
        self._what, self._group, self._raised, self._advice = what, group, raised, advice

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Peers of a broken group cannot be asked, and an interrupt is no failure of the region.
        interrupted = error is not None and not isinstance(error, Exception | CheckpointException)
        if interrupted or isinstance(error, dist.DistError):
            return
        mine = None if error is None else _reason(error)
        if error is not None and _file_error(error) is None and not isinstance(error, TbaError | CheckpointException):
            _log.error("%s", self._what, exc_info=error)
        reasons: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(reasons, mine, group=self._group)
        if any(reason is not None for reason in reasons):
            what = f"{self._what}: " if self._what else ""
            raise self._raised(f"{what}{_by_rank(reasons)}{self._advice}") from error


def _reason(error: BaseException) -> str:
    """One line: an operating system's own words, otherwise with the type's name. Empty: only others know why."""
    if isinstance(error, CheckpointException):  # raised on all ranks; the coordinator's names those that failed
        return "; ".join(sorted({_reason(cause) for cause, _ in error.failures.values()}))
    if isinstance(error, TbaError):
        return first_line(error)
    if (file_error := _file_error(error)) is not None:
        return first_line(file_error)
    return f"{type(error).__name__}: {first_line(error)}"


def _file_error(error: BaseException) -> OSError | SafetensorError | None:
    """The file's error behind ``error``: torch reports a failed write as a fault of its own, raised from it."""
    return next((e for e in _chain(error) if isinstance(e, OSError | SafetensorError)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def _by_rank(reasons: list[str | None]) -> str:
    """``disk full (rank 1); no such folder (ranks 2, 3)``; without ranks where all say the same."""
    ranks: dict[str, list[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason:
            ranks.setdefault(reason, []).append(rank)
    named = [
        reason if len(who) == len(reasons) else f"{reason} (rank{'s' * (len(who) > 1)} {', '.join(map(str, who))})"
        for reason, who in ranks.items()
    ]
    more = [f"and {len(named) - SHOWN} more"] if len(named) > SHOWN else []
    return "; ".join(named[:SHOWN] + more) or "no rank knows why"
