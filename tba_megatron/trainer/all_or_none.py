"""File operations of many ranks that fail together: one rank's trouble is everybody's error, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from tba_megatron.dist import Groups
from tba_megatron.errors import TbaError
from tba_megatron.trainer.exchange import gather_on_all

SHOWN = 3  # different reasons in one line


@contextmanager
def all_or_none(groups: Groups, raised: type[TbaError], what: str = "") -> Iterator[None]:
    """If the block fails on any rank, every rank raises the same ``raised``, in one line; a collective over the world.

    Failures are OSError, SafetensorError and TbaError; anything else is a fault of this project and passes through.
    """
    problem, cause = None, None
    try:
        yield
    except (OSError, SafetensorError, TbaError) as error:
        problem, cause = " ".join(str(error).split()), error
    problems = gather_on_all(problem, groups)
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(problems):
        if found is not None:
            ranks.setdefault(found, []).append(rank)
    if ranks:
        reasons = [_reason(found, where, len(problems)) for found, where in ranks.items()]
        more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        raise raised((f"{what}: " if what else "") + "; ".join(reasons[:SHOWN]) + more) from cause


def _reason(found: str, ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return found
    return f"{found} (on rank {ranks[0]}{f' and {len(ranks) - 1} others' if len(ranks) > 1 else ''} of {world_size})"
