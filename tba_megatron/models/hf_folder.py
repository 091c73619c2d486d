"""Hugging Face folders on disk: read tensors one at a time, write a folder that others load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tba_megatron.errors import CheckpointError, ModelError

# What travels with the weights: everything a reader needs that is not weights.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


class HfTensors:
    """The tensors of a folder by name, read on demand from memory-mapped safetensors files."""

    def __init__(self, files: dict[str, safe_open]) -> None:
        self._files = files

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


@contextmanager
def open_tensors(folder: Path) -> Iterator[HfTensors]:
    """Open every safetensors file of ``folder``; ModelError when there is none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no .safetensors file; convert the weights, or set model.init to random")
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for path in paths:
            opened = stack.enter_context(safe_open(path, framework="pt"))
            files.update(dict.fromkeys(opened.keys(), opened))
        yield HfTensors(files)


def write_folder(folder: Path, template: Path, tensors: Iterable[tuple[str, Tensor]], dtype: str) -> None:
    """Write ``tensors`` beside the companions of ``template``; the folder appears under its name when it is whole.

    CheckpointError when it cannot be written; what was there before stays.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        _write(partial, template, tensors, dtype)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write {folder}: {error}; is there space, and may it be written?") from None


def _write(partial: Path, template: Path, tensors: Iterable[tuple[str, Tensor]], dtype: str) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in COMPANIONS:
        if (template / name).exists():
            shutil.copyfile(template / name, partial / name)
    config = json.loads((partial / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    whole = {name: tensor.contiguous() for name, tensor in tensors}
    save_file(whole, partial / "model.safetensors", metadata={"format": "pt"})
