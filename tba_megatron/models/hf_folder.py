"""Hugging Face folders on disk, read: where each tensor lies, and parts of tensors, file by file."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tba_megatron.errors import ModelError, shown
from tba_megatron.models.layouts import Source
from tba_megatron.models.settings import LFS_POINTER, read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SUFFIX = ".safetensors"
_REASON = 200  # characters of what a library says
_LONGEST_NAME = 255  # bytes that a file system lets a file name have

# Weights that are there, but not as safetensors. Reading most of them would run code that they contain.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where a tensor lies and what the header of its file says about it."""

    path: Path
    name: str
    dtype: str  # as safetensors names it: F32, BF16, I8
    shape: tuple[int, ...]


def list_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of ``folder`` by its name, from the headers alone.

    The files are those that the index names, and without an index all that end in .safetensors. ModelError in one
    line that names the file when there is none, one cannot be read, or index and files contradict each other: in both
    directions, since transformers reads all of a file and other loaders only what the index names.
    """
    index = _read_index(folder)
    paths = sorted({folder / file for file in index.values()}) if index else sorted(folder.glob(f"*{_SUFFIX}"))
    if not paths:
        raise ModelError(_no_weights(folder))
    stored: dict[str, Stored] = {}
    for path in paths:
        if not path.name.isprintable():
            raise ModelError(f"{folder} holds a file of the name {shown(path.name)}; rename or remove it")
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in stored:
                    other = stored[name].path.name
                    raise ModelError(f"{path}: {shown(name)} is in {other} too; remove one of the files")
                part = file.get_slice(name)
                stored[name] = Stored(path=path, name=name, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
    for name, file in index.items():
        if name not in stored or stored[name].path != folder / file:
            raise ModelError(f"{folder / file} lacks {shown(name)}, which {INDEX} places there; download both again")
    for name in stored if index else ():
        if name not in index:
            raise ModelError(f"{stored[name].path} holds {shown(name)}, which {INDEX} lacks; download both again")
    if not stored:
        raise ModelError(f"{paths[0]} holds no tensors; download it again, or set model.init to random")
    return stored


class StoredTensor:
    """A ``Source`` in an open file: parts of it are views of the mapped file, read when they are used."""

    def __init__(self, part: Any) -> None:
        self._part = part

    @property
    def shape(self) -> Sequence[int]:
        return self._part.get_shape()

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        return self._part[index]


class HfTensors:
    """The tensors of ``stored``, to be read within a ``with`` block, at whose end every file is closed.

    Its keys are the names to ask for; they may differ from the names in the files.
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.stored)

    def place(self, name: str) -> str:
        """The file that holds ``name``."""
        return str(self.stored[name].path)

    def __enter__(self) -> HfTensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for path in list(self._open):
            self._close(path)

    def read(self, wanted: Sequence[tuple[str, ...]]) -> Iterator[tuple[int, list[Source]]]:
        """(i, the sources of ``wanted[i]``), ordered by file so that each file is opened once.

        A file is closed when nothing else needs it. Parts of sources keep its pages in memory for as long as they
        are referenced: copy them and let them go before the next item. ModelError when a file cannot be opened.
        """
        paths = [sorted({self.stored[name].path for name in names}) for names in wanted]
        order = sorted(range(len(wanted)), key=lambda i: (paths[i][-1], paths[i][0]))
        last = {path: i for i in order for path in paths[i]}
        for i in order:
            for path in paths[i]:
                if path not in self._open:
                    self._open[path] = _open(path).__enter__()
            yield i, [self._source(name) for name in wanted[i]]
            for path in paths[i]:
                if last[path] == i:
                    self._close(path)

    def _source(self, name: str) -> Source:
        stored = self.stored[name]
        try:
            return StoredTensor(self._open[stored.path].get_slice(stored.name))
        except SafetensorError as error:
            what = f"{stored.path}: {shown(stored.name)} cannot be read ({shown(str(error), _REASON)})"
            raise ModelError(f"{what}; was the file replaced?") from None

    def _close(self, path: Path) -> None:
        self._open.pop(path).__exit__(None, None, None)


def open_tensors(folder: Path) -> HfTensors:
    """The tensors of ``folder``, for a ``with`` block; the errors of ``list_tensors``."""
    return HfTensors(list_tensors(folder))


def _open(path: Path) -> safe_open:
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} {_diagnosis(path, error)}") from None
    # To open a pipe would wait for ever.
    kind = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
    raise ModelError(f"{path} is a {kind}, not a safetensors file; remove or replace it")


def _diagnosis(path: Path, error: Exception) -> str:
    """What is wrong with a file that did not open, and what to do."""
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except FileNotFoundError:
        return "does not exist, or is a link to nothing; copy or download it"
    except OSError as refused:
        return f"cannot be read ({refused.strerror}); check who may read it"
    if not start:
        return "is empty; copy or download it again"
    if start == LFS_POINTER:
        return f"is a git-lfs pointer and not the weights; run git lfs pull in {path.parent}"
    reason = shown(" ".join(str(error).split()), _REASON)
    if isinstance(error, OSError):
        return f"cannot be read ({reason}); check the disk and its limits"
    return f"is not a whole safetensors file ({reason}); copy or download it again"


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where there is no index."""
    path = folder / INDEX
    try:
        weight_map = read_object(path).get("weight_map")
    except FileNotFoundError:
        return {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} is not an index (weight_map: tensor to file of this folder); download it again")
    for name, file in weight_map.items():
        if not _is_weights_name(file):
            raise ModelError(
                f"{path} is not an index: it places {shown(name)} in {shown(file)}, which is not the name of a "
                f"*{_SUFFIX} file of this folder; download it again"
            )
    if SINGLE not in weight_map.values() and (folder / SINGLE).exists():
        raise ModelError(
            f"{folder} holds {SINGLE} and an index that does not name it, and loaders differ about which counts; "
            f"remove {SINGLE} or {INDEX}"
        )
    return weight_map


def _is_weights_name(file: object) -> bool:
    if not isinstance(file, str) or not file.isprintable() or len(file.encode()) > _LONGEST_NAME:
        return False
    return file.endswith(_SUFFIX) and Path(file).name == file


def _no_weights(folder: Path) -> str:
    try:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror}); model.path must be a Hugging Face folder"
    if not others:
        return f"{folder} holds no .safetensors file; copy the weights there, or set model.init to random"
    return (
        f"{folder} holds {shown(others[0])}, but no .safetensors file; convert it with "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
    )
