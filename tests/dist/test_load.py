"""Each rank reads its part of a Hugging Face folder and no more, every parameter is counted, and nothing is silent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from tba_megatron.errors import ModelError
from tba_megatron.models import hf_folder
from tba_megatron.models.registry import read_model
from tba_megatron.trainer.export_hf import export_hf
from tba_megatron.trainer.load_hf import LoadReport, load_hf, load_random
from tba_megatron.trainer.model import build_chunks, named_parameters
from tba_megatron.trainer.stream_hf import stream_hf

SLOW = pytest.mark.slow
KINDS = ("qwen2", "qwen3", "llama", "gpt_neox", "gpt2")
LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2}]
# Kind, tied, layout, dtype: what is not here is slow.
FAST = {
    *(("qwen2", True, i, "float32") for i in range(len(LAYOUTS))),
    ("llama", False, 4, "bfloat16"),
    ("qwen3", False, 1, "float32"),
    ("gpt_neox", False, 3, "float32"),
    ("gpt2", True, 3, "bfloat16"),
}
CASES = [
    pytest.param(*case, marks=() if case in FAST else SLOW, id="-".join(map(str, case)))
    for case in (
        (kind, tied, i, dtype)
        for kind in KINDS
        for tied in (True, False)
        for i in range(len(LAYOUTS))
        for dtype in ("float32", "bfloat16")
    )
]


def saved(folder: Path, kind: str = "qwen2", *, tied: bool = True, dtype: str = "float32", shard: str = "8KB") -> Path:
    """Four layers in several files."""
    model = tiny.hf_model(kind, tied=tied, layers=4).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def built(groups, folder: Path, sizes: dict, dtype: str = "float32"):
    architecture, shape = read_model(folder)
    trainer = tiny.trainer_config(**sizes, dtype=dtype)
    return build_chunks(shape, trainer, groups), architecture, shape


def load(groups, folder: Path, sizes: dict, dtype: str = "float32") -> LoadReport:
    chunks, architecture, shape = built(groups, folder, sizes, dtype)
    return load_hf(chunks, architecture, shape, folder, groups)


def refusals(folder: Path, sizes: dict | None = None, break_it: Callable = lambda groups: None) -> list[str]:
    """What each rank raises; none of them waits for another."""

    def body(groups):
        chunks, architecture, shape = built(groups, folder, sizes or {})
        break_it(groups)
        with pytest.raises(ModelError) as caught:
            load_hf(chunks, architecture, shape, folder, groups)
        return str(caught.value)

    messages = run_ranks(body, **(sizes or {}))
    assert len(set(messages)) == 1 and "\n" not in messages[0]
    return messages


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a folder, and leave them in one file."""
    tensors = stored(folder)
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("kind", "tied", "layout", "dtype"), CASES)
def test_a_folder_survives_a_load_and_an_export_bit_by_bit_at_every_layout(kind, tied, layout, dtype, tmp_path):
    start, end, sizes = saved(tmp_path / "start", kind, tied=tied, dtype=dtype), tmp_path / "end", LAYOUTS[layout]

    def body(groups):
        chunks, architecture, shape = built(groups, start, sizes, dtype)
        report = load_hf(chunks, architecture, shape, start, groups)
        export_hf(
            chunks, architecture, shape, groups, folder=end, template=start, dtype=dtype, file_bytes=10_000
        )  # fmt: skip
        return report

    reports = run_ranks(body, **sizes)
    before, after = stored(start), stored(end)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    assert json.loads((end / "config.json").read_text()) == json.loads((start / "config.json").read_text())
    assert len(list(end.glob("*.safetensors"))) > 2
    for report in reports:
        assert set(report.loaded) == before.keys() and len(report.loaded) == len(before)
        assert len(report.tied) == tied and not report.initialised and not report.ignored
        assert report.n_parameters == sum(tensor.numel() for tensor in before.values())


