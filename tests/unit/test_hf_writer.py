"""A folder appears whole under its name, and neither a failure nor a kill at any point loses what was there before."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tba_megatron.models.hf_folder import INDEX, list_tensors
from tba_megatron.models.hf_writer import PlannedFile, begin_folder, file_names, finish_folder, write_weights

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


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


def attempt(folder: Path, template: Path, value: float) -> None:
    """An export of a model of the one tensor ``value``."""
    partial = folder.with_name(f".{folder.name}.partial")
    begin_folder(partial, template, "float32")
    write_weights(partial / "model.safetensors", [("a", torch.tensor([value]))])
    finish_folder(partial, folder, {"model.safetensors": PlannedFile(names=("a",), nbytes=4)})


def value_in(folder: Path) -> float:
    assert {"config.json", "tokenizer.json"} < {path.name for path in folder.iterdir()}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.get_tensor("a").item()


STEPS = ((os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (shutil, "rmtree"), (shutil, "copyfile"))


def killed_at(step: int, folder: Path, template: Path, value: float) -> bool:
    """Whether a process that dies before the change ``step`` of the disk came so far in an attempt."""

    def count(change):
        def counted(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return change(*args, **kwargs)

        return counted

    left = step
    child = os.fork()
    if child == 0:
        for module, name in STEPS:
            setattr(module, name, count(getattr(module, name)))
        try:
            attempt(folder, template, value)
        finally:
            os._exit(0 if left >= 0 and value_in(folder) == value else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def beginnings(folder: Path, template: Path) -> float:
    """What stands under the name when the next attempt fails as soon as it has begun."""
    begin_folder(folder.with_name(f".{folder.name}.partial"), template, "float32")
    return value_in(folder)


def test_a_kill_at_any_point_leaves_the_old_or_the_new_folder_to_the_next_attempt(tmp_path):
    source, seen = template(tmp_path / "template"), set()
    for step in range(100):
        folder = tmp_path / str(step) / "hf.v1"
        folder.parent.mkdir()
        attempt(folder, source, 1.0)
        if not killed_at(step, folder, source, 2.0):
            break
        names = {path.name for path in folder.parent.iterdir()}
        seen.add((folder.name in names, f".{folder.name}.before" in names))
        assert beginnings(folder, source) in (1.0, 2.0)
        attempt(folder, source, 3.0)
        assert value_in(folder) == 3.0 and [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert seen == {(True, False), (False, True), (True, True)}  # between the renames too


def test_a_second_kill_after_one_between_the_renames_loses_nothing_either(tmp_path):
    source = template(tmp_path / "template")
    for step in range(100):
        folder = tmp_path / str(step) / "hf"
        folder.parent.mkdir()
        attempt(folder, source, 1.0)
        folder.rename(folder.with_name(".hf.before"))
        if not killed_at(step, folder, source, 2.0):
            break
        assert beginnings(folder, source) in (1.0, 2.0)
    assert step > 4  # a rename, two companions and the two renames at the end, at the least


def test_a_folder_that_a_kill_left_without_its_name_may_be_the_template(tmp_path):
    folder = tmp_path / "hf"
    attempt(folder, template(tmp_path / "template"), 1.0)
    folder.rename(tmp_path / ".hf.before")
    attempt(folder, folder, 2.0)
    assert value_in(folder) == 2.0 and not (tmp_path / ".hf.before").exists()


def test_what_was_there_comes_back_when_only_the_end_of_an_attempt_finds_it_missing(tmp_path):
    partial, folder = tmp_path / ".hf.partial", tmp_path / "hf"
    begin_folder(partial, template(tmp_path / "template"), "float32")
    (tmp_path / ".hf.before").mkdir()
    (tmp_path / ".hf.before" / "kept").write_text("kept")
    shutil.rmtree(partial)
    with pytest.raises(FileNotFoundError):
        finish_folder(partial, folder, {})
    assert (folder / "kept").read_text() == "kept"
