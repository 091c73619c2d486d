"""What a version of the weights consists of: names, types and shapes in order, cut into buckets with checksums.

The cut is a pure function of the list of names, types and shapes, so sender and receiver agree on every byte before
one is sent, and buckets are allocated once for many versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec
import torch
import xxhash
from torch import Tensor

from tba_megatron.errors import WeightTransferError
from tba_megatron.types import PolicyVersion
from tba_megatron.untrusted import decoded

_ALIGNMENT = 8  # bytes; no dtype needs more to be viewed in place
_PIECE = 1 << 20  # bytes that a core's cache holds: what the checksum has read, the finite test reads again for nothing
_NAMED = 4  # of the tensors that are wrong


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


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How one owner's tensors lie in its buckets: the same for every version of a model."""

    entries: tuple[Entry, ...]
    bucket_nbytes: tuple[int, ...]


_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """msgspec.DecodeError when ``data`` is no manifest."""
    return decoded(_decoder, data)


def dtype_text(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


# ---- the cut


def plan_layout(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], bucket_bytes: int) -> Layout:
    """Where each (name, dtype, shape) lies.

    A bucket is closed before it would exceed ``bucket_bytes``; a larger tensor has one of its own. Tensors start at
    multiples of 8 bytes, so that a receiver can view them in place.
    """
    entries: list[Entry] = []
    bucket_nbytes: list[int] = []
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * dtype.itemsize
        if not bucket_nbytes or (bucket_nbytes[-1] and bucket_nbytes[-1] + nbytes > bucket_bytes):
            bucket_nbytes.append(0)
        entries.append(
            Entry(
                name=name,
                dtype=dtype_text(dtype),
                shape=tuple(shape),
                bucket=len(bucket_nbytes) - 1,
                offset=bucket_nbytes[-1],
                nbytes=nbytes,
            )
        )
        bucket_nbytes[-1] += nbytes + -nbytes % _ALIGNMENT
    return Layout(entries=tuple(entries), bucket_nbytes=tuple(bucket_nbytes))


def layout_of(manifest: Manifest) -> Layout:
    """How a version of several owners lies in the buckets of who receives it."""
    return Layout(entries=manifest.entries, bucket_nbytes=tuple(bucket.nbytes for bucket in manifest.buckets))


def allocate(layout: Layout, device: torch.device) -> list[Tensor]:
    """Buckets [nbytes] uint8, to be filled again and again. Zeroed: what lies between tensors is part of a checksum."""
    return [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in layout.bucket_nbytes]


def unpack(entries: Iterable[Entry], buckets: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """(name, tensor) in order, as views into ``buckets``."""
    return [(entry.name, _view(entry, buckets[entry.bucket])) for entry in entries]


def _view(entry: Entry, bucket: Tensor) -> Tensor:
    raw = bucket[entry.offset : entry.offset + entry.nbytes]
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


# ---- what is in the buckets


def describe(version: PolicyVersion, layout: Layout, buckets: Sequence[Tensor], owner: int) -> Manifest:
    """The manifest of one owner's buckets, read once; WeightTransferError with the names of what is not finite."""
    described, strange = [], []
    for bucket, entries in zip(buckets, _by_bucket(layout.entries, len(buckets)), strict=True):
        found, finite = _read(bucket, entries)
        described.append(Bucket(nbytes=len(bucket), owner=owner, checksum=found))
        strange += [] if finite else _not_finite(entries, bucket)
    if strange:
        raise WeightTransferError(f"version {version}: {_complaint(strange)}")
    return Manifest(version=str(version), entries=layout.entries, buckets=tuple(described))


def verify(manifest: Manifest, index: int, bucket: Tensor, sender: str) -> None:
    """Read bucket ``index`` once; WeightTransferError unless it is what the manifest says, and finite."""
    entries = [entry for entry in manifest.entries if entry.bucket == index]
    found, finite = _read(bucket, entries)
    where = f"version {manifest.version}: bucket {index} of {len(manifest.buckets)} from {sender}"
    if found != manifest.buckets[index].checksum:
        raise WeightTransferError(f"{where} has another checksum than its manifest")
    strange = [] if finite else _not_finite(entries, bucket)
    if strange:
        raise WeightTransferError(f"{where}: {_complaint(strange)}")


def checksum(bucket: Tensor) -> int:
    """xxh3-64 of a uint8 tensor's bytes, read on the host."""
    return xxhash.xxh3_64_intdigest(bucket.cpu().numpy().data)


def _read(bucket: Tensor, entries: Sequence[Entry]) -> tuple[int, bool]:
    """The checksum, and False where something may not be finite. Others get the GIL while a piece is read."""
    if bucket.device.type != "cpu":
        return checksum(bucket), all(_sum_is_finite(bucket[a:b], dtype) for a, b, dtype in _runs(entries, len(bucket)))
    digest, finite = xxhash.xxh3_64(), True
    data = bucket.numpy().data
    for run_start, run_end, dtype in _runs(entries, len(bucket)):
        for start in range(run_start, run_end, _PIECE):
            end = min(start + _PIECE, run_end)
            digest.update(data[start:end])
            finite = finite and _sum_is_finite(bucket[start:end], dtype)
    return digest.intdigest(), finite


def _runs(entries: Sequence[Entry], nbytes: int) -> Iterator[tuple[int, int, torch.dtype]]:
    """(start, end, dtype): byte ranges, each of neighbours of one dtype, that cover a bucket without gaps."""
    starts: list[tuple[int, torch.dtype]] = []
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        if not starts:
            starts.append((0, dtype))
        elif starts[-1][1] != dtype:
            starts.append((entry.offset, dtype))
    for (start, dtype), (end, _) in pairwise([*(starts or [(0, torch.uint8)]), (nbytes, torch.uint8)]):
        yield start, end, dtype


def _sum_is_finite(raw: Tensor, dtype: torch.dtype) -> bool:
    """True only if all numbers are finite. A sum is the fastest test that reads them once; it may overflow itself."""
    if not dtype.is_floating_point or not len(raw):
        return True
    numbers = raw.view(dtype)
    if dtype.itemsize == 1:
        numbers = numbers.float()  # torch adds no 8-bit numbers
    total = numbers.sum(dtype=torch.float32 if dtype == torch.float16 else None)  # 65504 is soon exceeded
    return math.isfinite(total.item())


def _not_finite(entries: Sequence[Entry], bucket: Tensor) -> list[str]:
    return [entry.name for entry in entries if not _all_finite(_view(entry, bucket))]


def _all_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())


