"""The policy streams out in buckets: each tensor once, whole, from its stage's leader, and never the whole model."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from safetensors.torch import load_file

from tba_megatron.models.layouts import Replicated, Rule
from tba_megatron.models.registry import read_model
from tba_megatron.trainer.load_hf import load_hf
from tba_megatron.trainer.model import build_chunks
from tba_megatron.trainer.stream_hf import bucket_rules, is_finite, stage_buckets, stream_buckets, stream_hf

SLOW = pytest.mark.slow
LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2}]
BUCKET = 20_000  # a layer of the tiny models has 32 kB, its largest rule 12 kB


@settings(max_examples=50)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=12), bucket_bytes=st.integers(1, 60)
)
def test_buckets_hold_every_rule_once_in_order_and_are_full(sizes, bucket_bytes):
    rules = [
        Rule(megatron=f"m{i}", hf=tuple(f"{i}.{j}" for j in range(len(parts))), layout=Replicated())
        for i, parts in enumerate(sizes)
    ]
    shapes = {f"{i}.{j}": (2, n) for i, parts in enumerate(sizes) for j, n in enumerate(parts)}
    n_bytes = {rule.megatron: 4 * 2 * sum(parts) for rule, parts in zip(rules, sizes, strict=True)}
    buckets = bucket_rules(rules, shapes, 4, bucket_bytes)
    assert [rule for bucket in buckets for rule in bucket] == rules
    filled = [sum(n_bytes[rule.megatron] for rule in bucket) for bucket in buckets]
    assert all(n <= bucket_bytes or len(bucket) == 1 for n, bucket in zip(filled, buckets, strict=True))
    for n, following in zip(filled, buckets[1:], strict=False):
        assert n + n_bytes[following[0].megatron] > bucket_bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[bool, Path]:
    """By whether embeddings are tied; four layers."""
    root = tmp_path_factory.mktemp("models")
    return {tied: tiny.save_model(root / str(tied), tied=tied, layers=4) for tied in (True, False)}


def loaded(groups, folder: Path, sizes: dict):
    architecture, shape = read_model(folder)
    chunks = build_chunks(shape, tiny.trainer_config(**sizes), groups)
    load_hf(chunks, architecture, shape, folder, groups)
    return chunks, architecture, shape


class Gathers:
    """Counts the elements of every tensor gather, and allows no other collective."""

    def __init__(self, monkeypatch) -> None:
        self.sizes: list[int] = []
        gather = dist.gather

        def counted(tensor, *args, **kwargs):
            self.sizes.append(tensor.numel())
            return gather(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "gather", counted)
        for name in ("all_gather", "all_gather_object", "gather_object", "broadcast", "all_to_all_single"):
            monkeypatch.setattr(dist, name, None)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_each_tensor_comes_once_and_whole_from_the_leader_of_its_stage(sizes, tied, folders, monkeypatch):
    def body(groups):
        chunks, architecture, shape = loaded(groups, folders[tied], sizes)
        gathers = Gathers(monkeypatch)
        stream = stream_buckets(chunks, architecture, shape, groups, torch.float32, BUCKET)
        buckets = [list(bucket) for bucket in stream]
        planned = stage_buckets(chunks, architecture, shape, groups, torch.float32, BUCKET)
        names = [[name for rule in rules for name in rule.hf] for rules in planned]
        return groups.is_stage_leader, groups.dp_rank, buckets, names, gathers.sizes

    ranks = run_ranks(body, **sizes)
    expected = load_file(folders[tied] / "model.safetensors")
    tiny.assert_same_weights(
        tiny.whole([dict(t for b in buckets for t in b) for _, _, buckets, _, _ in ranks]), expected, 0
    )
    assert sum(len(bucket) for _, _, buckets, _, _ in ranks for bucket in buckets) == len(expected)
    for leads, dp_rank, buckets, names, gathered in ranks:
        if dp_rank:
            assert buckets == [] and gathered == []
            continue
        assert len(buckets) == len(names) > 2
        assert [[name for name, _ in bucket] for bucket in buckets] == (names if leads else [[]] * len(names))
        assert len(gathered) == (len(buckets) if sizes.get("tp", 1) > 1 else 0)
        assert max(gathered, default=0) * 4 <= BUCKET
        for bucket in buckets:
            assert sum(tensor.nbytes for _, tensor in bucket) <= BUCKET
            thirds = [name for name, _ in bucket if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
            assert len(thirds) % 3 == 0


def test_a_rule_larger_than_the_bucket_has_one_of_its_own(folders):
    def body(groups):
        chunks, architecture, shape = loaded(groups, folders[True], {"tp": 2})
        stream = stream_buckets(chunks, architecture, shape, groups, torch.float32, 1)
        return [[name for name, _ in bucket] for bucket in stream]

    buckets, _ = run_ranks(body, tp=2)
    assert max(len(bucket) for bucket in buckets) == 3 and ["model.norm.weight"] in buckets


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}], ids=str)
def test_tensors_are_copies_of_the_dtype_and_a_bucket_is_freed_before_the_next_but_one(sizes, folders):
    def body(groups):
        chunks, architecture, shape = loaded(groups, folders[True], sizes)
        alive: list[list[weakref.ref]] = []
        for bucket in stream_buckets(chunks, architecture, shape, groups, torch.bfloat16, 8_000):
            alive.append([weakref.ref(tensor) for _, tensor in bucket])
            assert all(tensor.dtype == torch.bfloat16 for _, tensor in bucket)
            assert not any(ref() is not None for refs in alive[:-2] for ref in refs)
        weights = dict(stream_hf(chunks, architecture, shape, groups, torch.float32))
        before = {name: tensor.clone() for name, tensor in weights.items()}
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.add_(1.0)
        assert all(torch.equal(weights[name], before[name]) for name in before)
        return len(alive)

    assert min(run_ranks(body, **sizes)) > 4


def test_finite_is_told_from_not():
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert is_finite(torch.tensor([[1.0, -2.0], [0.0, -0.0]], dtype=dtype).t())
        assert is_finite(torch.empty(0, dtype=dtype))
        for bad in (inf, -inf, nan):
            assert not is_finite(torch.tensor([1.0, bad, 2.0], dtype=dtype))
