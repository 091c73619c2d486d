"""A snapshot is the policy under Hugging Face's names: each stage's part, on its tensor rank 0, in warm buckets."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file

from tba_megatron.errors import WeightTransferError
from tba_megatron.models.registry import read_model
from tba_megatron.trainer import snapshot as snapshot_file
from tba_megatron.trainer.load_hf import load_hf
from tba_megatron.trainer.model import build_chunks
from tba_megatron.trainer.snapshot import Snapshotter
from tba_megatron.trainer.stream_hf import stream_hf
from tba_megatron.transport.manifest import describe, plan_layout, unpack
from tba_megatron.types import PolicyVersion

SLOW = pytest.mark.slow
KINDS = ("qwen2", "qwen3", "llama", "gpt_neox", "gpt2")
V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
BUCKET = 20_000  # a layer of the tiny models has 32 kB, its largest parameter 12 kB


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    """By kind and whether embeddings are tied; four layers."""
    root = tmp_path_factory.mktemp("models")
    return {
        (kind, tied): tiny.save_model(root / f"{kind}-{tied}", kind, tied=tied, layers=4)
        for kind in KINDS
        for tied in (True, False)
    }


def loaded(groups, folder: Path, sizes: dict):
    architecture, shape = read_model(folder)
    chunks = build_chunks(shape, tiny.trainer_config(**sizes), groups)
    load_hf(chunks, architecture, shape, folder, groups)
    return chunks, architecture, shape


def snapshotter(groups, architecture, shape, dtype=torch.float32, bucket_bytes=BUCKET) -> Snapshotter:
    return Snapshotter(architecture=architecture, shape=shape, groups=groups, dtype=dtype, bucket_bytes=bucket_bytes)


def tensors(snapshot) -> dict[str, torch.Tensor]:
    return {} if snapshot is None else dict(unpack(snapshot.layout.entries, snapshot.buckets))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].shape == expected[name].shape for name in expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def parts_of_a_replica(ranks: list, dp: int) -> dict[str, torch.Tensor]:
    return tiny.whole([part for dp_rank, _, part in ranks if dp_rank == dp])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_comes_out_as_its_folder(kind, tp, tied, folders):
    folder = folders[kind, tied]

    def body(groups):
        chunks, architecture, shape = loaded(groups, folder, {"tp": tp})
        return groups.dp_rank, groups.tp_rank, tensors(snapshotter(groups, architecture, shape).take(chunks, V1))

    ranks = run_ranks(body, tp=tp)
    assert all(not part for _, tp_rank, part in ranks if tp_rank)
    _, shape = read_model(folder)
    assert shape.padded_vocab(tp) > shape.vocab_size  # so that rows were dropped
    assert_same(ranks[0][2], hf_tensors(folder))


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors by the names of the rules, which GPT-2's and its siblings' files may abbreviate."""
    architecture, _ = read_model(folder)
    named = {architecture.canonical(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=SLOW)], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "sizes",
    [{"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2}, pytest.param({"tp": 2, "dp": 2}, marks=SLOW)],
    ids=str,
)
def test_every_replica_can_send_and_no_stage_sends_what_another_has(sizes, tied, folders):
    folder = folders["qwen2", tied]

    def body(groups):
        chunks, architecture, shape = loaded(groups, folder, sizes)
        return groups.dp_rank, groups.tp_rank, tensors(snapshotter(groups, architecture, shape).take(chunks, V1))

    ranks = run_ranks(body, **sizes)
    for dp in range(sizes.get("dp", 1)):
        assert_same(parts_of_a_replica(ranks, dp), load_file(folder / "model.safetensors"))
    assert all(bool(part) is (tp_rank == 0) for _, tp_rank, part in ranks)


@pytest.mark.parametrize("bucket_bytes", [1, 8_000, 1 << 20])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 4}], ids=str)
def test_in_another_dtype_it_is_what_the_stream_gives_whatever_the_buckets(sizes, bucket_bytes, tmp_path):
    folder = tiny.save_model(tmp_path / "model", num_key_value_heads=4)

    def body(groups):
        chunks, architecture, shape = loaded(groups, folder, sizes)
        took = snapshotter(groups, architecture, shape, torch.bfloat16, bucket_bytes).take(chunks, V1)
        streamed = list(stream_hf(chunks, architecture, shape, groups, torch.bfloat16))
        if took is not None:
            assert took.layout == plan_layout([(n, t.dtype, tuple(t.shape)) for n, t in streamed], bucket_bytes)
        return tensors(took), dict(streamed)

    found, expected = run_ranks(body, **sizes)[0]
    assert expected and all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert_same(found, expected)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}], ids=str)
def test_the_next_snapshot_is_written_into_the_same_memory_and_is_the_newer_policy(sizes, folders, monkeypatch):
    def body(groups):
        chunks, architecture, shape = loaded(groups, folders["qwen2", True], sizes)
        desk = snapshotter(groups, architecture, shape)
        first = desk.take(chunks, V1)
        before = {name: tensor.clone() for name, tensor in tensors(first).items()}
        where = [bucket.data_ptr() for bucket in first.buckets] if first else []
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.add_(1.0)
        monkeypatch.setattr(snapshot_file, "allocate", None)
        second = desk.take(chunks, V2)
        if first is None or second is None:
            return None
        assert [bucket.data_ptr() for bucket in second.buckets] == where
        assert (first.version, second.version) == (V1, V2)
        return before, tensors(second)

    before, after = run_ranks(body, **sizes)[0]
    assert_same(after, {name: tensor + 1.0 for name, tensor in before.items()})


def test_without_tensor_parallelism_nothing_but_copies_into_the_buckets_happens(folders, monkeypatch):
    def body(groups):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Calls(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if not func.is_view:
                    calls.append((func._schema.name, args[0].numel()))
                return func(*args, **(kwargs or {}))

        chunks, architecture, shape = loaded(groups, folders["qwen2", False], {})
        desk = snapshotter(groups, architecture, shape)
        desk.take(chunks, V1)
        calls: list[tuple[str, int]] = []
        with monkeypatch.context() as patch, Calls():
            for name in ("gather", "all_gather", "broadcast", "isend", "irecv", "barrier"):
                patch.setattr(dist, name, None)
            took = desk.take(chunks, V2)
        return calls, sum(tensor.numel() for tensor in tensors(took).values())

    ((calls, elements),) = run_ranks(body)
    assert {name for name, _ in calls} == {"aten::copy_"}
    assert sum(n for _, n in calls) == elements


def test_a_policy_that_is_not_finite_is_found_when_it_is_described(folders):
    def body(groups):
        chunks, architecture, shape = loaded(groups, folders["qwen2", True], {"tp": 2})
        if groups.tp_rank:
            with torch.no_grad():
                chunks[0].get_parameter("decoder.layers.3.mlp.linear_fc2.weight")[-1, -1] = float("nan")
        took = snapshotter(groups, architecture, shape).take(chunks, V1)
        if took is not None:
            with pytest.raises(WeightTransferError, match=r"0\.1.*model\.layers\.3\.mlp\.down_proj\.weight"):
                describe(V1, took.layout, took.buckets, owner=0)

    run_ranks(body, tp=2)
