"""The reference in vLLM: a second engine in the searcher's process, over the start model. It scores, and that is all.

It takes no weights, and its cache holds what one step works on, so that it costs the model's weights and little more.
Written for vLLM 0.32. T tokens of a sequence.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm import EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from tba_megatron.config_search import VllmEngineConfig
from tba_megatron.dist import die_with_parent, run_environment
from tba_megatron.errors import EngineError
from tba_megatron.models.registry import read_model
from tba_megatron.search.vllm_engine import RPC_LIMIT_S, forget_files, start_engine, worker_errors
from tba_megatron.types import TokenIds

_STEP_TOKENS = 1024  # of one step: bounds the logits, T times the vocabulary in float32, and the step's time
_STEP_SEQUENCES = 64
_BLOCK_TOKENS = 256  # no less than vLLM gives a sequence at a time: 128 on a CPU
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(slots=True)
class _Request:
    sums: list[float]
    missing: int  # completions that are not scored yet


class VllmReference:
    """A ``ReferenceScorer``. More workers than one are processes of their own, which end with this one.

    ``seed`` has to be that of the engine beside it: vLLM seeds the generators of the whole process.
    """

    def __init__(
        self, model: Path, config: VllmEngineConfig, *, temperature: float, max_length: int, seed: int
    ) -> None:
        self._workers = config.tensor_parallel
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=config.dtype,
            enforce_eager=True,
            max_model_len=max_length,
            max_num_seqs=_STEP_SEQUENCES,
            max_num_batched_tokens=_STEP_TOKENS,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,  # what is scored is computed whole, whatever a cache holds
            tensor_parallel_size=self._workers,
            distributed_executor_backend="mp" if self._workers > 1 else "uni",
            kv_cache_memory_bytes=_cache_bytes(model, config, max_length),
            seed=seed,
            logprobs_mode="raw_logprobs",  # before a token is forced
            disable_log_stats=True,
            worker_extension_cls="tba_megatron.search.vllm_reference.ReferenceWorker",
        )
        self._engine = start_engine(arguments, model, "the reference, with search.engine,")
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._requests: dict[str, _Request] = {}
        with worker_errors(self._workers):
            identity: str
            identity, *_ = self._engine.collective_rpc("tba_begin", timeout=RPC_LIMIT_S, args=(temperature,))
        forget_files(identity)

    @property
    def n_unfinished(self) -> int:
        return len(self._requests)

    def submit(self, request_id: str, prompt_token_ids: TokenIds, completions: Sequence[TokenIds]) -> None:
        request = _Request(sums=[0.0] * len(completions), missing=0)
        self._requests[request_id] = request
        for number, token_ids in enumerate(completions):
            if not len(token_ids):
                continue
            sequence = np.concatenate([prompt_token_ids, token_ids])
            if sequence.min() < 0 or sequence.max() >= self._vocab_size:
                request.sums[number] = math.nan  # a fixed policy can have more tokens than the start model
                continue
            request.missing += 1
            self._ask(f"{number} {len(prompt_token_ids)} {request_id}", sequence.tolist())

    def _ask(self, name: str, sequence: list[int]) -> None:
        """The last token is not part of vLLM's prompt, where there would have to be room for one more: it is what vLLM
        has to write, and its log-prob is of the distribution before that was asked."""
        *before, last = sequence
        params = SamplingParams(
            max_tokens=1,
            allowed_token_ids=[last],
            temperature=0.0,  # draws nothing: the engine beside shares the process's generator
            prompt_logprobs=0,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=before), params)

    def step(self) -> Sequence[tuple[str, tuple[float, ...]]]:
        if self._engine.has_unfinished_requests():
            with worker_errors(self._workers):
                outputs = self._engine.step()
            for output in outputs:
                if isinstance(output, RequestOutput) and output.finished:
                    self._take(output)
        done = [request_id for request_id, request in self._requests.items() if not request.missing]
        return [(request_id, tuple(self._requests.pop(request_id).sums)) for request_id in done]

    def _take(self, output: RequestOutput) -> None:
        number, prompt_length, request_id = output.request_id.split(" ", 2)
        request = self._requests[request_id]
        before, last = output.prompt_logprobs, output.outputs[0].logprobs
        assert isinstance(before, FlatLogprobs) and isinstance(last, FlatLogprobs)
        starts = before.start_indices[int(prompt_length) :]  # of each token's own log-prob
        request.sums[int(number)] = math.fsum([*(before.logprobs[start] for start in starts), last.logprobs[0]])
        request.missing -= 1

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _cache_bytes(model: Path, config: VllmEngineConfig, max_length: int) -> int:
    """Of keys and values on each worker: the tokens of a step, and two sequences of the greatest length."""
    _, shape = read_model(model)
    heads = max(1, shape.kv_heads // config.tensor_parallel)
    token_bytes = 2 * shape.num_layers * heads * shape.head_size * _ITEM_BYTES[config.dtype]
    longest = -(-max_length // _BLOCK_TOKENS) * _BLOCK_TOKENS
    return token_bytes * (_STEP_TOKENS + 2 * longest)


class ReferenceWorker:
    """Mixed into vLLM's worker."""

    model_runner: Any
    parallel_config: Any

    def tba_begin(self, temperature: float) -> str:
        """Divide the logits from here on; what the names of this group's files begin with.

        vLLM's log-probs of a prompt know no temperature. The factor is the one that it has for models whose
        configuration scales their logits, applied after everything else that makes logits.
        """
        if self.parallel_config.world_size > 1:
            # As of the engine beside: a process of its own, whose end is its searcher's matter.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            die_with_parent()
        layers = [layer for layer in self.model_runner.model.modules() if isinstance(layer, LogitsProcessor)]
        if len(layers) != 1:
            raise EngineError(
                f"vLLM's {type(self.model_runner.model).__name__} has {len(layers)} places where logits are made, not "
                f"one that could be divided by objective.temperature; set objective.reference.placement to device"
            )
        layers[0].scale /= temperature
        return run_environment().get("VLLM_DIST_IDENT", "")
