"""The cut of a version into buckets: a pure function, the same bytes on both sides."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba_megatron.errors import WeightTransferError
from tba_megatron.transport.manifest import (
    Bucket,
    Entry,
    Manifest,
    allocate,
    build_buckets,
    check_layout,
    checksum,
    decode_manifest,
    describe,
    encode_manifest,
    layout_of,
    merge_manifests,
    plan_layout,
    unpack,
    verify,
)
from tba_megatron.types import PolicyVersion

V3 = PolicyVersion(0, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool)


def tensor(shape, dtype=torch.float32) -> torch.Tensor:
    return (torch.arange(int(torch.tensor(shape).prod())).reshape(shape) % 100).to(dtype)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    tensors=st.lists(st.builds(tensor, shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8),
    bucket_bytes=st.integers(1, 200),
)
def test_what_was_packed_is_unpacked(tensors, bucket_bytes):
    named = [(f"t{i}", t) for i, t in enumerate(tensors)]
    manifest, buckets = build_buckets(V3, named, bucket_bytes, owner=1)
    check_layout(manifest)
    received = [bucket.clone() for bucket in buckets]
    unpacked = unpack(decode_manifest(encode_manifest(manifest)).entries, received)
    for (name, sent), (got_name, got) in zip(named, unpacked, strict=True):
        assert got_name == name
        assert got.dtype == sent.dtype and torch.equal(got, sent)
    assert [b.nbytes for b in manifest.buckets] == [len(b) for b in buckets]
    assert [b.checksum for b in manifest.buckets] == [checksum(b) for b in buckets]
    assert manifest.nbytes == sum(len(b) for b in buckets)
    assert {b.owner for b in manifest.buckets} == {1}


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
    ((_, got),) = unpack(manifest.entries, buckets)
    assert torch.equal(got, source)


def test_buckets_are_copies_of_the_policy():
    source = tensor((4,))
    manifest, buckets = build_buckets(V3, [("a", source)], 1000, owner=0)
    source += 1
    assert checksum(buckets[0]) == manifest.buckets[0].checksum


def test_a_layout_is_known_from_shapes_alone_and_its_buckets_are_used_again():
    tensors = [("a", tensor((3, 3))), ("b", tensor((7,), torch.bfloat16)), ("c", tensor(())), ("d", tensor((0, 2)))]
    layout = plan_layout([(name, t.dtype, tuple(t.shape)) for name, t in tensors], 40)
    buckets = allocate(layout, torch.device("cpu"))
    for shift in (0, 1):
        shifted = [(name, t + shift) for name, t in tensors]
        for (_, place), (_, t) in zip(unpack(layout.entries, buckets), shifted, strict=True):
            place.copy_(t)
        assert describe(V3, layout, buckets, owner=2) == build_buckets(V3, shifted, 40, owner=2)[0]
    assert layout_of(describe(V3, layout, buckets, owner=2)) == layout


PIECES = (3 << 20) + 40  # bytes of a tensor that is read in several pieces, the last of them a short one


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_both_sides_wherever_they_are(dtype, bad):
    n_elements = PIECES // dtype.itemsize
    for place in (0, n_elements // 2, n_elements - 1):
        weights = torch.zeros(n_elements)
        weights[place] = bad
        named = [("small", tensor((3,))), ("w", weights.to(dtype)), ("ids", tensor((9,), torch.int8))]
        layout = plan_layout([(name, t.dtype, tuple(t.shape)) for name, t in named], 4 * PIECES)
        buckets = allocate(layout, torch.device("cpu"))
        for (_, target), (_, t) in zip(unpack(layout.entries, buckets), named, strict=True):
            target.copy_(t)
        with pytest.raises(WeightTransferError, match=r"^version 0\.3: w is not finite$"):
            describe(V3, layout, buckets, owner=0)
        described = Bucket(nbytes=len(buckets[0]), owner=0, checksum=checksum(buckets[0]))
        manifest = Manifest(version="0.3", entries=layout.entries, buckets=(described,))
        with pytest.raises(WeightTransferError, match=r"^version 0\.3: bucket 0 of 1 from rank 0: w is not finite$"):
            verify(manifest, 0, buckets[0], "rank 0")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_finite_weights_whose_sum_is_not_are_let_through(dtype):
    large = torch.full((PIECES // dtype.itemsize,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    manifest, (bucket,) = build_buckets(V3, [("w", large)], 4 * PIECES, owner=0)
    verify(manifest, 0, bucket, "rank 0")


def test_bytes_that_are_no_floating_numbers_are_not_taken_for_some():
    ones = torch.full((64,), -1, dtype=torch.int32)  # as float32 these bytes are not a number
    manifest, (bucket,) = build_buckets(V3, [("a", tensor((3,))), ("ids", ones), ("b", tensor((4,)))], 999, owner=0)
    verify(manifest, 0, bucket, "rank 0")


def test_the_first_tensors_that_are_not_finite_are_named():
    named = [(f"w{i}", torch.full((4,), float("nan") if i > 1 else 1.0)) for i in range(9)]
    with pytest.raises(
        WeightTransferError, match=r"^version 0\.3: w2, w3, w4, w5 are not finite \(7 tensors in all\)$"
    ):
        build_buckets(V3, named, 40, owner=0)


def test_a_checksum_in_pieces_is_that_of_the_whole_and_covers_what_lies_between_tensors():
    named = [("a", tensor((PIECES // 4,))), ("b", tensor((3,), torch.int8)), ("c", tensor((5,)))]
    manifest, (bucket,) = build_buckets(V3, named, 4 * PIECES, owner=0)
    assert manifest.buckets[0].checksum == checksum(bucket)
    verify(manifest, 0, bucket, "rank 0")
    for place in (0, 1 << 20, PIECES - 1, PIECES + 4, len(bucket) - 1):
        bucket[place] ^= 1
        with pytest.raises(WeightTransferError, match=r"bucket 0 of 1 from rank 7 has another checksum than its manif"):
            verify(manifest, 0, bucket, "rank 7")
        bucket[place] ^= 1


def test_stages_follow_one_another():
    first, one = build_buckets(V3, [("a", tensor((3,))), ("b", tensor((4,)))], 8, owner=0)
    second, two = build_buckets(V3, [("c", tensor((5,)))], 8, owner=1)
    merged = merge_manifests([first, second])
    check_layout(merged)
    assert [bucket.owner for bucket in merged.buckets] == [0, 0, 1]
    assert [name for name, _ in unpack(merged.entries, [*one, *two])] == ["a", "b", "c"]
    assert torch.equal(unpack(merged.entries, [*one, *two])[2][1], tensor((5,)))


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


def test_entries_out_of_order_are_refused():
    entries = build_buckets(V3, [("a", tensor((2,))), ("b", tensor((2,))), ("c", tensor((2,)))], 16, owner=0)[0].entries
    buckets = (Bucket(nbytes=16, owner=0, checksum=0),) * 2
    check_layout(Manifest(version="0.3", entries=entries, buckets=buckets))
    for order in ((1, 0, 2), (2, 0, 1), (0, 2, 1)):
        shuffled = tuple(entries[i] for i in order)
        with pytest.raises(WeightTransferError, match="is damaged"):
            check_layout(Manifest(version="0.3", entries=shuffled, buckets=buckets))
    same_place = (entries[0], entries[0])
    with pytest.raises(WeightTransferError, match="is damaged"):
        check_layout(Manifest(version="0.3", entries=same_place, buckets=buckets))


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
