"""Where the reference's weights are kept, and how they come to be scored with: ``objective.reference.placement``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from megatron.core.models.gpt.gpt_model import GPTModel


class ReferenceWeights(Protocol):
    """This rank's part of the reference's weights."""

    def scoring(self) -> AbstractContextManager[Sequence[GPTModel]]:
        """Chunks that hold the reference's weights meanwhile, for passes without gradient and for an export."""
        ...

    def take(self, policy: Sequence[GPTModel]) -> None:
        """From here on the reference is ``policy`` as it is now, bit for bit."""
        ...


class OnDevice:
    """A second model beside the policy: its memory once more in the trainer's dtype, and no copies."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        # Parameters keep requires_grad, though none of them ever gets a gradient: for frozen ones Megatron's parallel
        # layers (0.16.1, linear_with_frozen_weight) compute other last bits than for the policy.
        self._chunks = tuple(chunk.eval() for chunk in chunks)

    @contextmanager
    def scoring(self) -> Iterator[Sequence[GPTModel]]:
        yield self._chunks

    @torch.no_grad()
    def take(self, policy: Sequence[GPTModel]) -> None:
        for mine, theirs in zip(_parameters(self._chunks), _parameters(policy), strict=True):
            mine.copy_(theirs)


class OnHost:
    """In host memory, and in the policy's place for as long as something is scored: each parameter changes places with
    its twin and back, which costs the device one parameter more at a time. Neither optimizer nor gradient see it.

    Begins as ``policy`` is when it is made.
    """

    def __init__(self, policy: Sequence[GPTModel]) -> None:
        self._policy = tuple(policy)
        self._host = [
            torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)
            for parameter in _parameters(policy)
        ]
        self.take(policy)

    @contextmanager
    def scoring(self) -> Iterator[Sequence[GPTModel]]:
        self._swap()
        try:
            yield self._policy
        finally:
            self._swap()

    @torch.no_grad()
    def take(self, policy: Sequence[GPTModel]) -> None:
        for mine, theirs in zip(self._host, _parameters(policy), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def _swap(self) -> None:
        for host, parameter in zip(self._host, _parameters(self._policy), strict=True):
            aside = parameter.detach().clone()
            parameter.copy_(host)
            host.copy_(aside)


def _parameters(chunks: Sequence[GPTModel]) -> list[torch.nn.Parameter]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]
