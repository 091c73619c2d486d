"""vLLM as an engine: its step loop runs in this process, weights are applied between two steps.

``dist.prepare_searcher_environment`` must have run before this module is imported. T tokens of a sequence.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from vllm import EngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from tba_megatron.config_sections import VllmEngineConfig
from tba_megatron.errors import EngineError
from tba_megatron.search.engine import ReceiveState, ReceiveStatus
from tba_megatron.transport.messages import Offer
from tba_megatron.types import (
    Completion,
    Floats,
    PolicySpan,
    PolicyVersion,
    SamplingSettings,
    StopReason,
    TokenIds,
)

_STOP_REASONS = {
    "stop": StopReason.EOS,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
    "error": StopReason.ABORT,
}


class VllmEngine:
    """A ``SearchEngine`` over vLLM's LLMEngine, for token ids only.

    Its log-probs, where asked for, are those of the sampled distribution (after temperature and top-p).
    """

    def __init__(
        self,
        model: Path,
        config: VllmEngineConfig,
        *,
        version: PolicyVersion,
        max_length: int,
        seed: int,
        behaviour_logprobs: bool = False,
    ) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                generation_config="vllm",  # nothing of the folder's own sampling defaults
                dtype=config.dtype,
                enforce_eager=True,
                max_model_len=max_length,
                max_num_seqs=config.max_sequences,
                max_num_batched_tokens=max(max_length, 16 * config.max_sequences),
                kv_cache_memory_bytes=config.kv_cache_bytes,
                seed=seed,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                weight_transfer_config=WeightTransferConfig(backend="tba"),  # type: ignore[arg-type]
                worker_extension_cls="tba_megatron.search.vllm_worker.WorkerExtension",
            )
        )
        self._behaviour_logprobs = behaviour_logprobs
        self._max_length = max_length
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._parallel = self._engine.vllm_config.parallel_config
        self._unfinished: set[str] = set()
        self._receiving: PolicyVersion | None = None
        self._set_version(version)
        gc.collect()
        gc.freeze()  # the model's objects live for ever: the collector need not look at them again

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def n_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def workers(self) -> int:
        return self._parallel.world_size

    def submit(self, request_id: str, prompt_token_ids: TokenIds, sampling: SamplingSettings) -> None:
        """EngineError for a prompt that vLLM would refuse: empty, too long, or with ids outside the vocabulary."""
        ids = prompt_token_ids.tolist()
        if not 0 < len(ids) < self._max_length:
            raise EngineError(
                f"prompt of request {request_id} has {len(ids)} tokens; it must have 1 to {self._max_length - 1}"
            )
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise EngineError(
                f"prompt of request {request_id} has token ids outside 0..{self._vocab_size - 1}; the task's "
                f"tokenizer is not the model's"
            )
        self._engine.add_request(request_id, {"prompt_token_ids": ids}, self._sampling(sampling))
        self._unfinished.add(request_id)

    def _sampling(self, sampling: SamplingSettings) -> SamplingParams:
        return SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.eos_ids),
            ignore_eos=True,  # of config.json: ``eos_ids`` alone say what ends a completion
            seed=sampling.seed,
            logprobs=0 if self._behaviour_logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> Sequence[tuple[str, tuple[Completion, ...]]]:
        finished = []
        for output in self._engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished and output.request_id in self._unfinished:
                self._unfinished.discard(output.request_id)
                samples = sorted(output.outputs, key=lambda sample: sample.index)
                finished.append((output.request_id, tuple(self._completion(s) for s in samples)))
        return finished

    def abort_all(self) -> None:
        self._engine.abort_request(list(self._unfinished))
        self._unfinished.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _completion(self, output: CompletionOutput) -> Completion:
        token_ids = np.array(output.token_ids, np.int32)
        spans = tuple(
            PolicySpan(version=PolicyVersion.parse(span.version), start=span.start, end=span.end)
            for span in output.weight_versions or ()
            if span.end > span.start
        )
        if not spans:
            spans = (PolicySpan(version=self._version, start=0, end=len(token_ids)),)
        logprobs = None
        if self._behaviour_logprobs and output.logprobs is not None:
            taken = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = np.array([entry[token].logprob for token, entry in taken if entry], np.float32)
        return Completion(
            token_ids=token_ids,
            stop_reason=_STOP_REASONS[output.finish_reason or "abort"],
            spans=spans,
            behaviour_logprobs=logprobs,
        )

    def score(self, sequences: Sequence[TokenIds]) -> list[Floats]:
        """log p of each token given those before it, at temperature 1 in nats; [T - 1] a sequence.

        Only while nothing else is in the engine. A sequence needs 2 tokens and room for one more.
        """
        if self._unfinished:
            raise EngineError(f"score needs an idle engine, but {len(self._unfinished)} requests are in it")
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
        for i, ids in enumerate(sequences):
            self._engine.add_request(f"score-{i}", {"prompt_token_ids": ids.tolist()}, params)
        scores: dict[str, Floats] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    assert isinstance(output, RequestOutput) and output.prompt_token_ids is not None
                    entries = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
                    values = [
                        entry[token].logprob if entry and token is not None else math.nan for token, entry in entries
                    ]
                    scores[output.request_id] = np.array(values, np.float32)
        return [scores[f"score-{i}"] for i in range(len(sequences))]

    # ---- weights

    def begin_receive(self, offer: Offer, timeout_s: float) -> None:
        self._receiving = PolicyVersion.parse(offer.version)
        self._engine.collective_rpc("tba_begin_receive", args=(msgspec.msgpack.encode(offer), timeout_s))

    def poll_receive(self) -> ReceiveStatus:
        """The state of the worker that is furthest behind, or of the first that failed."""
        statuses = [
            ReceiveStatus(state=ReceiveState(state), reason=reason)
            for state, reason in self._engine.collective_rpc("tba_poll_receive")
        ]
        order = (ReceiveState.FAILED, ReceiveState.NONE, ReceiveState.JOINING, ReceiveState.POSTED)
        for state in order:
            for status in statuses:
                if status.state is state:
                    return status
        return statuses[0]

    def apply(self) -> None:
        assert self._receiving is not None
        try:
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", args=({},))
            self._engine.collective_rpc("finish_weight_update")
        except (RuntimeError, ValueError, AssertionError) as error:
            # Layers are half loaded and cannot be trusted: this process has to start again.
            raise EngineError(f"version {self._receiving} could not be loaded: {error}") from error
        self._set_version(self._receiving)
        self._receiving = None
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("the prefix cache could not be reset after new weights")

    def _set_version(self, version: PolicyVersion) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def close(self) -> None:
        self._engine.collective_rpc("shutdown_weight_transfer_engine")
