"""The stored rollouts of a run, for people: read from its checkpoint and its logs, filtered, sorted, as text.

Nothing in the run folder is written and no lock is taken, so a trainer may be at work in it. What is read is what a
restart would have at this moment: everything that was acknowledged, with the ``uses`` of the newest checkpoint.
Filters work on the shard's columns; Python objects and text are made of some rollouts at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from tba_megatron.buffer.rows import turns, version_of
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.stored_shard import REPLAY, StoredShard, generations
from tba_megatron.config import Config
from tba_megatron.config_load import load_config
from tba_megatron.config_sections import CountOrZero, RecordedData, Section
from tba_megatron.errors import CheckpointError, RunFolderError
from tba_megatron.models.tokenizer import HfTokenizer
from tba_megatron.ragged import Ints, offsets, split
from tba_megatron.rollout_batch import NO_BEHAVIOUR, NO_VERSION, STOP_REASONS
from tba_megatron.trainer.checkpoint_folder import checkpoints
from tba_megatron.trainer.run_state import RunState, read_attempts, read_run_state, read_shard
from tba_megatron.types import PolicyHistory, StopReason, Tokenizer

OFF_BRANCH = -1  # the age of what a policy wrote whose branch a later attempt abandoned, or that was never trained here
_TOKEN_BYTES = 4
_TRIES = 3  # of reading a run whose checkpoints change meanwhile
# Of what becomes Python objects at a time, in tokens; a rollout costs some more than its tokens.
_CHUNK_COST, _ROLLOUT_COST = 1 << 18, 1 << 8


Sort = Literal["newest", "oldest", "reward", "-reward", "age", "-age", "uses", "-uses", "length", "-length"]
Stop = Literal["eos", "length"]


class RolloutQuery(Section):
    """Which rollouts, and in what order. Without a value a filter lets everything pass; equal ones are newest first."""

    prompt: str = ""
    """Part of the prompt's text or of its id."""
    text: str = ""
    """Part of the completion."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_age: CountOrZero | None = None
    """In optimizer steps. Rollouts of an abandoned branch and of another policy have no age, and no filter on age lets
    them pass."""
    max_age: CountOrZero | None = None
    min_uses: CountOrZero | None = None
    """In optimizer steps that a rollout was part of, as of the newest checkpoint."""
    max_uses: CountOrZero | None = None
    source: str | None = None
    searcher: str | None = None
    stop: Stop | None = None
    sort: Sort = "newest"
    """``reward``, ``age``, ``uses`` and ``length`` in tokens: the smallest first; with ``-`` the largest."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("reward", "age", "uses"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{name}={low:g} is above max_{name}={high:g}, so no rollout can pass")
        return self


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout as it is shown and exported."""

    prompt_id: str
    prompt: str
    completion: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    reward: float
    stop_reason: str
    version: str  # attempt.step of the newest policy that wrote a part of it; where foreign, of its era
    foreign: bool  # written by a policy that was never trained here
    age: int | None  # optimizer steps
    uses: int
    copies: int
    source: str
    searcher: str
    sequence: int
    has_behaviour_logprobs: bool
    behaviour_logprobs: list[float] | None  # nats, one a token
    reference_logprob: float | None  # nats, the sum over the completion
    reference_version: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Of the rollouts that match; without any, shares and means are 0."""

    n_rollouts: int
    n_held: int
    n_prompts: int
    bytes: int  # of prompts, completions and behaviour log-probs
    mean_reward: float
    never_used_fraction: float
    uses_as_of_step: int | None  # of the checkpoint that knows them; None without one
    age_p50: int | None  # None where none has an age
    age_max: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRollouts:
    """What a run has stored. ``age`` is by row number, in optimizer steps, or ``OFF_BRANCH``."""

    shard: ReplayShard
    tokenizer: Tokenizer
    age: Ints
    checkpoint_step: int | None = None


def open_rollouts(folder: Path) -> StoredRollouts:
    """The stored rollouts of a run folder.

    RunFolderError where it is none or holds no rollouts; CheckpointError and ModelError name the file that cannot be
    read.
    """
    config = _config_of(folder)
    if isinstance(config.trainer.data, RecordedData):
        raise RunFolderError(
            f"run folder {folder} was trained on the recording {config.trainer.data.folder} and holds no rollouts; "
            f"give the folder of the run that made it"
        )
    shard, state = _newest_shard(config)
    if not len(shard):
        where = "checkpoints" if config.buffer.segments.kind == "none" else f"{REPLAY} and checkpoints"
        raise RunFolderError(
            f"run folder {folder} holds no rollouts in {where}; they come when a searcher has sent some"
        )
    if not config.start_model.is_dir():
        raise RunFolderError(
            f"{config.start_model}, whose tokenizer wrote the rollouts of {folder}, is not there; where config.yaml "
            f"has a relative path, start this from where the run was started"
        )
    # An attempt is noted in the run folder when it begins, in a checkpoint only when that is saved.
    base_steps = max(read_attempts(folder), state.base_steps if state else (), (0,), key=len)
    return StoredRollouts(
        shard=shard,
        tokenizer=HfTokenizer(config.start_model),
        age=_ages(shard, PolicyHistory(base_steps=base_steps), state.step if state else 0),
        checkpoint_step=state.step if state else None,
    )


