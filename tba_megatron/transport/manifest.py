"""What a version of the weights consists of: names, types and shapes in order, cut into buckets with checksums.

The cut is a pure function of the list of tensors, so sender and receiver agree on every byte before one is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch
import xxhash
from torch import Tensor

from tba_megatron.errors import WeightTransferError
from tba_megatron.types import PolicyVersion


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tensor: bytes ``offset`` to ``offset`` + ``nbytes`` of bucket ``bucket``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


class Bucket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``owner`` is the rank in the broadcast group that sends it; ``checksum`` is xxh3-64 of its bytes."""

    nbytes: int
    owner: int
    checksum: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    entries: tuple[Entry, ...]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """msgspec.DecodeError when ``data`` is no manifest."""
    return _decoder.decode(data)


def build_buckets(
    version: PolicyVersion, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, owner: int
) -> tuple[Manifest, list[Tensor]]:
    """The manifest of one owner's tensors and its buckets: uint8 tensors [nbytes] on the tensors' device.

    A bucket is closed before it would exceed ``bucket_bytes``; a larger tensor has one of its own. Tensors start at
    multiples of 8 bytes, so that a receiver can view them in place.
    """
    entries: list[Entry] = []
    buckets: list[Tensor] = []
    parts: list[Tensor] = []  # of the open bucket: a closed one is joined at once, so that ``tensors`` may be a stream
    filled = 0
    for name, tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if filled and filled + len(raw) > bucket_bytes:
            buckets.append(torch.cat(parts))
            parts, filled = [], 0
        entries.append(
            Entry(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                bucket=len(buckets),
                offset=filled,
                nbytes=len(raw),
            )
        )
        padding = -len(raw) % 8
        parts += [raw, raw.new_zeros(padding)]
        filled += len(raw) + padding
    if parts:
        buckets.append(torch.cat(parts))
    described = tuple(Bucket(nbytes=len(b), owner=owner, checksum=checksum(b)) for b in buckets)
    return Manifest(version=str(version), entries=tuple(entries), buckets=described), buckets


def merge_manifests(parts: Sequence[Manifest]) -> Manifest:
    """The manifests of several owners, one after another; WeightTransferError when a name occurs twice."""
    entries: list[Entry] = []
    buckets: list[Bucket] = []
    for part in parts:
        entries += [msgspec.structs.replace(e, bucket=e.bucket + len(buckets)) for e in part.entries]
        buckets += part.buckets
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or len({part.version for part in parts}) != 1:
        raise WeightTransferError(
            f"version {parts[0].version}: the stages do not fit together (tensors sent twice: {twice})"
        )
    return Manifest(version=parts[0].version, entries=tuple(entries), buckets=tuple(buckets))


def checksum(bucket: Tensor) -> int:
    """xxh3-64 of a uint8 tensor's bytes, read on the host."""
    return xxhash.xxh3_64_intdigest(bucket.cpu().numpy().data)


def unpack(manifest: Manifest, buckets: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """(name, tensor) in manifest order, as views into ``buckets``."""
    tensors = []
    for entry in manifest.entries:
        raw = buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
        tensors.append((entry.name, raw.view(getattr(torch, entry.dtype)).view(entry.shape)))
    return tensors


def check_layout(manifest: Manifest) -> None:
    """WeightTransferError unless every entry lies within its bucket and has the bytes that its shape asks for."""
    for entry in manifest.entries:
        dtype = getattr(torch, entry.dtype, None)
        fits = 0 <= entry.bucket < len(manifest.buckets) and (
            0 <= entry.offset <= entry.offset + entry.nbytes <= manifest.buckets[entry.bucket].nbytes
        )
        sized = isinstance(dtype, torch.dtype) and (
            math.prod(entry.shape) * dtype.itemsize == entry.nbytes
            and entry.offset % dtype.itemsize == 0
            and min(entry.shape, default=0) >= 0
        )
        if not fits or not sized:
            raise WeightTransferError(f"version {manifest.version}: the manifest's entry for {entry.name} is damaged")
