"""Rotary positions: what config.json says of them, the frequencies that follow, and Megatron's module for packed rows.

T packed tokens, R rotated columns of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from tba_megatron.models.settings import Settings

_KNOWN_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between are mixed (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary positions of the first ``size`` columns of a head. ``scaling`` None: as trained."""

    size: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


def read_rotary(settings: Settings, head_size: int, max_positions: int, theta: float, fraction: float) -> Rotary:
    """The rotary positions of a config.json, new (``rope_parameters``) or old (``rope_scaling``).

    ``theta`` and the rotated ``fraction`` of a head are those outside of that dict; the dict goes before them.
    Source: PreTrainedConfig.convert_rope_params_to_dict (transformers 5).
    """
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise settings.error(f"rope_parameters {short(rope)} is not an object")
    unknown = sorted(rope.keys() - _KNOWN_KEYS)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise settings.error(f"rotary scaling {short(kind)} is not supported; known: default, linear, llama3")
    if unknown:
        raise settings.error(f"{short(unknown)} in rope_parameters is not supported")

    def number(name: str, default: Any = None) -> float:
        value = rope.get(name)
        return settings.positive(f"rope_parameters.{name}", default if value is None else value)

    size = int(head_size * number("partial_rotary_factor", fraction))
    if size % 2 or not 0 < size <= head_size:
        raise settings.error(f"{size} rotated columns of a head of {head_size} are not an even part of it")
    scaling: LinearScaling | Llama3Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=number("factor"))
    elif kind == "llama3":
        # transformers lets the value beside the dict go before the one in it.
        original = settings.get("original_max_position_embeddings")
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_positions=settings.number("original_max_position_embeddings", 1.0)
            if original is not None
            else number("original_max_position_embeddings", max_positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise settings.error("rope_parameters.high_freq_factor has to be above low_freq_factor")
    return Rotary(size=size, theta=number("rope_theta", theta), scaling=scaling)


def inverse_frequencies(rotary: Rotary) -> Tensor:
    """Radians per position [R / 2], float32, to the last bit those of transformers (5, modeling_rope_utils.py)."""
    plain = 1.0 / (rotary.theta ** (torch.arange(0, rotary.size, 2, dtype=torch.float) / rotary.size))
    match rotary.scaling:
        case None:
            return plain
        case LinearScaling():
            return plain / rotary.scaling.factor
        case Llama3Scaling():
            return _llama3(plain, rotary.scaling)


def _llama3(plain: Tensor, s: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest = s.original_max_positions / s.low_freq_factor
    shortest = s.original_max_positions / s.high_freq_factor
    stretched = torch.where(wavelength > longest, plain / s.factor, plain)
    share = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    mixed = (1 - share) * stretched / s.factor + share * stretched
    between = ~(wavelength < shortest) * ~(wavelength > longest)
    return torch.where(between, mixed, stretched)


class PackedRotary(torch.nn.Module):
    """Stands where GPTModel (0.16.1) has its RotaryEmbedding: angles by the position of each packed token.

    Megatron's own makes angles for the longest sequence and cuts them for each sequence of a pack in a Python loop, in
    every layer and for queries and keys; and its rope_scaling knows one set of constants. The packed parameters have
    to carry ``positions`` [T], and a ``qkv_format`` other than "thd", which would ask for that loop.
    """

    def __init__(self, rotary: Rotary, device: torch.device) -> None:
        super().__init__()
        # No buffer: a conversion of the model to bfloat16 would round it.
        self._inverse_frequencies = inverse_frequencies(rotary).to(device)

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params
    ) -> Tensor:
        """What GPTModel hands on to ``forward``: here the positions themselves."""
        return packed_seq_params.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: object = None) -> Tensor:
        """Angles [T, 1, 1, R] of ``positions`` [T], for Megatron's ``apply_rotary_pos_emb``."""
        angles = torch.outer(positions.float(), self._inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