def _config_of(folder: Path) -> Config:
    """The run's configuration, for the folder where it lies."""
    if not (folder / "config.yaml").is_file():
        what = "is a file" if folder.is_file() else "has no config.yaml" if folder.is_dir() else "does not exist"
        raise RunFolderError(f"{folder} {what}; give a run folder, which is what run.folder of a configuration names")
    config = load_config(folder / "config.yaml")
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": folder})})


def _newest_shard(config: Config) -> tuple[ReplayShard, RunState | None]:
    """All shards as one.

    A trainer may meanwhile replace the checkpoint that is being read, and delete what only that one needed: then it is
    read again.
    """
    folder = config.run.folder / "checkpoints"
    for last_try in (False,) * (_TRIES - 1) + (True,):
        path = _newest(folder)
        try:
            restored = _restored(config, path)
        except CheckpointError as error:
            if last_try or _newest(folder) == path:
                advice = f"; remove {path} to read an earlier one" if path else ""
                raise CheckpointError(f"{error}{advice}") from None
            continue
        if last_try or _newest(folder) == path:
            return restored
    raise AssertionError("the last try returns or raises")


def _newest(folder: Path) -> Path | None:
    return max(checkpoints(folder), default=(0, None))[1]


def _restored(config: Config, checkpoint: Path | None) -> tuple[ReplayShard, RunState | None]:
    buffer, replay = config.buffer, config.run.folder / REPLAY
    shard = ReplayShard(
        buffer.capacity_rollouts,
        buffer.per_prompt_rollouts,
        capacity_bytes=buffer.capacity_bytes,
        drop_truncated=config.objective.truncated == "drop",
        needs_behaviour=config.objective.needs_behaviour,
        needs_reference=config.objective.needs_reference,
    )
    state = read_run_state(checkpoint) if checkpoint else None
    parts = {i: read_shard(checkpoint, i) for i in range(state.data_parallel)} if checkpoint and state else {}
    try:
        found = generations(replay)
        stored = StoredShard(shard, replay=replay if found else None)
        stored.restore(parts, found, read_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint or replay} cannot be read ({error})") from None
    return shard, state


def _ages(shard: ReplayShard, history: PolicyHistory, step: int) -> Ints:
    """By row number, at the newest step that is known: that of the checkpoint or of a stored rollout."""
    rows = shard.rows.living()
    codes, code_of_row = np.unique(shard.rows.version[rows], return_inverse=True)
    versions = [version_of(code) for code in codes.tolist()]
    newest = max([step, history.base_steps[-1], *(v.step for v in versions if history.holds(v))])
    ages = [history.age_steps(version, newest) for version in versions]
    age = np.full(len(shard.rows.version), OFF_BRANCH, np.int64)
    age[rows] = np.array([OFF_BRANCH if a is None else a for a in ages], np.int64)[code_of_row]
    return age


# ---- which


def select(stored: StoredRollouts, query: RolloutQuery) -> Ints:
    """The rows that pass, in the order of ``query.sort``."""
    r = stored.shard.rows
    rows = r.living()
    passes = _in_range(r.reward[rows], query.min_reward, query.max_reward)
    passes &= _in_range(r.uses[rows], query.min_uses, query.max_uses)
    if query.min_age is not None or query.max_age is not None:
        passes &= _in_range(stored.age[rows], max(0, query.min_age or 0), query.max_age)
    for column, name in ((r.source, query.source), (r.searcher, query.searcher)):
        if name is not None:
            names = stored.shard.names
            passes &= column[rows] == (names.index(name) if name in names else -1)
    if query.stop is not None:
        passes &= r.stop_reason[rows] == STOP_REASONS.index(StopReason(query.stop))
    rows = rows[passes]
    if query.prompt:
        rows = rows[_has_prompt(stored, rows, query.prompt)]
    if query.text:
        rows = rows[_has_text(stored, rows, query.text)]
    return rows[_order(stored, rows, query.sort)]


def _in_range(values: npt.NDArray[Any], low: float | None, high: float | None) -> npt.NDArray[np.bool_]:
    passes = np.ones(len(values), np.bool_)
    if low is not None:
        passes &= values >= low
    if high is not None:
        passes &= values <= high
    return passes


def _has_prompt(stored: StoredRollouts, rows: Ints, part: str) -> npt.NDArray[np.bool_]:
    prompts, prompt_of_row = np.unique(stored.shard.rows.prompt[rows], return_inverse=True)
    table, decode = stored.shard.prompts, stored.tokenizer.decode
    ids = table.ids(prompts)
    has = [part in ids[i] or part in decode(tokens) for i, tokens in enumerate(table.tokens(prompts))]
    return np.array(has, np.bool_)[prompt_of_row]