def count_reads(groups, folder: Path, sizes: dict):
    """(bytes that this rank took out of files, bytes that its parameters have, of those padding, files it opened)."""
    chunks, architecture, shape = built(groups, folder, sizes)
    taken, opened = [], []
    take, really_open = hf_folder.StoredTensor.__getitem__, hf_folder._open

    def counted(self, index):
        part = take(self, index)
        taken.append(part.numel() * part.element_size())
        return part

    def open_file(path):
        opened.append(path.name)
        return really_open(path)

    hf_folder.StoredTensor.__getitem__, hf_folder._open = counted, open_file
    load_hf(chunks, architecture, shape, folder, groups)
    own = named_parameters(chunks)
    wide = [p for name, p in own.items() if name.endswith("word_embeddings.weight") or name == "output_layer.weight"]
    first = groups.tp_rank * len(wide[0]) if wide else 0
    padding = sum((first + len(p) - max(first, min(first + len(p), shape.vocab_size))) * p[0].nbytes for p in wide)
    return sum(taken), sum(p.nbytes for p in own.values()), padding, opened


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_a_rank_reads_the_bytes_it_keeps_and_opens_a_file_once(sizes, tmp_path):
    folder = saved(tmp_path / "start", tied=False)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    ranks = run_ranks(count_reads, folder, sizes, **sizes)
    whole = sum(tensor.nbytes for tensor in stored(folder).values())
    for rank, (taken, kept, padding, opened) in enumerate(ranks):
        assert taken == kept - padding < 0.6 * whole
        if rank == 0:
            assert opened[: len(files)] == files  # the headers, for all ranks
            opened = opened[len(files) :]
        assert len(opened) == len(set(opened))
        assert sizes.get("pp", 1) == 1 or len(opened) < 0.8 * len(files)


MEGABYTE = 1 << 20


