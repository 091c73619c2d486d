"""A deterministic engine without a model, for tests of everything around it.

What it answers is a function of the seed, the version, the prompt and the sample's index. It takes weights through the
same receiver as a real engine, so the protocol is the real one; the weights themselves do nothing.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from tba_megatron.config_search import FakeEngineConfig
from tba_megatron.errors import EngineError
from tba_megatron.models.hf_folder import list_tensors
from tba_megatron.search.engine import InFlight, ReceiveStatus
from tba_megatron.search.receiver import Receiver
from tba_megatron.transport.messages import Offer
from tba_megatron.types import Completion, Floats, PolicySpan, PolicyVersion, SamplingSettings, StopReason, TokenIds


class FakeEngine:
    """A ``SearchEngine``. ``answer`` gives the right completion without its EOS; wrong ones repeat the first token."""

    workers = 1
    recompute_s = 0.0  # a completion is written in one step: none is in flight between two

    def __init__(
        self,
        model: Path,
        config: FakeEngineConfig,
        *,
        version: PolicyVersion,
        seed: int,
        answer: Callable[[TokenIds], TokenIds] = lambda prompt: prompt[:1],
        dtype: str = "float32",
        in_flight: InFlight = "recompute",
    ) -> None:
        expected = {name: (stored.shape, dtype) for name, stored in list_tensors(model).items()}
        self._receiver = Receiver(torch.device("cpu"), expected)
        self._config, self._seed, self._answer = config, seed, answer
        self._version = version
        self._requests: deque[tuple[str, TokenIds, SamplingSettings]] = deque()
        self._receiving: PolicyVersion | None = None
        self._in_flight = in_flight
        self._paused_s = 0.0

    @property
    def paused_s(self) -> float:
        return self._paused_s

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def n_unfinished(self) -> int:
        return len(self._requests)

    def submit(self, request_id: str, prompt_token_ids: TokenIds, sampling: SamplingSettings) -> None:
        if len(prompt_token_ids) == 0:
            raise EngineError(f"prompt of request {request_id} is empty")
        self._requests.append((request_id, prompt_token_ids, sampling))

    def step(self) -> Sequence[tuple[str, tuple[Completion, ...]]]:
        """Finish requests until ``tokens_per_step`` tokens are written, at least one request."""
        finished, tokens = [], 0
        while self._requests and (not finished or tokens < self._config.tokens_per_step):
            request_id, prompt, sampling = self._requests.popleft()
            completions = tuple(self._complete(prompt, sampling, sample) for sample in range(sampling.n))
            tokens += sum(len(c.token_ids) for c in completions)
            finished.append((request_id, completions))
        return finished

    def _complete(self, prompt: TokenIds, sampling: SamplingSettings, sample: int) -> Completion:
        identity = f"{self._seed} {self._version} {prompt.tolist()} {sample}".encode()
        right = self._answer(prompt)
        if zlib.crc32(identity) / 2**32 >= self._config.correct_fraction:
            right = np.concatenate([right, right[:1]])
        full = np.concatenate([right, np.array(sampling.eos_ids[:1], np.int32)]).astype(np.int32)
        token_ids = full[: sampling.max_new_tokens]
        ended = len(token_ids) == len(full)
        return Completion(
            token_ids=token_ids,
            stop_reason=StopReason.EOS if ended else StopReason.LENGTH,
            spans=(PolicySpan(version=self._version, start=0, end=len(token_ids)),),
        )

    def abort_all(self) -> None:
        self._requests.clear()

    def score(self, sequences: Sequence[TokenIds]) -> list[Floats]:
        return [
            np.array([self._logprob(ids[: end + 1]) for end in range(1, len(ids))], np.float32) for ids in sequences
        ]

    def _logprob(self, token_ids: TokenIds) -> float:
        """Of the last of them, in [-5, 0): a function of the version and of all of them."""
        return -5.0 * (zlib.crc32(f"{self._version} {token_ids.tolist()}".encode()) + 1) / 2**32

    def begin_receive(self, offer: Offer, timeout_s: float) -> None:
        self._receiving = PolicyVersion.parse(offer.version)
        self._receiver.begin(offer, 0, timeout_s)

    def poll_receive(self) -> ReceiveStatus:
        return self._receiver.poll()

    def apply(self) -> None:
        assert self._receiving is not None
        if self._in_flight == "drain" and self._requests:
            raise EngineError(f"version {self._receiving} cannot be applied while requests are in a draining engine")
        started_s = time.monotonic()
        self._receiver.take()
        self._version, self._receiving = self._receiving, None
        self._paused_s += time.monotonic() - started_s

    def close(self) -> None:
        self._receiver.close()


class FakeReference:
    """A ``ReferenceScorer`` without a model: what it says is a function of the prompt and the completion."""

    def __init__(self) -> None:
        self._requests: deque[tuple[str, TokenIds, Sequence[TokenIds]]] = deque()

    @property
    def n_unfinished(self) -> int:
        return len(self._requests)

    def submit(self, request_id: str, prompt_token_ids: TokenIds, completions: Sequence[TokenIds]) -> None:
        self._requests.append((request_id, prompt_token_ids, completions))

    def step(self) -> Sequence[tuple[str, tuple[float, ...]]]:
        """One request."""
        if not self._requests:
            return []
        request_id, prompt, completions = self._requests.popleft()
        return [(request_id, tuple(self.logprob(prompt, token_ids) for token_ids in completions))]

    def logprob(self, prompt: TokenIds, token_ids: TokenIds) -> float:
        """In (-1, 0] nats a token."""
        return -len(token_ids) * zlib.crc32(f"{prompt.tolist()} {token_ids.tolist()}".encode()) / 2**32

    def close(self) -> None:
        pass