def _has_text(stored: StoredRollouts, rows: Ints, part: str) -> npt.NDArray[np.bool_]:
    payload, decode = stored.shard.payload, stored.tokenizer.decode
    has = np.zeros(len(rows), np.bool_)
    start = 0
    for some in chunks(stored, rows):
        has[start : start + len(some)] = [part in decode(tokens) for tokens in payload.token_rows(some)]
        start += len(some)
    return has


def _order(stored: StoredRollouts, rows: Ints, sort: str) -> Ints:
    r = stored.shard.rows
    newest_first = (-r.arrival[rows], -turns(r.version[rows]))
    if sort in ("newest", "oldest"):
        order = np.lexsort(newest_first)
        return order if sort == "newest" else order[::-1]
    column = {"reward": r.reward, "age": stored.age, "uses": r.uses, "length": r.length}[sort.removeprefix("-")]
    values = column[rows].astype(np.float64)
    if sort.startswith("-"):
        values = -values
    if sort.endswith("age"):
        values[stored.age[rows] == OFF_BRANCH] = np.inf
    return np.lexsort((*newest_first, values))


def totals(stored: StoredRollouts, rows: Ints) -> Totals:
    r, prompts = stored.shard.rows, np.unique(stored.shard.rows.prompt[rows])
    age = stored.age[rows]
    age = age[age != OFF_BRANCH]
    elements = int((r.length[rows].astype(np.int64) + np.maximum(r.behaviour_length[rows], 0)).sum())
    return Totals(
        n_rollouts=len(rows),
        n_held=len(stored.shard),
        n_prompts=len(prompts),
        bytes=_TOKEN_BYTES * (elements + int(stored.shard.prompts.length[prompts].sum(dtype=np.int64))),
        mean_reward=float(r.reward[rows].mean()) if len(rows) else 0.0,
        never_used_fraction=float((r.uses[rows] == 0).mean()) if len(rows) else 0.0,
        uses_as_of_step=stored.checkpoint_step,
        age_p50=int(np.percentile(age, 50, method="lower")) if len(age) else None,
        age_max=int(age.max()) if len(age) else None,
    )


# ---- as text


def chunks(stored: StoredRollouts, rows: Ints) -> list[Ints]:
    """``rows`` in parts that are small enough to make Python objects of."""
    r = stored.shard.rows
    cost = r.length[rows].astype(np.int64) + np.maximum(r.behaviour_length[rows], 0) + _ROLLOUT_COST
    cost += stored.shard.prompts.length[r.prompt[rows]]
    part = offsets(cost)[:-1] // _CHUNK_COST
    return np.split(rows, np.flatnonzero(np.diff(part)) + 1) if len(rows) else []


def records(stored: StoredRollouts, rows: Ints) -> Iterator[list[RolloutRecord]]:
    """The rollouts of ``rows`` in their order, some at a time."""
    for some in chunks(stored, rows):
        yield _records(stored, some)


def _records(stored: StoredRollouts, rows: Ints) -> list[RolloutRecord]:
    shard, decode = stored.shard, stored.tokenizer.decode
    r = shard.rows
    prompts, prompt_of_row = np.unique(r.prompt[rows], return_inverse=True)
    ids, prompt_tokens = shard.prompts.ids(prompts), shard.prompts.tokens(prompts)
    prompt_texts = [decode(tokens) for tokens in prompt_tokens]
    prompt_lists: list[list[int]] = [tokens.tolist() for tokens in prompt_tokens]
    behaviour = split(shard.payload.behaviour(rows), np.maximum(r.behaviour_length[rows], 0))
    columns = zip(rows.tolist(), prompt_of_row.tolist(), shard.payload.token_rows(rows), behaviour, strict=True)
    return [
        RolloutRecord(
            prompt_id=ids[prompt],
            prompt=prompt_texts[prompt],
            completion=decode(tokens),
            token_ids=tokens.tolist(),
            prompt_token_ids=prompt_lists[prompt],
            reward=float(r.reward[row]),
            stop_reason=str(STOP_REASONS[r.stop_reason[row]]),
            version=str(version_of(int(r.version[row])).era),
            foreign=version_of(int(r.version[row])).is_foreign,
            age=None if stored.age[row] == OFF_BRANCH else int(stored.age[row]),
            uses=int(r.uses[row]),
            copies=int(r.copies[row]),
            source=shard.names[r.source[row]],
            searcher=shard.names[r.searcher[row]],
            sequence=int(r.sequence[row]),
            has_behaviour_logprobs=bool(r.behaviour_length[row] != NO_BEHAVIOUR),
            behaviour_logprobs=logprobs.tolist() if r.behaviour_length[row] != NO_BEHAVIOUR else None,
            reference_logprob=None if np.isnan(r.reference[row]) else float(r.reference[row]),
            reference_version=None if r.reference_version[row] == NO_VERSION else int(r.reference_version[row]),
        )
        for row, prompt, tokens, logprobs in columns
    ]
