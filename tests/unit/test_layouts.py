"""Hugging Face tensors survive being cut for any tensor-parallel size, and land where Megatron expects them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.models.architecture import ModelShape
from tba_megatron.models.gated_decoder import gated_decoder_rules
from tba_megatron.models.layouts import Gated, Layout, Qkv, Replicated, Split, StackedQkv, Vocabulary
from tba_megatron.models.rotary import Rotary

SIZES = [1, 2, 4]
SETTINGS = settings(max_examples=25)


def cut(layout: Layout, tensors, size: int):
    return [layout.to_rank(tensors, rank, size) for rank in range(size)]


def check_round_trip(layout: Layout, tensors, size: int) -> None:
    shards = cut(layout, tensors, size)
    assert len({shard.shape for shard in shards}) == 1
    back = layout.from_ranks(shards)
    assert len(back) == len(tensors)
    for before, after in zip(tensors, back, strict=True):
        assert torch.equal(before, after)
    check_placement(layout, shards, back)


def check_placement(layout: Layout, shards, expected) -> None:
    """``placement`` gives what ``from_ranks`` gives, by views alone, and writes every element once."""
    size = len(shards)
    targets = [torch.full(tensor.shape, torch.nan) for tensor in expected]
    memory = {tensor.untyped_storage().data_ptr() for tensor in targets}
    sources = {shard.untyped_storage().data_ptr() for shard in shards}
    written = 0
    for rank, shard in enumerate(shards):
        for target, source in layout.placement(shard, targets, rank, size):
            assert target.shape == source.shape
            assert target.untyped_storage().data_ptr() in memory and source.untyped_storage().data_ptr() in sources
            written += target.numel()
            target.copy_(source)
    assert written == sum(tensor.numel() for tensor in expected)
    for found, tensor in zip(targets, expected, strict=True):
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("size", SIZES)
@SETTINGS
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), bias=st.booleans())
def test_split_gated_and_replicated_round_trip(size, rows, columns, bias):
    shape = (4 * rows,) if bias else (4 * rows, 4 * columns)
    first, second = torch.randn(shape), torch.randn(shape)
    check_round_trip(Replicated(), [first], size)
    check_round_trip(Split(0), [first], size)
    check_round_trip(Gated(), [first, second], size)
    if not bias:
        check_round_trip(Split(1), [first], size)


@pytest.mark.parametrize("size", SIZES)
@SETTINGS
@given(per_group=st.integers(1, 3), groups=st.integers(1, 2), head=st.integers(1, 4), bias=st.booleans())
def test_qkv_round_trips_and_keeps_each_group_together(size, per_group, groups, head, bias):
    kv_heads = 4 * groups
    rest = () if bias else (3,)
    q = torch.randn(kv_heads * per_group * head, *rest)
    k, v = torch.randn(kv_heads * head, *rest), torch.randn(kv_heads * head, *rest)
    layout = Qkv(kv_heads * per_group, kv_heads, head)
    check_round_trip(layout, [q, k, v], size)
    first = cut(layout, [q, k, v], size)[0]
    expected = torch.cat([q[: per_group * head], k[:head], v[:head]])
    assert torch.equal(first[: (per_group + 2) * head], expected)


@pytest.mark.parametrize("size", SIZES)
@SETTINGS
@given(rows=st.integers(1, 4), columns=st.integers(1, 4))
def test_a_transposed_split_is_the_split_of_the_transpose(size, rows, columns):
    stored = torch.randn(4 * rows, 4 * columns)
    for dim in (0, 1):
        layout = Split(dim, transposed=True)
        check_round_trip(layout, [stored], size)
        expected = cut(Split(dim), [stored.t()], size)
        for found, shard in zip(cut(layout, [stored], size), expected, strict=True):
            assert torch.equal(found, shard)


@pytest.mark.parametrize("size", SIZES)
@SETTINGS
@given(per_rank=st.integers(1, 2), head=st.integers(1, 4), hidden=st.integers(1, 3))
def test_stacked_qkv_is_qkv_of_its_thirds(size, per_rank, head, hidden):
    heads = 4 * per_rank
    weight, bias = torch.randn(hidden, 3 * heads * head), torch.randn(3 * heads * head)
    for stored, plain, transposed in ((weight, weight.t(), True), (bias, bias, False)):
        layout = StackedQkv(heads, head, transposed)
        check_round_trip(layout, [stored], size)
        expected = cut(Qkv(heads, heads, head), plain.chunk(3), size)
        for found, shard in zip(cut(layout, [stored], size), expected, strict=True):
            assert torch.equal(found, shard)


@pytest.mark.parametrize("size", SIZES)
@SETTINGS
@given(rows=st.integers(1, 300), hidden=st.integers(1, 3))
def test_vocabulary_round_trips_with_zero_padding(size, rows, hidden):
    padded = -(-rows // (64 * size)) * 64 * size
    full = torch.randn(rows, hidden)
    layout = Vocabulary(rows, padded)
    check_round_trip(layout, [full], size)
    joined = torch.cat(cut(layout, [full], size))
    assert joined.shape == (padded, hidden)
    assert not joined[rows:].any()


def shape(**fields) -> ModelShape:
    return ModelShape(
        architecture="x",
        num_layers=2,
        hidden_size=8,
        intermediate_size=16,
        query_heads=4,
        kv_heads=2,
        head_size=2,
        norm_eps=1e-6,
        rotary=Rotary(size=2, theta=1e4),
        max_positions=32,
        **({"vocab_size": 19, "tied": True, "qkv_bias": True} | fields),
    )


@pytest.mark.parametrize(("tensor_parallel", "padded"), [(1, 64), (2, 128), (4, 256)])
def test_the_vocabulary_is_padded_to_64_rows_a_rank(tensor_parallel, padded):
    assert shape().padded_vocab(tensor_parallel) == padded
    assert shape(vocab_size=padded).padded_vocab(tensor_parallel) == padded


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_no_parameter_is_named_by_two_rules(tied, qkv_bias):
    rules = gated_decoder_rules(shape(tied=tied, qkv_bias=qkv_bias), 2)
    hf = [name for rule in rules for name in rule.hf]
    assert len(hf) == len(set(hf)) and len({rule.megatron for rule in rules}) == len(rules)
    assert ("lm_head.weight" in hf) is not tied
    assert any(name.endswith("q_proj.bias") for name in hf) is qkv_bias
