"""What an architecture is: its shape, its Megatron configuration, and the rules that convert its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tba_megatron.errors import ModelError, shown
from tba_megatron.models.layouts import Layout, Replicated, Rule
from tba_megatron.models.rotary import Rotary
from tba_megatron.models.settings import read_object

# Rows of the vocabulary are padded to a multiple of this on each tensor-parallel rank: GEMMs like it, and the split
# comes out even for every vocabulary.
VOCABULARY_MULTIPLE = 64

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

# Hugging Face's names of activations; three of them are one function.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder: its sizes, named as in Hugging Face's config.json, and what its layers compute."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    tied: bool
    rotary: Rotary | None
    """None: positions are learned, ``max_positions`` of them."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    activation: Activation = "silu"
    gated: bool = True
    """Whether the MLP multiplies a gate and an up projection."""
    qkv_bias: bool = False
    linear_bias: bool = False
    """Biases in every linear layer, ``qkv_bias`` included."""
    qk_norm: bool = False
    parallel_residual: bool = False
    """Attention and MLP both read the input of the layer."""
    initializer_range: float = 0.02  # standard deviation of random initial weights

    def padded_vocab(self, tensor_parallel: int) -> int:
        """The vocabulary with its padding: a multiple of 64 rows for each tensor-parallel rank."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


class Architecture(Protocol):
    """One file each. ``read`` raises ModelError for what it does not support; it never ignores a setting."""

    name: str
    model_type: str
    """What transformers' auto classes choose a model by."""
    residual_projections: tuple[str, ...]
    """How the names of the weights end that write into the residual stream; random ones start smaller."""

    def read(self, hf_config: Mapping[str, Any]) -> ModelShape: ...

    def rules(self, shape: ModelShape, tensor_parallel: int) -> list[Rule]: ...

    def tensor_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that the rules name, in Hugging Face's layout."""
        ...

    def canonical(self, name: str) -> str | None:
        """The name that the rules have for a tensor found in a folder; None for buffers, which hold no weights."""
        ...


def read_shape(folder: Path, table: Mapping[str, Architecture]) -> tuple[Architecture, ModelShape]:
    """The architecture and shape that ``folder``/config.json names; ModelError when it cannot be used."""
    path = folder / "config.json"
    try:
        hf_config = read_object(path)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; model.path must be a Hugging Face folder") from None
    names = hf_config.get("architectures") or ["(none)"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in table:
        raise ModelError(f"{path}: architecture {shown(name)} is not supported; known are {', '.join(sorted(table))}")
    architecture, model_type = table[name], hf_config.get("model_type")
    if model_type is not None and model_type != architecture.model_type:
        raise ModelError(
            f"{path}: model_type {shown(model_type)} contradicts the architecture {name}, whose own is "
            f"{architecture.model_type}; other loaders go by model_type, so make the two agree"
        )
    try:
        return architecture, architecture.read(hf_config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def check_length(shape: ModelShape, max_length: int) -> None:
    """ModelError when sequences of ``max_length`` tokens are longer than the learned positions."""
    if shape.rotary is None and max_length > shape.max_positions:
        raise ModelError(
            f"model.max_length: {max_length} is more than the {shape.max_positions} learned positions of "
            f"{shape.architecture} (config.json); lower it to at most {shape.max_positions}"
        )


def make_rule(megatron: str, hf: Sequence[str] | str, layout: Layout) -> Rule:
    return Rule(megatron=megatron, hf=(hf,) if isinstance(hf, str) else tuple(hf), layout=layout)


def norm_rules(megatron: str, hf: str, shape: ModelShape) -> list[Rule]:
    """The weight of a norm, and with LayerNorm its bias."""
    parts = ("weight", "bias") if shape.normalization == "LayerNorm" else ("weight",)
    return [make_rule(f"{megatron}.{part}", f"{hf}.{part}", Replicated()) for part in parts]
