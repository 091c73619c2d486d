"""``tba rollouts RUN``: the stored rollouts of a run as a table, as tab-separated lines, or in a file.

``tba rollouts RUN min_reward=0.5 sort=-reward limit=50``; the keys are those of ``RolloutsSettings``. At a terminal the
table fits its width; elsewhere there is a line a rollout with all of its text, after a line of names. Below comes a
line that sums up everything that matches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, get_args

import numpy as np
from pydantic import ValidationError
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tba_megatron.config_load import suggestion
from tba_megatron.config_sections import CountOrZero
from tba_megatron.errors import ConfigError, shown
from tba_megatron.ops.rollouts_export import check_target, export
from tba_megatron.ops.rollouts_view import (
    RolloutQuery,
    RolloutRecord,
    Sort,
    Stop,
    StoredRollouts,
    Totals,
    open_rollouts,
    records,
    select,
    totals,
)
from tba_megatron.ragged import Ints

_TEXTS = ("prompt", "completion")
_AT_TERMINAL = ("version", "source", "age", "reward", "uses", "stop", "tokens", *_TEXTS)
_IN_LINES = (
    *("version", "age", "reward", "uses", "copies", "stop", "tokens", "source", "searcher", "sequence", "prompt_id"),
    *_TEXTS,
)
_CHOICES = {"sort": get_args(Sort), "stop": get_args(Stop)}
_MIN_TEXT_CELLS = 8
_PROMPT_SHARE = 0.4  # of the width that both texts have, where both are long


class RolloutsSettings(RolloutQuery):
    """The query, and where its answer goes."""

    limit: CountOrZero = 20
    """Rollouts that are shown; 0: all. An export has all."""
    export: Path | None = None
    """A file that ends with .jsonl or .parquet."""


def run(folder: Path, settings: Sequence[str]) -> int:
    wanted = read_settings(settings)
    if wanted.export is not None:
        check_target(wanted.export)
    stored = open_rollouts(folder)
    rows = select(stored, wanted)
    try:
        if wanted.export is not None:
            n = export(wanted.export, records(stored, rows))
            print(f"{n} rollouts are in {wanted.export}")
            print(_totals_line(totals(stored, rows)))
        else:
            _show(stored, rows, rows[: wanted.limit or None], sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough. Python's own flush at the end must not fail on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read_settings(settings: Sequence[str]) -> RolloutsSettings:
    """ConfigError with a line for each setting that cannot be used; of two values of one key the later one counts."""
    known = list(RolloutsSettings.model_fields)
    problems: list[str] = []
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            problems.append(f"{shown(setting)}: not of the form key=value; the keys are {', '.join(known)}")
        elif key not in known:
            problems.append(f"{shown(setting)}: unknown key; {suggestion(key, known, 'the keys are')}")
        else:
            values[key] = value
    try:
        wanted = RolloutsSettings.model_validate_strings(values)
    except ValidationError as error:
        raise ConfigError(problems + [_problem(p["loc"], p["msg"], values) for p in error.errors()]) from None
    if problems:
        raise ConfigError(problems)
    return wanted


def _problem(location: tuple[int | str, ...], message: str, values: dict[str, str]) -> str:
    if not location:
        return message.removeprefix("Value error, ")
    key = str(location[0])
    words = message.removeprefix("Input ")
    if key in _CHOICES:
        words = f"unknown; {suggestion(values[key], _CHOICES[key])}"
    return f"{key}={shown(values[key])}: {words}"


# ---- what is printed


def _show(stored: StoredRollouts, matching: Ints, rows: Ints, out: TextIO) -> None:
    line = _totals_line(totals(stored, matching))
    if out.isatty():
        console = Console(file=out, highlight=False)
        several = len(np.unique(stored.shard.rows.source[rows])) > 1
        names = [name for name in _AT_TERMINAL if name != "source" or several]
        for some in records(stored, rows):
            console.print(_table(some, console.width, names))
        console.print(Text(line, style="dim"), soft_wrap=True)
        return
    out.write("\t".join(_IN_LINES) + "\n")
    for some in records(stored, rows):
        out.writelines("\t".join(_escaped(_field(one, name)) for name in _IN_LINES) + "\n" for one in some)
    out.write(f"# {line}\n")


def _field(record: RolloutRecord, name: str) -> str:
    match name:
        case "version":
            return f"{record.version} foreign" if record.foreign else record.version
        case "age":
            return "-" if record.age is None else str(record.age)
        case "reward":
            return f"{record.reward:.6g}"
        case "stop":
            return record.stop_reason
        case "tokens":
            return str(len(record.token_ids))
        case _:
            return str(getattr(record, name))


def _table(some: Sequence[RolloutRecord], width: int, names: Sequence[str]) -> Table:
    """Columns ``names`` of fixed widths, so that only the texts are shortened."""
    cells = {name: [_one_line(_field(record, name), width) for record in some] for name in names}
    needed = {name: max(map(cell_len, [name, *column])) for name, column in cells.items()}
    room = width - sum(needed[name] + 2 for name in names if name not in _TEXTS) - 2
    prompt = max(_MIN_TEXT_CELLS, int(room * _PROMPT_SHARE), room - needed["completion"])
    needed["prompt"] = min(needed["prompt"], prompt)
    needed["completion"] = min(needed["completion"], max(_MIN_TEXT_CELLS, room - needed["prompt"]))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in names:
        justify = "left" if name in (*_TEXTS, "stop", "source") else "right"
        table.add_column(name, justify=justify, width=needed[name], no_wrap=True, overflow="ellipsis")
    for row in zip(*(cells[name] for name in names), strict=True):
        table.add_row(*(Text(_shortened(cell, needed[name])) for name, cell in zip(names, row, strict=True)))
    return table


def _one_line(text: str, most: int) -> str:
    """What can be seen of the beginning of ``text``; a terminal must obey nothing in it."""
    return "".join("⏎" if c == "\n" else c if c.isprintable() else _code(c) for c in text[:most])


def _shortened(text: str, cells: int) -> str:
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"


_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


def _escaped(text: str) -> str:
    """On one line and in one field, without loss."""
    return "".join(_ESCAPES.get(c) or (c if c.isprintable() else _code(c)) for c in text)


def _code(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


def _totals_line(found: Totals) -> str:
    age = f"age p50 {found.age_p50} max {found.age_max}" if found.age_max is not None else "age -"
    step = found.uses_as_of_step
    as_of = f" (as of step {step})" if step is not None else " (no checkpoint says which)"
    return (
        f"{found.n_rollouts} of {found.n_held} rollouts match, {found.n_prompts} prompts, {_size(found.bytes)}, "
        f"mean reward {found.mean_reward:.3g}, never used {100 * found.never_used_fraction:.1f} %{as_of}, {age}"
    )


def _size(n_bytes: int) -> str:
    size, unit = float(n_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
