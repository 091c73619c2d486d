"""Seeded random weights under Hugging Face names: a tensor is drawn whole, so every parallel layout gets the same."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from tba_megatron.models.architecture import Architecture, ModelShape


class RandomTensors:
    """Stands where ``HfTensors`` stands. Matrices are normal with ``initializer_range``, biases 0, norms 1.

    Projections back into the residual stream are smaller by sqrt(2 x layers) (GPT-2; Megatron's
    scaled_init_method_normal).
    """

    def __init__(self, architecture: Architecture, shape: ModelShape, seed: int) -> None:
        self._shapes = architecture.tensor_shapes(shape)
        self._residual = architecture.residual_projections
        self._shape, self._seed = shape, seed

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        size = self._shapes[name]
        if len(size) == 1:
            return torch.zeros(size) if name.endswith("bias") else torch.ones(size)
        std = self._shape.initializer_range
        if name.endswith(self._residual):
            std /= math.sqrt(2 * self._shape.num_layers)
        # The name is part of the seed, so no tensor depends on which others this rank drew.
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + zlib.crc32(name.encode()))
        return torch.randn(size, generator=generator) * std
