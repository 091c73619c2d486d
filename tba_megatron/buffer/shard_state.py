"""A replay shard at rest: its columns for ``np.savez``, and a shard made of the columns of one or of several.

Tokens, log-probs and spans are in the columns too where no log keeps them (``with_payload``); otherwise they are read
from the records of the log, in which a rollout is found by its id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tba_megatron.buffer.ledger import ShardLedger
from tba_megatron.buffer.prompts import prompt_key
from tba_megatron.buffer.rows import NAMES
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.ragged import Ints, split, take
from tba_megatron.rollout_batch import MOST_SEQUENCE, RolloutBatch

Columns = dict[str, npt.NDArray[Any]]
_FORMAT = 2
_SEQUENCE_BITS = MOST_SEQUENCE.bit_length() - 1
_SAVED = tuple(name for name in NAMES if not name.endswith("_at") and name != "version_list")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedShard:
    """The columns of a shard, and what its log holds of it: (segment, batch) of each record. Empty without a log."""

    columns: Mapping[str, npt.NDArray[Any]]
    records: Iterable[tuple[int, RolloutBatch]] = ()


def to_columns(shard: ReplayShard, *, with_payload: bool) -> Columns:
    """Copies of everything, ledger included, in order of arrival: they stay as they are while the shard lives on."""
    r = shard.rows
    rows = r.living()
    rows = rows[np.argsort(r.arrival[rows], kind="stable")]
    prompts, prompt_of_row = np.unique(r.prompt[rows], return_inverse=True)
    columns: Columns = {name: getattr(r, name)[rows] for name in _SAVED}
    columns["prompt"] = prompt_of_row.astype(np.int32)
    _put_strings(columns, "prompt_ids", shard.prompts.ids(prompts))
    _put_strings(columns, "names", shard.names)
    columns["prompt_length"] = shard.prompts.length[prompts]
    columns["prompt_tokens"] = np.concatenate([np.zeros(0, np.int32), *shard.prompts.tokens(prompts)])
    columns["trained_visit"] = shard.prompts.trained_visit[prompts]
    columns["segments"] = np.array(sorted(shard.segments()), np.int64)
    columns["format"] = np.array([_FORMAT, shard.next_arrival], np.int64)
    _put_strings(columns, "ledger", [json.dumps(shard.ledger.state())])
    if with_payload:
        columns["token_ids"], columns["behaviour"] = shard.payload.tokens(rows), shard.payload.behaviour(rows)
        columns["spans"] = shard.payload.spans(rows)
    return columns


def restore(
    shard: ReplayShard,
    parts: Sequence[SavedShard],
    owns: Callable[[str], bool] = lambda prompt_id: True,
    *,
    keeps_rest: bool = True,
) -> int:
    """Makes ``shard`` the one of the prompts that it ``owns`` by their id, out of all shards of a run.

    Shards whose ``owns`` share out all prompts, and of which one ``keeps_rest``, hold what ``parts`` held and sum to
    the same ledger. An untrained rollout is counted where it is held; all that can change no more, and belongs to no
    prompt, is counted by the one that keeps the rest. A smaller capacity evicts.

    Returns how many rollouts no record holds; they are not in the shard, and no shard has received those of them that
    were not trained on. ValueError: the columns are of another format.
    """
    shard.clear()
    n = len(parts)
    ledgers = []
    here: Counter[str] = Counter()  # untrained rollouts of prompts that this shard owns, by searcher
    elsewhere: Counter[str] = Counter()
    gone: Counter[str] = Counter()
    restored: list[Ints] = []
    n_lost = 0
    for i, part in enumerate(parts):
        check_format(part.columns)
        _, next_arrival = part.columns["format"].tolist()
        shard.next_arrival = max(shard.next_arrival, next_arrival * n)
        ledgers.append(ShardLedger.from_state(json.loads(_get_strings(part.columns, "ledger")[0])))
        mine = np.array([owns(prompt_id) for prompt_id in _get_strings(part.columns, "prompt_ids")], np.bool_)
        chosen = mine[part.columns["prompt"]]
        untrained = part.columns["uses"] == 0
        here += _by_searcher(part.columns, untrained & chosen)
        elsewhere += _by_searcher(part.columns, untrained & ~chosen)
        rows, lost = _restore_rows(shard, part, np.flatnonzero(chosen), partial(_moved, n_parts=n, part=i))
        restored.append(rows)
        gone += _by_searcher(part.columns, untrained & lost)
        n_lost += int(np.count_nonzero(lost))
    if keeps_rest:
        shard.ledger = ShardLedger.total(ledgers).without_held(elsewhere + gone)
    else:
        shard.ledger = ShardLedger.of_held(here - gone)
    rows = np.concatenate([np.zeros(0, np.int64), *restored])
    shard.index_rows(rows[np.argsort(shard.rows.arrival[rows], kind="stable")])
    shard.evict()
    return n_lost


def check_format(columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """ValueError: the columns are of another format."""
    found = columns["format"].tolist()[0] if "format" in columns else 1
    if found != _FORMAT:
        raise ValueError(f"the shard's format is {found}, this program reads {_FORMAT}; choose another run.folder")


def _moved(numbers: Ints, *, n_parts: int, part: int) -> Ints:
    """Arrivals of one part among those of all; -1 stays."""
    return np.where(numbers < 0, numbers, numbers * n_parts + part)


def _restore_rows(
    shard: ReplayShard, part: SavedShard, chosen: Ints, moved: Callable[[Ints], Ints]
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """(new rows of the rollouts ``chosen``, which rollouts of the part were not found in its records)."""
    columns, r = part.columns, shard.rows
    rows = r.allocate(len(chosen))
    names = np.array([shard.names.number(name) for name in _get_strings(columns, "names")] + [0], np.int32)
    for name in _SAVED:
        getattr(r, name)[rows] = columns[name][chosen]
    r.searcher[rows], r.source[rows] = names[columns["searcher"][chosen]], names[columns["source"][chosen]]
    r.arrival[rows], r.visit[rows] = moved(columns["arrival"][chosen]), moved(columns["visit"][chosen])
    found = _fill_from_columns(shard, columns, chosen, rows) if "token_ids" in columns else _fill(shard, part, rows)
    lost = np.zeros(len(columns["prompt"]), np.bool_)
    lost[chosen[~found]] = True
    r.release(rows[~found])
    rows, chosen = rows[found], chosen[found]
    prompts, prompt_of_row = np.unique(columns["prompt"][chosen], return_inverse=True)
    ids = _get_strings(columns, "prompt_ids")
    chosen_ids = [ids[p] for p in prompts.tolist()]
    r.prompt[rows] = shard.prompts.begin(
        chosen_ids,
        [prompt_key(prompt_id) for prompt_id in chosen_ids],
        take(columns["prompt_tokens"], columns["prompt_length"], prompts.astype(np.int64)),
        columns["prompt_length"][prompts],
        moved(columns["trained_visit"][prompts]),
    )[prompt_of_row]
    return rows, lost


def _fill_from_columns(
    shard: ReplayShard, columns: Mapping[str, npt.NDArray[Any]], chosen: Ints, rows: Ints
) -> npt.NDArray[np.bool_]:
    none = np.zeros(0, np.int32)
    everything = RolloutBatch(
        prompt_ids=(),
        names=(),
        lease_G=none.astype(np.int64),
        size_G=none,
        prompt_length_G=none,
        prompt_tokens=none,
        searcher_S=columns["searcher"],
        source_S=columns["source"],
        sequence_S=columns["sequence"],
        reward_S=columns["reward"],
        stop_reason_S=columns["stop_reason"],
        copies_S=columns["copies"],
        length_S=columns["length"],
        token_ids_T=columns["token_ids"],
        behaviour_length_S=columns["behaviour_length"],
        behaviour_B=columns["behaviour"],
        span_count_S=columns["span_count"],
        spans_P=columns["spans"],
        reference_S=columns["reference"],
        reference_version_S=columns["reference_version"],
    )
    shard.payload.put(rows, everything, chosen)
    return np.ones(len(rows), np.bool_)


def _fill(shard: ReplayShard, part: SavedShard, rows: Ints) -> npt.NDArray[np.bool_]:
    """Which of ``rows`` a record of the part holds; their payload is stored."""
    r = shard.rows
    found = np.zeros(len(rows), np.bool_)
    keys = _id_keys(r.searcher[rows], r.sequence[rows])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    for segment, batch in part.records:
        if not len(keys):
            break
        numbers = np.array([shard.names.number(name) for name in batch.names] + [0], np.int32)
        wanted = _id_keys(numbers[batch.searcher_S], batch.sequence_S)
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        i = order[place]
        candidates = rows[i]
        hit = (
            (keys[place] == wanted)
            & ~found[i]
            & (r.segment[candidates] == segment)
            & (r.length[candidates] == batch.length_S)
            & (r.behaviour_length[candidates] == batch.behaviour_length_S)
            & (r.span_count[candidates] == batch.span_count_S)
        )
        once = np.unique(i[hit], return_index=True)[1]
        s = np.sort(np.flatnonzero(hit)[once])  # ``put`` takes a whole batch as it lies
        shard.payload.put(candidates[s], batch, s)
        found[i[s]] = True
    return found


def _id_keys(searchers: npt.NDArray[np.int32], sequences: Ints) -> Ints:
    return (searchers.astype(np.int64) << _SEQUENCE_BITS) | sequences


def _by_searcher(columns: Mapping[str, npt.NDArray[Any]], chosen: npt.NDArray[np.bool_]) -> Counter[str]:
    names = _get_strings(columns, "names")
    counts = np.bincount(columns["searcher"][chosen], minlength=len(names)).tolist()
    return Counter({name: n for name, n in zip(names, counts, strict=True) if n})


def _put_strings(columns: Columns, name: str, strings: Sequence[str]) -> None:
    rows = [string.encode() for string in strings]
    columns[name] = np.frombuffer(b"".join(rows), np.uint8)
    columns[f"{name}_length"] = np.array([len(row) for row in rows], np.int64)


def _get_strings(columns: Mapping[str, npt.NDArray[Any]], name: str) -> list[str]:
    return [row.tobytes().decode() for row in split(columns[name], columns[f"{name}_length"])]
