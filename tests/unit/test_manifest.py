"""The cut of a version into buckets: a pure function, the same bytes on both sides."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.manifest import (
    Bucket,
    Entry,
    Manifest,
    build_buckets,
    check_layout,
    checksum,
    decode_manifest,
    encode_manifest,
    merge_manifests,
    unpack,
)
from tba_megatron.types import PolicyVersion

V3 = PolicyVersion(0, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool)


def tensor(shape, dtype=torch.float32) -> torch.Tensor:
    return (torch.arange(int(torch.tensor(shape).prod())).reshape(shape) % 100).to(dtype)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(deadline=None)
@given(
    tensors=st.lists(st.builds(tensor, shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8),
    bucket_bytes=st.integers(1, 200),
)
def test_what_was_packed_is_unpacked(tensors, bucket_bytes):
    named = [(f"t{i}", t) for i, t in enumerate(tensors)]
    manifest, buckets = build_buckets(V3, named, bucket_bytes, owner=1)
    check_layout(manifest)
    received = [bucket.clone() for bucket in buckets]
    unpacked = unpack(decode_manifest(encode_manifest(manifest)), received)
    for (name, sent), (got_name, got) in zip(named, unpacked, strict=True):
        assert got_name == name
        assert got.dtype == sent.dtype and torch.equal(got, sent)
    assert [b.nbytes for b in manifest.buckets] == [len(b) for b in buckets]
    assert [b.checksum for b in manifest.buckets] == [checksum(b) for b in buckets]
    assert manifest.nbytes == sum(len(b) for b in buckets)
    assert {b.owner for b in manifest.buckets} == {1}


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), bucket_bytes=st.integers(1, 100))
def test_a_bucket_exceeds_its_size_only_for_a_tensor_that_does(sizes, bucket_bytes):
    manifest, _ = build_buckets(V3, [(f"t{i}", tensor((n,))) for i, n in enumerate(sizes)], bucket_bytes, owner=0)
    for index, bucket in enumerate(manifest.buckets):
        inside = [e for e in manifest.entries if e.bucket == index]
        assert inside
        assert inside[-1].offset + inside[-1].nbytes <= bucket_bytes or len(inside) == 1
        assert all(entry.offset % 8 == 0 for entry in inside)
        assert bucket.nbytes < inside[-1].offset + inside[-1].nbytes + 8


def test_the_cut_depends_on_nothing_but_the_tensors():
    tensors = [("a", tensor((3, 3))), ("b", tensor((7,), torch.bfloat16)), ("c", tensor(()))]
    assert build_buckets(V3, tensors, 40, owner=0)[0] == build_buckets(V3, iter(tensors), 40, owner=0)[0]


def test_a_layout_by_hand():
    manifest, (first, second) = build_buckets(
        V3, [("a", tensor((3,))), ("b", tensor((1,), torch.bfloat16)), ("c", tensor((5,)))], 24, owner=0
    )
    assert [(e.name, e.dtype, e.shape, e.bucket, e.offset, e.nbytes) for e in manifest.entries] == [
        ("a", "float32", (3,), 0, 0, 12),
        ("b", "bfloat16", (1,), 0, 16, 2),
        ("c", "float32", (5,), 1, 0, 20),
    ]
    assert (len(first), len(second)) == (24, 24)
    assert manifest.version == "0.3"


def test_tensors_that_are_not_contiguous_are_packed_in_order():
    source = tensor((4, 6)).T
    manifest, buckets = build_buckets(V3, [("a", source)], 1000, owner=0)
    ((_, got),) = unpack(manifest, buckets)
    assert torch.equal(got, source)


def test_buckets_are_copies_of_the_policy():
    source = tensor((4,))
    manifest, buckets = build_buckets(V3, [("a", source)], 1000, owner=0)
    source += 1
    assert checksum(buckets[0]) == manifest.buckets[0].checksum


def test_stages_follow_one_another():
    first, one = build_buckets(V3, [("a", tensor((3,))), ("b", tensor((4,)))], 8, owner=0)
    second, two = build_buckets(V3, [("c", tensor((5,)))], 8, owner=1)
    merged = merge_manifests([first, second])
    check_layout(merged)
    assert [bucket.owner for bucket in merged.buckets] == [0, 0, 1]
    assert [name for name, _ in unpack(merged, [*one, *two])] == ["a", "b", "c"]
    assert torch.equal(unpack(merged, [*one, *two])[2][1], tensor((5,)))


def test_a_tensor_that_two_stages_send_is_refused():
    part, _ = build_buckets(V3, [("embed", tensor((3,))), ("a", tensor((3,)))], 8, owner=0)
    other, _ = build_buckets(V3, [("embed", tensor((3,)))], 8, owner=1)
    with pytest.raises(WeightTransferError, match=r"version 0\.3: .* sent twice: \['embed'\]"):
        merge_manifests([part, other])


def test_stages_of_two_versions_are_refused():
    part, _ = build_buckets(V3, [("a", tensor((3,)))], 8, owner=0)
    other, _ = build_buckets(PolicyVersion(0, 4), [("b", tensor((3,)))], 8, owner=1)
    with pytest.raises(WeightTransferError, match="do not fit together"):
        merge_manifests([part, other])


def test_a_checksum_tells_every_flipped_bit():
    bucket = tensor((64,), torch.int8).view(torch.uint8)
    right = checksum(bucket)
    for bit in range(8 * len(bucket)):
        bucket[bit // 8] ^= 1 << bit % 8
        assert checksum(bucket) != right
        bucket[bit // 8] ^= 1 << bit % 8
    assert checksum(bucket) == right


GOOD = Entry(name="w", dtype="float32", shape=(2,), bucket=0, offset=8, nbytes=8)


@pytest.mark.parametrize(
    "damage",
    [
        {"bucket": 1},
        {"bucket": -1},
        {"offset": 12},
        {"offset": -8},
        {"offset": 2},
        {"nbytes": 4},
        {"nbytes": -8},
        {"shape": (3,)},
        {"shape": (-2,)},
        {"shape": (-1, -2)},
        {"dtype": "bfloat16"},
        {"dtype": "float33"},
        {"dtype": "nn"},
    ],
    ids=str,
)
def test_a_damaged_entry_is_refused_by_name(damage):
    bucket = Bucket(nbytes=16, owner=0, checksum=0)
    check_layout(Manifest(version="0.3", entries=(GOOD,), buckets=(bucket,)))
    damaged = Manifest(version="0.3", entries=(msgspec.structs.replace(GOOD, **damage),), buckets=(bucket,))
    with pytest.raises(WeightTransferError, match=r"version 0\.3: the manifest's entry for w is damaged"):
        check_layout(damaged)


def test_a_manifest_that_is_none_is_refused():
    good = encode_manifest(Manifest(version="0.3", entries=(GOOD,), buckets=()))
    for data in (b"", good[:-1], b"\xc1", good.replace(b"version", b"Version")):
        with pytest.raises(msgspec.DecodeError):
            decode_manifest(data)
