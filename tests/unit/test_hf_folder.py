"""Hugging Face folders: every hostile one is refused in one line that names the file, and reading opens a file once."""

from __future__ import annotations

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
from tba_megatron.models.hf_writer import (
    PlannedFile,
    begin_folder,
    file_names,
    finish_folder,
    write_weights,
)

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
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named_with_what_to_do(index, spoil, words, tmp_path):
    two_files(tmp_path, index=index)
    spoil(tmp_path / SECOND)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / SECOND} ") and words in message


def test_a_shard_that_the_index_names_and_that_is_missing_is_named(tmp_path):
    (two_files(tmp_path) / SECOND).unlink()
    assert refusal(tmp_path) == f"{tmp_path / SECOND} does not exist, or is a link to nothing; copy or download it"


def test_a_tensor_that_the_index_places_in_a_file_without_it_is_named(tmp_path):
    write_index(two_files(tmp_path), {"a": FIRST, "b": SECOND, "c": SECOND})
    assert f"{tmp_path / SECOND} lacks b, which {INDEX} places there" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}', b"\xff\xfe",
     b'{"weight_map": {"a": "../x.safetensors"}}', b'{"weight_map": {"a": "/x.safetensors"}}',
     b'{"weight_map": {"a": ["x"]}}'],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(content, tmp_path):
    (two_files(tmp_path) / INDEX).write_bytes(content)
    assert refusal(tmp_path).startswith(f"{tmp_path / INDEX} is not an index")


def test_an_index_that_is_a_folder_is_refused(tmp_path):
    becomes_folder(two_files(tmp_path) / INDEX)
    assert refusal(tmp_path).startswith(f"{tmp_path / INDEX} cannot be read (Is a directory)")


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


def template(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float16", "architectures": ["X"], "é": [1]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("does not travel")
    return folder


def test_a_folder_is_written_with_companions_index_and_the_dtype_in_its_configuration(tmp_path):
    partial, folder = tmp_path / ".new.partial", tmp_path / "new"
    names = file_names(2)
    begin_folder(partial, template(tmp_path / "old"), "bfloat16")
    tensors = {names[0]: {"a": torch.ones(2, 2).t(), "b": torch.ones(3)}, names[1]: {"c": torch.zeros(1)}}
    planned = {}
    for name, held in tensors.items():
        write_weights(partial / name, list(held.items()))
        planned[name] = PlannedFile(names=tuple(held), nbytes=sum(t.nbytes for t in held.values()))
    finish_folder(partial, folder, planned)
    assert names == [FIRST, SECOND]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, INDEX, "config.json", "tokenizer.json"])
    assert json.loads((folder / "config.json").read_text()) == {"architectures": ["X"], "é": [1], "dtype": "bfloat16"}
    index = json.loads((folder / INDEX).read_text())
    assert index == {"metadata": {"total_size": 32}, "weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
    assert list_tensors(folder).keys() == {"a", "b", "c"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever reads one file reads all


def test_what_was_there_before_comes_back_when_the_new_folder_cannot_take_its_name(tmp_path, monkeypatch):
    partial, folder = tmp_path / ".new.partial", tmp_path / "new"
    begin_folder(partial, template(tmp_path / "old"), "float32")
    folder.mkdir()
    (folder / "kept").write_text("kept")
    rename = Path.rename

    def refuse(self, target):
        if self == partial:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        finish_folder(partial, folder, {})
    assert (folder / "kept").read_text() == "kept"


def test_a_file_that_another_rank_wrote_elsewhere_is_noticed(tmp_path):
    partial = tmp_path / ".new.partial"
    begin_folder(partial, template(tmp_path / "old"), "float32")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors was written by another rank but is not seen here"):
        finish_folder(partial, tmp_path / "new", {"model.safetensors": PlannedFile(names=("a",), nbytes=4)})
    assert not (tmp_path / "new").exists()