def big_model(folder: Path) -> Path:
    """Eight files of 32 MB: twenty layers of 12.5 MB, and an embedding."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=20,
        num_attention_heads=8,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    architecture, shape = read_model(folder)
    held: dict[str, torch.Tensor] = {}
    n_files = 0
    for name, size in architecture.tensor_shapes(shape).items():
        held[name] = torch.ones(size)
        if sum(tensor.nbytes for tensor in held.values()) >= 31 * MEGABYTE or name == "model.norm.weight":
            save_file(held, folder / f"part-{n_files}.safetensors")
            held, n_files = {}, n_files + 1
    assert 7 <= n_files <= 9
    return folder


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_loading_needs_memory_for_one_file_or_two_beside_the_parameters_not_for_all(tmp_path):
    folder, small = big_model(tmp_path / "big"), saved(tmp_path / "small")

    def body(groups):
        load(groups, small, {})  # a fork maps the pages of libraries anew: have the code in memory
        chunks, architecture, shape = built(groups, folder, {})
        own = named_parameters(chunks)
        with torch.no_grad():
            for parameter in own.values():
                parameter.fill_(0.0)  # their pages are in memory before the count begins
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = peak_bytes()
        load_hf(chunks, architecture, shape, folder, groups)
        grown = peak_bytes() - before
        assert all(float(parameter.min()) == 1.0 for parameter in list(own.values())[1:])
        return grown, sum(parameter.nbytes for parameter in own.values())

    ((grown, parameters),) = run_ranks(body)
    assert parameters > 240 * MEGABYTE
    # One file is mapped at a time; the kernel decides how much of what was read before stays counted with it.
    assert 16 * MEGABYTE < grown < 96 * MEGABYTE


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=str)
def test_random_weights_are_counted_as_initialised(sizes, tmp_path):
    folder = saved(tmp_path / "start")

    def body(groups):
        chunks, architecture, shape = built(groups, folder, sizes)
        report = load_random(chunks, architecture, shape, 3, groups)
        return report, dict(stream_hf(chunks, architecture, shape, groups, torch.float32))

    ranks = run_ranks(body, **sizes)
    names = tiny.whole([weights for _, weights in ranks]).keys()
    for report, _ in ranks:
        assert set(report.initialised) == names and report.tied == ("lm_head.weight",) and not report.loaded
        assert f"loaded 0, tied 1, initialised {len(names)}" in str(report) and "\n" not in str(report)


def test_what_is_loaded_tied_and_ignored_is_in_one_line_of_the_log(tmp_path, caplog):
    folder = saved(tmp_path / "start")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2, dtype=torch.int32)}
    rewrite(folder, lambda tensors: tensors.update(buffer))

    def body(groups):
        with caplog.at_level("INFO"):
            report = load(groups, folder, {"pp": 2})
        return report, caplog.messages

    (report, logged), (_, elsewhere) = run_ranks(body, pp=2)
    assert report.ignored == tuple(buffer)
    assert logged == [str(report)] and not elsewhere
    count = sum(tensor.numel() for tensor in stored(folder).values()) - 2
    assert str(report) == (
        f"weights from {folder}: {count:,} parameters; tensors loaded 50, tied 1, initialised 0; "
        f"ignored {next(iter(buffer))}"
    )


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_head_in_a_tied_folder_must_be_the_embedding(sizes, tmp_path):
    folder = saved(tmp_path / "start")
    head = stored(folder)["model.embed_tokens.weight"].clone()
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    for report in run_ranks(load, folder, sizes, **sizes):
        assert report.tied == ("lm_head.weight",) and len(report.loaded) == 50 and not report.ignored
    head[-1, 0] += 1.0
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    message = refusals(folder, sizes)[0]
    assert "model.safetensors: lm_head.weight differs from model.embed_tokens.weight" in message
    assert "set tie_word_embeddings to false there, or remove the tensor" in message


@pytest.mark.parametrize("dtypes", ["float64 float32", "float16 float32", "float32 bfloat16"])
def test_any_float_is_converted_to_the_dtype_of_the_parameters(dtypes, tmp_path):
    source, target = dtypes.split()
    folder = saved(tmp_path / "start", dtype=source)

    def body(groups):
        chunks, architecture, shape = built(groups, folder, {}, target)
        load_hf(chunks, architecture, shape, folder, groups)
        return dict(stream_hf(chunks, architecture, shape, groups, getattr(torch, target)))

    (found,) = run_ranks(body)
    for name, tensor in stored(folder).items():
        assert torch.equal(found[name], tensor.to(getattr(torch, target))), name


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def put(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[-1].fill_(value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop(NORM), f"weights missing: {NORM}; the weights must be those of config.json"),
        (lambda t: [t.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in range(4)], "missing: model.layers.0.mlp"),
        (lambda t: t.update(stray=torch.ones(1)), "unexpected: stray"),
        (lambda t: t.update({NORM: torch.ones(5)}), f"{NORM} has the shape (5,), but config.json asks for (32,)"),
        (lambda t: t.update({EMBED: torch.ones(20, 32)}), "has the shape (20, 32), but config.json asks for (19, 32)"),
        (lambda t: t.update({NORM: torch.ones(32).to(torch.int8)}), f"{NORM} stored as I8; quantised weights"),
        (lambda t: t.update({NORM: torch.ones(32).to(torch.float8_e4m3fn)}), f"{NORM} stored as F8_E4M3; quantised"),
        (lambda t: t.update(scales=torch.ones(1).to(torch.float8_e5m2)), "scales stored as F8_E5M2; quantised"),
        (put(NORM, float("nan")), f"{NORM} not finite; a model with NaN or infinity cannot be trained"),
        (put("model.layers.2.self_attn.k_proj.weight", float("inf")), "model.layers.2.self_attn.k_proj.weight not f"),
        (put(EMBED, float("-inf")), f"model.safetensors: {EMBED} not finite"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, pytest.param({"tp": 2, "pp": 2}, marks=SLOW)], ids=str)
def test_weights_that_do_not_fit_are_refused_in_the_same_line_on_every_rank(spoil, words, sizes, tmp_path):
    folder = rewrite(saved(tmp_path / "start"), spoil)
    message = refusals(folder, sizes)[0]
    assert words in message and str(folder) in message


def test_many_names_are_cut_short(tmp_path):
    folder = rewrite(saved(tmp_path / "start"), lambda t: t.update({f"x{i}": torch.ones(1) for i in range(99)}))
    assert "unexpected: x0, x1, x10, x11, x12, x13 and 93 more;" in refusals(folder)[0]


def test_a_value_too_large_for_the_dtype_of_the_parameters_is_refused(tmp_path):
    folder = saved(tmp_path / "start", dtype="float64")
    rewrite(folder, put(NORM, 1e300))
    assert f"{NORM} too large for torch.float32" in refusals(folder)[0]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_a_file_that_one_rank_alone_cannot_open_is_an_error_on_every_rank(sizes, tmp_path):
    folder = saved(tmp_path / "start")

    def break_it(groups):
        def refuse(path, framework):
            raise OSError(24, "Too many open files")

        if groups.rank == 1:
            hf_folder.safe_open = refuse

    message = refusals(folder, sizes, break_it)[0]
    assert message.startswith(str(folder / "model-000"))
    assert "cannot be read ([Errno 24] Too many open files); check the disk" in message
    assert message.endswith("(rank 1)")


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, pytest.param({"dp": 2}, marks=SLOW)], ids=str)
@pytest.mark.parametrize("spoil", ["truncated", "missing", "bin only"])
def test_a_hostile_folder_is_an_error_on_every_rank(spoil, sizes, tmp_path):
    folder = saved(tmp_path / "start")
    last = sorted(folder.glob("*.safetensors"))[-1]
    if spoil == "truncated":
        last.write_bytes(last.read_bytes()[:-1])
    elif spoil == "missing":
        last.unlink()
    else:
        for path in folder.glob("model*"):
            path.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    message = refusals(folder, sizes)[0]
    assert message.startswith(str(folder if spoil == "bin only" else last))


def test_the_index_decides_and_a_second_copy_is_refused(tmp_path):
    folder = saved(tmp_path / "start")
    copy = sorted(folder.glob("*.safetensors"))[0]
    shutil.copyfile(copy, folder / "copy.safetensors")
    run_ranks(load, folder, {})
    (folder / hf_folder.INDEX).unlink()
    assert "is in copy.safetensors too" in refusals(folder)[0]
