"""The table of architectures. Adding one is a file beside this one and a line here."""

from __future__ import annotations

from pathlib import Path

from tba_megatron.models.architecture import Architecture, ModelShape, read_shape
from tba_megatron.models.gpt2 import Gpt2
from tba_megatron.models.gpt_neox import GptNeox
from tba_megatron.models.llama import Llama
from tba_megatron.models.qwen2 import Qwen2
from tba_megatron.models.qwen3 import Qwen3

ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (Qwen2(), Qwen3(), Llama(), GptNeox(), Gpt2())}


def read_model(folder: Path) -> tuple[Architecture, ModelShape]:
    """The architecture and shape of a Hugging Face folder; ModelError when it is not supported."""
    return read_shape(folder, ARCHITECTURES)
