"""Hugging Face folders: every hostile one is refused in one line that names the file, and reading opens a file once."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tba_megatron.errors import ModelError
from tba_megatron.models import hf_folder
from tba_megatron.models.hf_folder import INDEX, HfTensors, list_tensors, open_tensors
from tba_megatron.models.registry import read_model

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_files(folder: Path, *, index: bool = True) -> Path:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, folder / FIRST)
    save_file({"c": torch.zeros(5, dtype=torch.bfloat16)}, folder / SECOND)
    if index:
        write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        list_tensors(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("index", [True, False])
def test_the_headers_say_where_each_tensor_lies(index, tmp_path):
    stored = list_tensors(two_files(tmp_path, index=index))
    assert {name: (s.path.name, s.name, s.dtype, s.shape) for name, s in stored.items()} == {
        "a": (FIRST, "a", "F32", (2, 3)),
        "b": (FIRST, "b", "F32", (4,)),
        "c": (SECOND, "c", "BF16", (5,)),
    }


def test_files_that_the_index_does_not_name_are_not_read(tmp_path):
    two_files(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"of another loader")
    assert list_tensors(tmp_path).keys() == {"a", "b", "c"}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def becomes_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def becomes_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dangles(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "blobs" / "gone")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "is not a whole safetensors file (Error while deserializing header: incomplete metadata"),
        (lambda p: p.write_bytes(b""), "is empty; copy or download it again"),
        (lambda p: p.write_bytes(b"\x07"), "is not a whole safetensors file"),
        (lambda p: p.write_bytes(header(b"not JSON")), "is not a whole safetensors file"),
        (lambda p: p.write_bytes(header(b"[]")), "is not a whole safetensors file"),
        (lambda p: p.write_bytes(header(b"{}", 1 << 40)), "header too large"),
        (lambda p: p.write_bytes(LFS), "is a git-lfs pointer and not the weights; run git lfs pull in"),
        (becomes_folder, "is a folder, not a safetensors file"),
        (dangles, "does not exist, or is a link to nothing"),
        (becomes_pipe, "is a pipe, socket or device, not a safetensors file; remove or replace it"),
        (lambda p: p.write_bytes(header(b'{"x": "' + b"y" * 9000 + b'"}')), "copy or download it again"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named_with_what_to_do(index, spoil, words, tmp_path):
    two_files(tmp_path, index=index)
    spoil(tmp_path / SECOND)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / SECOND} ") and words in message
    assert len(message) < 2 * len(str(tmp_path)) + 400


def test_a_shard_that_the_index_names_and_that_is_missing_is_named(tmp_path):
    (two_files(tmp_path) / SECOND).unlink()
    assert refusal(tmp_path) == f"{tmp_path / SECOND} does not exist, or is a link to nothing; copy or download it"


def test_a_tensor_that_the_index_places_in_a_file_without_it_is_named(tmp_path):
    write_index(two_files(tmp_path), {"a": FIRST, "b": SECOND, "c": SECOND})
    assert f"{tmp_path / SECOND} lacks b, which {INDEX} places there" in refusal(tmp_path)


def test_a_tensor_that_the_index_lacks_is_the_same_contradiction(tmp_path):
    write_index(two_files(tmp_path), {"a": FIRST, "c": SECOND})
    assert refusal(tmp_path) == f"{tmp_path / FIRST} holds b, which {INDEX} lacks; download both again"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is nested too deeply to be read"),
        (b"[]", "is not a JSON object"),
        (LFS, "is a git-lfs pointer and not the file; run git lfs pull in"),
        (b"", "is empty"),
        (b"\xff\xfe", "has a byte order mark"),
        (b"{}", "is not an index"),
        (b'{"weight_map": []}', "is not an index"),
        (b'{"weight_map": {}}', "is not an index"),
        (b'{"weight_map": "abc"}', "is not an index"),
    ],
)
def test_an_index_that_is_none_is_refused(content, words, tmp_path):
    (two_files(tmp_path) / INDEX).write_bytes(content)
    assert refusal(tmp_path).startswith(f"{tmp_path / INDEX} {words}")


@pytest.mark.parametrize(
    "file",
    [
        "",
        ".",
        "..",
        "../x.safetensors",
        "/x.safetensors",
        "s/x.safetensors",
        "config.json",
        "x.safetensors\n",
        "a\nb.safetensors",
        "\0.safetensors",
        "\ud800.safetensors",
        "x" * 5000 + ".safetensors",
        "é" * 128 + ".safetensors",
        1,
        None,
        ["x"],
        {},
        True,
    ],
)
def test_an_index_that_places_a_tensor_in_no_safetensors_file_of_the_folder_is_refused(file, tmp_path):  # fmt: skip
    (two_files(tmp_path) / "config.json").write_text("{}")
    write_index(tmp_path, {"a": FIRST, "b": file, "c": SECOND})
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / INDEX} is not an index: it places b in ")
    assert message.isprintable() and len(message) < len(str(tmp_path)) + 300


@pytest.mark.parametrize(
    ("becomes", "kind"), [(becomes_folder, "a folder"), (becomes_pipe, "a pipe, socket or device")]
)
def test_an_index_that_is_no_file_is_refused(becomes, kind, tmp_path):
    becomes(two_files(tmp_path) / INDEX)
    assert refusal(tmp_path) == f"{tmp_path / INDEX} is {kind} and not a file; remove or replace it"


LONG = "model.\n\x1b" + "x" * 20_000


def save(path: Path, *names: str) -> None:
    save_file({name: torch.zeros(1) for name in names}, path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: (save(f / "1.safetensors", LONG), save(f / "2.safetensors", LONG)),
        lambda f: (two_files(f), write_index(f, {"a": FIRST, "b": FIRST, "c": SECOND, LONG: FIRST})),
        lambda f: (two_files(f), write_index(f, {LONG: "x"})),
        lambda f: (two_files(f), save(f / SECOND, LONG), write_index(f, {"a": FIRST, "b": FIRST, LONG: FIRST})),
        lambda f: (save(f / FIRST, "a", LONG), write_index(f, {"a": FIRST})),
        lambda f: save(f / "a\n\x1b.safetensors", "a"),
        lambda f: (f / "a\n.bin").write_bytes(b"x"),
    ],
    ids=["twice", "lacking", "misplaced", "elsewhere", "not in the index", "file", "other weights"],
)  # fmt: skip
def test_names_are_shown_short_and_on_one_line(spoil, tmp_path):
    spoil(tmp_path)
    message = refusal(tmp_path)
    assert message.isprintable() and len(message) < 2 * len(str(tmp_path)) + 350


def test_one_name_in_two_files_is_refused_with_both(tmp_path):
    two_files(tmp_path, index=False)
    save_file({"c": torch.zeros(1), "a": torch.zeros(1)}, tmp_path / SECOND)
    assert refusal(tmp_path) == f"{tmp_path / SECOND}: a is in {FIRST} too; remove one of the files"


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, two_files(tmp_path) / "model.safetensors")
    assert "holds model.safetensors and an index that does not name it" in refusal(tmp_path)


def test_a_folder_without_tensors_is_refused(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert f"{tmp_path / 'model.safetensors'} holds no tensors" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "tf_model.h5"])
def test_weights_in_another_format_come_with_the_way_to_convert_them(name, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path} holds {name}, but no .safetensors file; convert it with transformers.")
    assert f"from_pretrained({str(tmp_path)!r}).save_pretrained(NEW_FOLDER)" in message


def test_the_advice_for_bin_weights_works(tmp_path):
    import tiny
    from transformers import AutoModelForCausalLM

    folder = tiny.save_model(tmp_path / "old")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "holds pytorch_model.bin" in refusal(folder)
    AutoModelForCausalLM.from_pretrained(str(folder)).save_pretrained(tmp_path / "new")
    assert "model.norm.weight" in list_tensors(tmp_path / "new")


def test_no_weights_and_no_folder_are_refused(tmp_path):
    assert "holds no .safetensors file; copy the weights there, or set model.init to random" in refusal(tmp_path)
    assert refusal(tmp_path / "no").startswith(f"{tmp_path / 'no'} cannot be read (No such file or directory)")
    (tmp_path / "file").write_bytes(b"")
    assert "cannot be read (Not a directory)" in refusal(tmp_path / "file")


@pytest.mark.parametrize("shape", [(1,), (1,) * 4000], ids=["names", "shapes"])
def test_what_a_load_finds_wrong_is_shown_short(shape, tmp_path):
    import tiny

    from tba_megatron.trainer import load_hf

    architecture, model = read_model(tiny.save_model(tmp_path / "m", "gpt2"))
    good = list_tensors(tmp_path / "m")
    odd = dataclasses.replace(next(iter(good.values())), name=LONG, shape=shape)
    cases = [{"h." + LONG: odd, "transformer.h." + LONG: odd}, {**good, LONG: odd}]
    cases += [{**good, LONG: dataclasses.replace(odd, dtype="I8")}, {**good, "transformer.ln_f.bias": odd}]
    for stored in cases:
        with pytest.raises(ModelError) as caught:
            load_hf._check(load_hf._canonical(stored, architecture)[0], architecture, model, tmp_path)
        assert str(caught.value).isprintable() and len(str(caught.value)) < len(str(tmp_path)) + 400
    _, ignored = load_hf._canonical({"h.0." + LONG + ".attn.bias": odd}, architecture)
    report = load_hf.LoadReport(source="x", loaded=(), tied=(), initialised=(), ignored=ignored, n_parameters=1)
    assert "; ignored h.0.model." in str(report) and str(report).isprintable() and len(str(report)) < 300


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything: be nobody meanwhile."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("forbidden", [SECOND, INDEX, "."])
def test_what_may_not_be_read_is_named(forbidden):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in (*two_files(folder).iterdir(), folder):
            path.chmod(0o755)
        (folder / forbidden).chmod(0)
        with without_privileges():
            message = refusal(folder)
        folder.chmod(0o755)
    place = {".": str(folder / INDEX)}.get(forbidden, str(folder / forbidden))
    assert message.startswith(f"{place} cannot be read (Permission denied); check ")


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that were opened, in order."""
    names, really_open = [], hf_folder._open

    def open_file(path):
        names.append(path.name)
        return really_open(path)

    monkeypatch.setattr(hf_folder, "_open", open_file)
    return names


