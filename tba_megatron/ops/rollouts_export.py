"""Rollouts into a file for other programs, JSONL or Parquet; the file appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from tba_megatron.errors import ConfigError
from tba_megatron.ops.rollouts_view import RolloutRecord

Chunks = Iterable[list[RolloutRecord]]


def check_target(path: Path) -> None:
    """ConfigError where ``export`` could not write ``path``: before much has been read for it."""
    if path.suffix not in _WRITERS:
        raise ConfigError([f"export={path}: unknown ending; name a file that ends with {' or '.join(_WRITERS)}"])
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError([f"export={path}: {what}; name a file in a folder that exists"])
    if path.suffix == ".parquet":
        _pyarrow()


def export(path: Path, records: Chunks) -> int:
    """Write ``records`` to ``path``, in the format of its ending; how many. ConfigError where it cannot be written."""
    check_target(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            n = _WRITERS[path.suffix](partial, records)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError([f"export={path}: {error.strerror or error}; name a file that can be written"]) from None
    return n


def _write_jsonl(path: Path, records: Chunks) -> int:
    encoder, n = msgspec.json.Encoder(), 0  # what is not finite becomes null
    with path.open("wb") as file:
        for some in records:
            file.write(encoder.encode_lines(some))
            n += len(some)
    return n


def _write_parquet(path: Path, records: Chunks) -> int:
    pyarrow, parquet = _pyarrow()
    types = {
        "prompt_id": pyarrow.string(),
        "prompt": pyarrow.string(),
        "completion": pyarrow.string(),
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "prompt_token_ids": pyarrow.list_(pyarrow.int32()),
        "reward": pyarrow.float64(),
        "stop_reason": pyarrow.string(),
        "version": pyarrow.string(),
        "foreign": pyarrow.bool_(),
        "age": pyarrow.int64(),
        "uses": pyarrow.int64(),
        "copies": pyarrow.int64(),
        "source": pyarrow.string(),
        "searcher": pyarrow.string(),
        "sequence": pyarrow.int64(),
        "has_behaviour_logprobs": pyarrow.bool_(),
        "behaviour_logprobs": pyarrow.list_(pyarrow.float32()),
        "reference_logprob": pyarrow.float64(),
        "reference_version": pyarrow.int64(),
    }
    schema, n = pyarrow.schema(types), 0
    with parquet.ParquetWriter(path, schema) as writer:
        for some in records:
            writer.write_table(pyarrow.Table.from_pylist([msgspec.structs.asdict(one) for one in some], schema=schema))
            n += len(some)
    return n


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            [
                "export: a Parquet file needs pyarrow, which is not installed; "
                "pip install 'tba-megatron[parquet]' (or pyarrow), or export to a .jsonl file"
            ]
        ) from None
    return pyarrow, pyarrow.parquet


_WRITERS: dict[str, Callable[[Path, Chunks], int]] = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
