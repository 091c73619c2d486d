"""A replay shard at rest: its pools and ledger as plain arrays for ``np.savez``, and dealing them to other shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.columns import (
    Columns,
    get_ragged,
    get_strings,
    put_ragged,
    put_strings,
    rollouts_from_columns,
    rollouts_to_columns,
)
from tba_megatron.buffer.ledger import ShardLedger
from tba_megatron.types import PolicyVersion, Rollout, TokenIds

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRollout:
    """A rollout in its pool."""

    rollout: Rollout
    version: PolicyVersion
    copies: int  # how often the newest version that generated this completion did so
    trained: bool
    arrival: int  # order of arrival in the shard
    visit: int  # the arrival of the first rollout of the message that brought it

    @property
    def age_key(self) -> tuple[PolicyVersion, int]:
        """Grows with youth: by version, then by arrival."""
        return self.version, self.arrival


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """The rollouts of a prompt, in the order of the pool."""

    prompt_id: str
    prompt_token_ids: TokenIds
    trained_visit: int  # the newest visit that was trained on, -1: none
    held: tuple[HeldRollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """A whole shard between two steps."""

    next_arrival: int
    ledger: ShardLedger
    pools: tuple[PoolState, ...]  # in the order in which they began


def to_arrays(state: ShardState) -> Columns:
    """Copies: they stay as they are while the shard lives on."""
    held = [h for pool in state.pools for h in pool.held]
    arrays: Columns = rollouts_to_columns([h.rollout for h in held])
    for name in ("copies", "arrival", "visit"):
        arrays[f"held_{name}"] = np.array([getattr(h, name) for h in held], np.int64)
    arrays["held_trained"] = np.array([h.trained for h in held], np.bool_)
    put_strings(arrays, "prompt_id", [p.prompt_id for p in state.pools])
    put_ragged(arrays, "prompt_token_ids", [p.prompt_token_ids for p in state.pools], np.int32)
    arrays["pool_size"] = np.array([len(p.held) for p in state.pools], np.int64)
    arrays["pool_trained_visit"] = np.array([p.trained_visit for p in state.pools], np.int64)
    arrays["counters"] = np.array([_FORMAT, state.next_arrival], np.int64)
    put_strings(arrays, "ledger", [json.dumps(state.ledger.state())])
    return arrays


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> ShardState:
    """The shard that ``to_arrays`` described; its arrays are views of ``arrays``. ValueError: another format."""
    found_format, next_arrival = arrays["counters"].tolist()
    if found_format != _FORMAT:
        raise ValueError(f"the shard's format is {found_format}, this program reads {_FORMAT}")
    columns = (arrays[f"held_{name}"].tolist() for name in ("copies", "trained", "arrival", "visit"))
    held = (
        HeldRollout(
            rollout=rollout,
            version=rollout.version,
            copies=copies,
            trained=trained,
            arrival=arrival,
            visit=visit,
        )
        for rollout, copies, trained, arrival, visit in zip(rollouts_from_columns(arrays), *columns, strict=True)
    )
    pools = zip(
        get_strings(arrays, "prompt_id"),
        get_ragged(arrays, "prompt_token_ids"),
        arrays["pool_size"].tolist(),
        arrays["pool_trained_visit"].tolist(),
        strict=True,
    )
    return ShardState(
        next_arrival=next_arrival,
        ledger=ShardLedger.from_state(json.loads(get_strings(arrays, "ledger")[0])),
        pools=tuple(
            PoolState(
                prompt_id=prompt_id,
                prompt_token_ids=prompt_token_ids,
                trained_visit=trained_visit,
                held=tuple(next(held) for _ in range(size)),
            )
            for prompt_id, prompt_token_ids, size, trained_visit in pools
        ),
    )


def deal(parts: Sequence[ShardState], owns: Callable[[str], bool], *, keeps_rest: bool) -> ShardState:
    """The shard of the prompts that it ``owns`` by their id, out of all shards of a run.

    Shards whose ``owns`` share out all prompts, and of which one ``keeps_rest``, hold what ``parts`` held and sum to
    the same ledger. An untrained rollout is counted where it is held; all that can change no more, and belongs to no
    prompt, is counted by the one that keeps the rest.
    """
    n = len(parts)

    def moved(number: int, part: int) -> int:
        return number if number < 0 else number * n + part  # unique over all parts; the order within each stays

    pools = []
    elsewhere: Counter[str] = Counter()  # untrained rollouts of prompts that others own, by searcher
    here: Counter[str] = Counter()
    for i, part in enumerate(parts):
        for pool in part.pools:
            mine = owns(pool.prompt_id)
            (here if mine else elsewhere).update(h.rollout.rollout_id.searcher for h in pool.held if not h.trained)
            if mine:
                held = (replace(h, arrival=moved(h.arrival, i), visit=moved(h.visit, i)) for h in pool.held)
                trained_visit = moved(pool.trained_visit, i)
                pools.append(replace(pool, trained_visit=trained_visit, held=tuple(held)))
    return ShardState(
        next_arrival=max(part.next_arrival for part in parts) * n,
        ledger=ShardLedger.total(part.ledger for part in parts).without_held(elsewhere)
        if keeps_rest
        else ShardLedger.of_held(here),
        pools=tuple(pools),
    )
