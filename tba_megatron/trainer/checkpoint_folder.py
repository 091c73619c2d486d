"""The names of checkpoints: a folder ``step-N`` is always complete, whatever was killed when.

``.step-N.partial`` is being written or removed and counts for nothing. ``.step-N.replaced`` is complete: it exists for
the moment in which another save of the same step takes its name.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_COMPLETE = re.compile(r"(?:step-(\d+)|\.step-(\d+)\.replaced)")


def final_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08d}.partial"


def _replaced_path(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08d}.replaced"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints under ``folder``, oldest first."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:  # a replaced one goes before its successor
        if path.is_dir() and (match := _COMPLETE.fullmatch(path.name)):
            found[int(match[1] or match[2])] = path
    return sorted(found.items())


def make_partial(folder: Path, step: int) -> Path:
    """An empty folder for a save of ``step``; what an earlier save left half done is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    partial = partial_path(folder, step)
    partial.mkdir()
    return partial


def complete(folder: Path, step: int, keep: int) -> None:
    """Give the partial folder of ``step`` its name; then all but the newest ``keep`` checkpoints leave."""
    final, replaced = final_path(folder, step), _replaced_path(folder, step)
    if final.exists():
        _remove(replaced)
        final.rename(replaced)
    partial_path(folder, step).rename(final)
    sync(folder)
    for path in (*folder.glob(".step-*.replaced"), *(path for _, path in checkpoints(folder)[:-keep])):
        _remove(path)


def _remove(path: Path) -> None:
    """Renamed first: a removal that is killed half way must not look like a checkpoint."""
    if path.exists():
        doomed = path.with_name(f".{path.name.removeprefix('.')}.partial")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
