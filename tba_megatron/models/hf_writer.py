"""Hugging Face folders on disk, written: companions, safetensors files and their index; a folder appears whole.

Every function may raise OSError or SafetensorError; who calls it tells the other ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tba_megatron.models.hf_folder import INDEX, SINGLE

# What travels with the weights: everything a reader needs that is not weights.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFile:
    """A file of weights that is not written yet: the tensors in it and the bytes of their data."""

    names: tuple[str, ...]
    nbytes: int


def file_names(n_files: int) -> list[str]:
    """The names of ``n_files`` files of weights, as transformers names them."""
    if n_files == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{n_files:05d}.safetensors" for i in range(1, n_files + 1)]


def begin_folder(partial: Path, template: Path, dtype: str) -> None:
    """An empty ``partial`` with the companions of ``template``; config.json differs from it in the dtype alone.

    ``partial`` is .NAME.partial beside the folder NAME that ``finish_folder`` makes of it. A folder that an attempt
    killed halfway has left without its name gets it back first: here, so that whatever fails later leaves it there.
    """
    _recover(partial.with_name(partial.stem.removeprefix(".")))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in COMPANIONS:
        if (template / name).exists():
            shutil.copyfile(template / name, partial / name)
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name of the same key
    config["dtype"] = dtype
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_weights(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """One safetensors file beside the companions, on the disk when this returns: a full disk may show at the sync."""
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    save_file(whole, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)  # safetensors (0.8.0) lets the owner alone read its files
    with path.open("rb") as file:
        os.fsync(file.fileno())


def finish_folder(partial: Path, folder: Path, files: Mapping[str, PlannedFile]) -> None:
    """Write the index if there are several files, then give ``partial`` the name ``folder`` in place of what was there.

    FileNotFoundError when a file is not there: another rank wrote it to a disk of its own.
    """
    for name in files:
        if not (partial / name).exists():
            raise FileNotFoundError(f"{partial / name} was written by another rank but is not seen here")
    if len(files) > 1:
        weight_map = {tensor: name for name, planned in files.items() for tensor in planned.names}
        index = {"metadata": {"total_size": sum(f.nbytes for f in files.values())}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _recover(folder)
    before = _before(folder)
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(before)
    try:
        partial.rename(folder)
    except OSError:
        if before.exists():
            before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _before(folder: Path) -> Path:
    """The name of what was there, while the new folder takes its name: no rename replaces a folder that holds files."""
    return folder.with_name(f".{folder.name}.before")


def _recover(folder: Path) -> None:
    """Give ``folder`` its name back where a process died between the two renames of ``finish_folder``."""
    before = _before(folder)
    if before.exists() and not folder.exists():
        before.rename(folder)