def test_each_file_is_opened_once_and_stays_open_only_while_something_needs_it(opened, tmp_path):
    files = {"1": ("k", "x"), "2": ("v", "y"), "3": ("q", "z"), "4": ("w",)}
    for file, names in files.items():
        save_file({name: torch.full((3,), float(ord(name))) for name in names}, tmp_path / f"{file}.safetensors")
    wanted = [("z",), ("q", "k", "v"), ("y",), ("x",)]
    with open_tensors(tmp_path) as tensors:
        opened.clear()
        seen, open_then = [], []
        for i, sources in tensors.read(wanted):
            seen.append(i)
            open_then.append(sorted(path.stem for path in tensors._open))
            assert [float(source[(slice(1),)]) for source in sources] == [float(ord(name)) for name in wanted[i]]
            assert [list(source.shape) for source in sources] == [[3]] * len(sources)
        assert not tensors._open
    assert opened == ["1.safetensors", "2.safetensors", "3.safetensors"]  # nothing wants what is in the fourth
    assert seen == [3, 2, 1, 0]
    assert open_then == [["1"], ["1", "2"], ["1", "2", "3"], ["3"]]


def test_files_are_closed_when_reading_is_given_up(tmp_path):
    with pytest.raises(KeyError), open_tensors(two_files(tmp_path)) as tensors:
        for _ in tensors.read([("a",), ("c",)]):
            raise KeyError
    assert not tensors._open


def test_a_file_that_was_replaced_after_it_was_listed_is_an_error(tmp_path):
    stored = list_tensors(two_files(tmp_path))
    save_file({"other": torch.zeros(1)}, tmp_path / SECOND)
    with HfTensors(stored) as tensors, pytest.raises(ModelError, match=f"{SECOND}: c cannot be read .* replaced"):
        list(tensors.read([("c",)]))
