"""vLLM as an engine: its step loop runs in this process, weights are applied between two steps.

``dist.prepare_searcher_environment`` must have run before this module is imported. T tokens of a sequence.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllm import EngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from tba_megatron.config_search import VllmEngineConfig
from tba_megatron.errors import EngineError
from tba_megatron.search.engine import InFlight, ReceiveState, ReceiveStatus
from tba_megatron.search.vllm_scheduler import SearchScheduler
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
RPC_LIMIT_S = 120.0  # a worker that answers later than that hangs

LOGPROBS_MODE = "processed_logprobs"  # of the distribution that was sampled, after temperature and top-p

Finished = tuple[str, tuple[Completion, ...]]


class VllmEngine:
    """A ``SearchEngine`` over vLLM's LLMEngine, for token ids only.

    Its log-probs, where asked for, are those of the sampled distribution (after temperature and top-p). With more than
    one worker, the workers are processes of their own, which end with this one.
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
        in_flight: InFlight = "recompute",
    ) -> None:
        workers = config.tensor_parallel
        arguments = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            generation_config="vllm",  # nothing of the folder's own sampling defaults
            dtype=config.dtype,
            enforce_eager=True,
            max_model_len=max_length,
            max_num_seqs=config.max_sequences + 1,  # one is kept free for what is to be scored
            max_num_active_seqs=config.max_sequences,
            max_num_batched_tokens=max(max_length, 16 * config.max_sequences),
            tensor_parallel_size=workers,
            distributed_executor_backend="mp" if workers > 1 else "uni",
            scheduler_cls="tba_megatron.search.vllm_scheduler.SearchScheduler",
            kv_cache_memory_bytes=config.kv_cache_bytes,
            seed=seed,
            logprobs_mode=LOGPROBS_MODE,
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend="tba"),  # type: ignore[arg-type]
            worker_extension_cls="tba_megatron.search.vllm_worker.WorkerExtension",
        )
        self._engine = start_engine(arguments, model, "search.engine")
        if behaviour_logprobs:
            check_logprobs_mode(self._engine.model_config.logprobs_mode)
        self._behaviour_logprobs = behaviour_logprobs
        self._max_length = max_length
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._parallel = self._engine.vllm_config.parallel_config
        self._in_flight = in_flight
        self._unfinished: set[str] = set()
        self._held: list[Finished] = []  # finished while something was scored
        self._scored = 0
        self._paused_s = self._recompute_s = 0.0
        self._receiving: PolicyVersion | None = None
        self._set_version(version)
        forget_files(self._call("tba_identity")[0])
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

    @property
    def paused_s(self) -> float:
        return self._paused_s

    @property
    def recompute_s(self) -> float:
        return self._recompute_s

    @property
    def _scheduler(self) -> SearchScheduler:
        return self._engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]

    def _prompt(self, token_ids: list[int]) -> TokensPrompt:
        if self._in_flight != "keep_kv":
            return TokensPrompt(prompt_token_ids=token_ids)
        # Keys and values of older weights live on: the cache serves those of equal salt alone.
        return TokensPrompt(prompt_token_ids=token_ids, cache_salt=str(self._version))

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
        self._engine.add_request(request_id, self._prompt(ids), self._sampling(sampling))
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

    def step(self) -> Sequence[Finished]:
        finished, self._held = self._held, []
        for output in self._step():
            if output.finished and output.request_id in self._unfinished:
                finished.append((output.request_id, self._completions(output)))
        self._unfinished.difference_update(request_id for request_id, _ in finished)
        return finished

    def _step(self) -> list[RequestOutput]:
        """One step of vLLM. Of its time, the share of the tokens that are computed again is ``recompute_s``."""
        started_s = time.monotonic()
        with worker_errors(self.workers):
            outputs = self._engine.step()
        scheduler = self._scheduler
        if scheduler.n_recomputed:
            self._recompute_s += (time.monotonic() - started_s) * scheduler.n_recomputed / scheduler.n_scheduled
        return outputs  # type: ignore[return-value]

    def abort_all(self) -> None:
        self._engine.abort_request(list(self._unfinished))
        self._unfinished.clear()
        self._held.clear()
        while self._engine.has_unfinished_requests():
            self._step()

    def _completions(self, output: RequestOutput) -> tuple[Completion, ...]:
        return tuple(self._completion(sample) for sample in sorted(output.outputs, key=lambda sample: sample.index))

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

        Nothing of them comes from cached keys and values. Requests go on meanwhile, a step or two for each sequence;
        what finishes comes out of the next ``step``. A sequence needs 2 tokens and room for one more.
        """
        return [self._score(ids) for ids in sequences]

    def _score(self, sequence: TokenIds) -> Floats:
        self._scored += 1
        name = f"score {self._scored}"
        # ``prompt_logprobs`` makes vLLM compute the whole prompt, whatever its cache holds.
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
        scored: RequestOutput | None = None
        with self._scheduler.first(self._engine.add_request(name, self._prompt(sequence.tolist()), params)):
            while scored is None:
                for output in self._step():
                    if output.finished and output.request_id == name:
                        scored = output
                    elif output.finished and output.request_id in self._unfinished:
                        self._held.append((output.request_id, self._completions(output)))
        assert scored.prompt_token_ids is not None and scored.prompt_logprobs is not None
        taken = zip(scored.prompt_token_ids[1:], scored.prompt_logprobs[1:], strict=True)
        return np.array([entry[token].logprob if entry else math.nan for token, entry in taken], np.float32)

    # ---- weights

    def begin_receive(self, offer: Offer, timeout_s: float) -> None:
        self._receiving = PolicyVersion.parse(offer.version)
        self._call("tba_begin_receive", msgspec.msgpack.encode(offer), timeout_s)

    def poll_receive(self) -> ReceiveStatus:
        """The state of the worker that is furthest behind, or of the first that failed."""
        statuses = [
            ReceiveStatus(state=ReceiveState(state), reason=reason) for state, reason in self._call("tba_poll_receive")
        ]
        order = (ReceiveState.FAILED, ReceiveState.NONE, ReceiveState.JOINING, ReceiveState.POSTED)
        for state in order:
            for status in statuses:
                if status.state is state:
                    return status
        return statuses[0]

    def apply(self) -> None:
        assert self._receiving is not None
        if self._in_flight == "drain" and self._unfinished:
            raise EngineError(
                f"version {self._receiving} cannot be applied while {len(self._unfinished)} requests are in the "
                f"engine; search.in_flight is drain"
            )
        started_s = time.monotonic()
        try:
            self._engine.collective_rpc("tba_apply", timeout=RPC_LIMIT_S)
        except (RuntimeError, ValueError, AssertionError, KeyError, TimeoutError) as error:
            # Layers are half loaded and cannot be trusted: this process has to start again.
            raise EngineError(f"version {self._receiving} could not be loaded: {error}") from error
        self._set_version(self._receiving)
        self._receiving = None
        self._leave_old_cache()
        self._paused_s += time.monotonic() - started_s

    def _leave_old_cache(self) -> None:
        """Nothing that begins from here on reads keys and values of the old weights."""
        if self._in_flight == "keep_kv":
            self._scheduler.salt_waiting(str(self._version))
        elif not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("the prefix cache could not be reset after new weights")

    def _set_version(self, version: PolicyVersion) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def _call(self, method: str, *args: Any) -> list[Any]:
        """``method`` of every worker, in their order."""
        with worker_errors(self.workers):
            return self._engine.collective_rpc(method, timeout=RPC_LIMIT_S, args=args)

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def check_logprobs_mode(mode: str) -> None:
    """EngineError where an engine would give others than those of what it sampled: every ratio would be wrong."""
    if mode != LOGPROBS_MODE:
        raise EngineError(
            f"vLLM runs with logprobs_mode {mode}, not {LOGPROBS_MODE}, so its log-probs are not those of what it "
            f"sampled; set search.behaviour_logprobs to false"
        )


def start_engine(arguments: EngineArgs, model: Path, what: str) -> LLMEngine:
    """EngineError where vLLM refuses ``what`` they ask for."""
    try:
        return LLMEngine.from_engine_args(arguments)
    except ValueError as error:
        said = " ".join(str(error).split())[:300]
        raise EngineError(f"vLLM refuses {what} for the model in {model}: {said}") from error


@contextmanager
def worker_errors(workers: int) -> Iterator[None]:
    """A worker process that died or hangs is an EngineError; without such processes errors are as they come."""
    try:
        yield
    except (RuntimeError, TimeoutError, AssertionError, OSError, AttributeError) as error:
        if workers == 1:
            raise
        raise EngineError(
            f"a worker of the engine died or hangs ({type(error).__name__}: {error}); this searcher has to be "
            f"started again"
        ) from error


def forget_files(identity: str) -> None:
    """Unlink the files by which the workers have met, which begin with it: however they end, nothing is left of them.

    Their memory in /dev/shm lives for as long as a worker has it mapped. What this process has there is unlinked by
    Python's resource tracker, which outlives it.
    """
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for path in folder.iterdir() if identity and folder.is_dir() else ():
            if path.name.startswith(identity):
                path.unlink(missing_ok=True)
