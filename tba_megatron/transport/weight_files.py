"""Versions of the weights as files: for searchers that share a disk with the trainer and no network to speak of.

``weights`` of the run folder holds one Hugging Face folder a version, which vLLM and a searcher that starts load as
any other, and ``newest.json``, which names the one to start from. Folders and marker appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from tba_megatron.errors import ModelError, WeightTransferError, shown
from tba_megatron.models.hf_folder import Stored, list_tensors
from tba_megatron.models.hf_writer import PlannedFile, file_names, finish_folder, write_weights
from tba_megatron.transport.manifest import Entry, Layout, Manifest, check_layout, unpack, verify
from tba_megatron.transport.rendezvous import MARKER
from tba_megatron.types import PolicyVersion

_TRIES = 20
_PARTIAL = ".partial"
_LENGTH_BYTES = 8  # of a safetensors file, before its header
_SAFE_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}  # as a safetensors header names them


def version_folder(weights: Path, version: PolicyVersion) -> Path:
    return weights / str(version)


def partial_of(weights: Path, version: PolicyVersion) -> Path:
    """Where ``version`` is written until it is whole: what ``hf_writer`` makes ``version_folder`` of."""
    return weights / f".{version}{_PARTIAL}"


def stage_file(stage: int, n_stages: int) -> str:
    """The name of the file that holds what stage ``stage`` sends."""
    return file_names(n_stages)[stage]


# ---- writing


def write_stage(partial: Path, file_name: str, layout: Layout, buckets: Sequence[Tensor]) -> None:
    """One stage's tensors as a safetensors file in ``partial``, on the disk when this returns.

    WeightTransferError when the disk is full or ``partial`` cannot be written to.
    """
    path = partial / file_name
    try:
        write_weights(path, unpack(layout.entries, buckets))
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)  # it may hold the space that the disk lacks
        raise WeightTransferError(f"{path} cannot be written: {_reason(error)}") from None


def finish_version(partial: Path, folder: Path, manifest: Manifest, n_stages: int) -> None:
    """The index, if there are several files, and the folder's name: then ``folder`` is whole.

    WeightTransferError when a file is missing or the disk is full.
    """
    files = _planned(manifest, n_stages)
    try:
        finish_folder(partial, folder, files)
        for path in (*sorted(folder.iterdir()), folder, folder.parent):
            _sync(path)
    except OSError as error:
        raise WeightTransferError(f"{folder} cannot be finished: {_reason(error)}") from None


def _planned(manifest: Manifest, n_stages: int) -> Mapping[str, PlannedFile]:
    names: list[list[str]] = [[] for _ in range(n_stages)]
    nbytes = [0] * n_stages
    for entry in manifest.entries:
        stage = manifest.buckets[entry.bucket].owner
        names[stage].append(entry.name)
        nbytes[stage] += entry.nbytes
    return {
        stage_file(stage, n_stages): PlannedFile(names=tuple(names[stage]), nbytes=nbytes[stage])
        for stage in range(n_stages)
    }


def write_marker(weights: Path, version: PolicyVersion) -> None:
    """From here on ``newest`` says ``version``. WeightTransferError when it cannot be written."""
    marker, partial = weights / MARKER, weights / f".{MARKER}{_PARTIAL}"
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"version": str(version)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(marker)
        _sync(weights)
    except OSError as error:
        raise WeightTransferError(f"{marker} cannot be written: {_reason(error)}") from None


def remove_old(weights: Path, keep: int) -> None:
    """Leave the newest ``keep`` versions, and the marked one; as ``remove_partials`` for the only writer.

    What cannot be removed stays for the next time.
    """
    remove_partials(weights)
    found = newest(weights)
    versions = [version for name in _names(weights) if (version := _version(name)) is not None]
    kept = {*sorted(versions, reverse=True)[:keep], *([found[0]] if found else [])}
    for version in set(versions) - kept:
        shutil.rmtree(version_folder(weights, version), ignore_errors=True)


def remove_partials(weights: Path) -> None:
    """What writers left that were killed or found a full disk; for the only writer, while it writes nothing."""
    for name in _names(weights):
        if name.endswith(_PARTIAL) and _version(name.removeprefix(".").removesuffix(_PARTIAL)) is not None:
            shutil.rmtree(weights / name, ignore_errors=True)


# ---- reading


def newest(weights: Path) -> tuple[PolicyVersion, Path] | None:
    """The marked version and its folder; None before the first. WeightTransferError when the marker is damaged."""
    marker = weights / MARKER
    try:
        version = PolicyVersion.parse(json.loads(marker.read_text(encoding="utf-8"))["version"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise WeightTransferError(f"{marker} cannot be read: {_reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightTransferError(
            f"{marker} names no version; remove it, and the trainer writes it anew with its next version"
        ) from None
    return version, version_folder(weights, version)


def hold_newest(weights: Path, held: Path) -> PolicyVersion:
    """Links in the empty folder ``held`` to all files of the marked version, which is told.

    WeightTransferError where none is marked, or one disappears again and again while it is linked to.
    """
    for _ in range(_TRIES):
        found = newest(weights)
        if found is None:
            raise WeightTransferError(f"{weights} names no version to start from; is it on a disk that all share?")
        version, folder = found
        try:
            for path in folder.iterdir():
                _link(path, held / path.name)
            return version
        except FileNotFoundError:  # it was removed for a newer one
            for path in held.iterdir():
                path.unlink()
        except OSError as error:
            raise WeightTransferError(f"{folder} cannot be read: {_reason(error)}") from None
    raise WeightTransferError(f"versions in {weights} leave faster than they can be linked to")


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # not every file system has links
        shutil.copyfile(path, target)


def read_version(manifest: Manifest, folder: Path, staging: Sequence[Tensor]) -> None:
    """All of ``manifest`` from the files of ``folder`` into ``staging``, verified as what comes by broadcast.

    ``staging`` is zero between tensors. WeightTransferError with the file that is missing, damaged or of another
    version.
    """
    check_layout(manifest)
    try:
        stored = list_tensors(folder)
        _check_headers(manifest, folder, stored)
        for path in sorted({stored[entry.name].path for entry in manifest.entries}):
            _read_file(path, [entry for entry in manifest.entries if stored[entry.name].path == path], staging)
    except (ModelError, OSError, msgspec.DecodeError) as error:
        raise WeightTransferError(f"version {manifest.version}: {_reason(error)}") from None
    except WeightTransferError as error:
        raise WeightTransferError(f"version {manifest.version}: {error}") from None
    for index, bucket in enumerate(staging):
        files = {stored[entry.name].path.name for entry in manifest.entries if entry.bucket == index}
        verify(manifest, index, bucket, f"{folder}/{' and '.join(sorted(files))}")


def _check_headers(manifest: Manifest, folder: Path, stored: Mapping[str, Stored]) -> None:
    for entry in manifest.entries:
        found = stored.get(entry.name)
        if found is None:
            raise WeightTransferError(f"{folder} lacks {shown(entry.name)}")
        if (found.dtype, found.shape) != (_SAFE_DTYPES.get(entry.dtype), entry.shape):
            raise WeightTransferError(
                f"{shown(entry.name)} in {found.path} is {found.dtype} {list(found.shape)}, not {entry.dtype} "
                f"{list(entry.shape)}"
            )


def _read_file(path: Path, entries: Sequence[Entry], staging: Sequence[Tensor]) -> None:
    """``entries`` to their places in ``staging``.

    Not mapped into memory, as safetensors would: where a remote disk loses a mapped file, its reader is killed.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(header_bytes), type=dict[str, dict[str, Any]])
        for entry in entries:
            start, end = header.get(entry.name, {}).get("data_offsets", (0, 0))
            file.seek(_LENGTH_BYTES + header_bytes + start)
            target = staging[entry.bucket][entry.offset : entry.offset + entry.nbytes]
            raw = target if target.device.type == "cpu" else torch.empty(entry.nbytes, dtype=torch.uint8)
            if end - start != entry.nbytes or file.readinto(raw.numpy().data) != entry.nbytes:
                raise WeightTransferError(f"{path} was replaced while it was read, or ends within {shown(entry.name)}")
            if raw is not target:
                target.copy_(raw)


# ---- small things


def _names(weights: Path) -> list[str]:
    try:
        return sorted(os.listdir(weights))
    except OSError:
        return []


def _version(name: str) -> PolicyVersion | None:
    """The version whose folder is called ``name``."""
    try:
        version = PolicyVersion.parse(name)
    except ValueError:
        return None
    return version if str(version) == name else None


def _sync(path: Path) -> None:
    """What is in ``path``, for a folder its names, outlives a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return shown(" ".join(str(error).split()), 300)