def _complaint(strange: Sequence[str]) -> str:
    more = f" ({len(strange)} tensors in all)" if len(strange) > _NAMED else ""
    return f"{', '.join(strange[:_NAMED])} {'is' if len(strange) == 1 else 'are'} not finite{more}"


def _by_bucket(entries: Iterable[Entry], n_buckets: int) -> list[list[Entry]]:
    found: list[list[Entry]] = [[] for _ in range(n_buckets)]
    for entry in entries:
        found[entry.bucket].append(entry)
    return found


# ---- several owners, and what came over the wire


def build_buckets(
    version: PolicyVersion, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, owner: int
) -> tuple[Manifest, list[Tensor]]:
    """The manifest of one owner's tensors and buckets with copies of them on their device: for tests and small tools.

    WeightTransferError when a tensor is not finite.
    """
    named = list(tensors)
    layout = plan_layout(((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named), bucket_bytes)
    buckets = allocate(layout, named[0][1].device if named else torch.device("cpu"))
    for (_, place), (_, tensor) in zip(unpack(layout.entries, buckets), named, strict=True):
        place.copy_(tensor.detach())
    return describe(version, layout, buckets, owner), buckets


def merge_manifests(parts: Sequence[Manifest]) -> Manifest:
    """The manifests of several owners, one after another; WeightTransferError when a name occurs twice."""
    entries: list[Entry] = []
    buckets: list[Bucket] = []
    for part in parts:
        entries += [msgspec.structs.replace(e, bucket=e.bucket + len(buckets)) for e in part.entries]
        buckets += part.buckets
    names: set[str] = set()
    twice = sorted({entry.name for entry in entries if entry.name in names or names.add(entry.name)})
    if twice or len({part.version for part in parts}) != 1:
        raise WeightTransferError(
            f"version {parts[0].version}: the stages do not fit together (tensors sent twice: {twice[:_NAMED]})"
        )
    return Manifest(version=parts[0].version, entries=tuple(entries), buckets=tuple(buckets))


def check_layout(manifest: Manifest) -> None:
    """WeightTransferError unless entries lie in order within their buckets and have the bytes of their shapes."""
    bucket, end = 0, 0
    for entry in manifest.entries:
        dtype = getattr(torch, entry.dtype, None)
        if entry.bucket != bucket:
            bucket, end = max(entry.bucket, bucket), 0
        fits = entry.bucket == bucket < len(manifest.buckets) and (
            end <= entry.offset <= entry.offset + entry.nbytes <= manifest.buckets[bucket].nbytes
            and manifest.buckets[bucket].nbytes % _ALIGNMENT == 0
        )
        sized = isinstance(dtype, torch.dtype) and (
            math.prod(entry.shape) * dtype.itemsize == entry.nbytes
            and entry.offset % _ALIGNMENT == 0
            and min(entry.shape, default=0) >= 0
        )
        if not fits or not sized:
            raise WeightTransferError(f"version {manifest.version}: the manifest's entry for {entry.name} is damaged")
        end = entry.offset + entry.nbytes
