"""The policy as a Hugging Face folder: every stage leader writes its own files, a bucket of weights each."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import SafetensorError

from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.models.hf_writer import PlannedFile, begin_folder, file_names, finish_folder, write_weights
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.exchange import gather_on_all
from tba_megatron.trainer.model import DTYPES
from tba_megatron.trainer.stream_hf import stage_buckets, stream_buckets

FILE_BYTES = 512 << 20


def export_hf(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    groups: Groups,
    *,
    folder: Path,
    template: Path,
    dtype: str,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the whole policy as a Hugging Face folder beside the companions of ``template``; a collective.

    The folder, on a disk that all ranks share, appears under its name when all ranks are done. CheckpointError on
    every rank when any rank could not write; what was there before stays.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    what = f"cannot write {folder}"
    model = (chunks, architecture, shape, groups, DTYPES[dtype], file_bytes)
    try:
        with AllOrNone(what, groups.world):
            if groups.rank == 0:
                if folder.exists() and not folder.is_dir():
                    raise NotADirectoryError(f"{folder} is a file; remove it")
                begin_folder(partial, template, dtype)
        files, mine = _plan(*model)
        with AllOrNone(what, groups.world):
            _write(partial, mine, *model)
        with AllOrNone(what, groups.world):
            if groups.rank == 0:
                finish_folder(partial, folder, files)
    except CheckpointError:
        if groups.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # it may hold the space that the disk lacks
        raise


def _plan(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    groups: Groups,
    dtype: torch.dtype,
    file_bytes: int,
) -> tuple[dict[str, PlannedFile], list[str]]:
    """All files of the model in the order of its stages, and the names of this rank's; from shapes alone."""
    shapes, planned = architecture.tensor_shapes(shape), []
    if groups.is_stage_leader:
        for rules in stage_buckets(chunks, architecture, shape, groups, dtype, file_bytes):
            names = tuple(name for rule in rules for name in rule.hf)
            nbytes = dtype.itemsize * sum(math.prod(shapes[name]) for name in names)
            planned.append(PlannedFile(names=names, nbytes=nbytes))
    stages = sorted(gather_on_all((groups.pp_rank, planned), groups), key=lambda stage: stage[0])
    files = [file for _, part in stages for file in part]
    first = sum(len(part) for pp_rank, part in stages if pp_rank < groups.pp_rank)
    names = file_names(len(files))
    return dict(zip(names, files, strict=True)), names[first : first + len(planned)]


def _write(
    partial: Path,
    names: Sequence[str],
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    groups: Groups,
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    """This stage's files. After a failure the stream is drained all the same: peers take part in every gather."""
    failure: OSError | SafetensorError | None = None
    name = iter(names)
    for bucket in stream_buckets(chunks, architecture, shape, groups, dtype, file_bytes):
        if bucket and failure is None:
            try:
                write_weights(partial / next(name), bucket)
            except (OSError, SafetensorError) as error:
                failure = error
        del bucket  # before the next is gathered
    if failure is not None:
        raise failure
