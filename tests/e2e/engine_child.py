"""Real vLLM engines in a child process, and the sender of weights on this side of the wire.

vLLM starts torch.distributed and sets variables in the process it runs in, so no engine ever runs in the process of
the tests. A test hands the child a function of its module; the child calls it with an engine.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from torch import Tensor

from tba_megatron.config_search import VllmEngineConfig
from tba_megatron.search.engine import InFlight, ReceiveState
from tba_megatron.transport.manifest import Manifest, build_buckets, encode_manifest
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.round import Round, host_store
from tba_megatron.transport.weights import Group, join_group, send_version
from tba_megatron.types import PolicyVersion, TokenIds

VOCAB = 18  # vLLM pads it to 64
MAX_LENGTH = 320  # two blocks of vLLM's cache on CPU, and some
LIMIT_S = 240.0  # only against a hang
TIMEOUT_S = 20.0
FIRST = PolicyVersion(0, 0)


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine that the child builds when it is first used; its folder may come later than the child."""

    folder: Path
    behaviour_logprobs: bool = False
    in_flight: InFlight = "recompute"
    tensor_parallel: int = 1


def hf_model(*, tied: bool, seed: int):
    """A Qwen2 of 18 tokens with heads of 32; weights wide enough that two seeds differ by whole nats."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 1, 0, None
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def family_model(kind: str, *, tied: bool, seed: int):
    """A tiny model of any family, with heads of 32: vLLM's attention on CPU knows no smaller ones."""
    heads = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": MAX_LENGTH}
    sizes = {
        "gpt2": {"n_embd": 64, "n_head": 2, "n_positions": MAX_LENGTH},
        "gpt_neox": heads,
        "llama": {**heads, "num_key_value_heads": 1},
        # As many key-value heads as the largest tensor-parallel size, and fewer than query heads.
        "qwen2": {**heads, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
        # Heads of a size of their own: two of them are wider than the hidden size.
        "qwen3": {**heads, "num_key_value_heads": 1, "head_dim": 64},
    }[kind]
    return tiny.hf_model(kind, tied=tied, seed=seed, **sizes)


def named_tensors(model) -> list[tuple[str, Tensor]]:
    """What a trainer sends: every parameter once, the head of a tied model never."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@torch.no_grad()
def hf_logprobs(model, sequence: TokenIds, temperature: float = 1.0) -> np.ndarray:
    """log p of each token given those before it, in one forward without a cache; [T - 1]."""
    ids = torch.from_numpy(sequence.astype(np.int64))
    logprobs = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, -1)
    return logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()


class EngineChild:
    """Owns the process. ``call`` runs ``function(engine, *args)`` there; what it raises is raised here."""

    def __init__(self, specs: dict[str, EngineSpec]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, specs))  # no daemon: it may start workers
        self._process.start()
        theirs.close()

    def call(self, engine: str, function: Callable[..., Any], *args: Any) -> Any:
        self._connection.send((engine, function, args))
        if not self._connection.poll(LIMIT_S):
            self._process.kill()  # a late answer would be taken for that of the next call
            raise AssertionError(f"{function.__name__} did not end within {LIMIT_S} s")
        error, where, result = self._connection.recv()
        if error is not None:
            error.add_note(where)
            raise error
        return result

    def close(self) -> None:
        if not self._connection.closed:
            self._process.kill()  # it has nothing to save
            self._process.join()
        self._connection.close()


def _serve(connection: Connection, specs: dict[str, EngineSpec]) -> None:
    from tba_megatron.dist import prepare_searcher_environment

    prepare_searcher_environment(threads=1)
    torch.set_num_threads(1)
    engines: dict[str, Any] = {}
    while True:
        try:
            name, function, args = connection.recv()
        except EOFError:
            return
        try:
            if name not in engines:
                engines[name] = _build(specs[name])
            connection.send((None, "", function(engines[name], *args)))
        except Exception as error:
            connection.send((error, traceback.format_exc(), None))


def _build(spec: EngineSpec):
    from tba_megatron.search.vllm_engine import VllmEngine

    return VllmEngine(
        spec.folder,
        VllmEngineConfig(max_sequences=64, kv_cache_bytes=32 << 20, tensor_parallel=spec.tensor_parallel),
        version=FIRST,
        max_length=MAX_LENGTH,
        seed=0,
        behaviour_logprobs=spec.behaviour_logprobs,
        in_flight=spec.in_flight,
    )


# ---- called in the child


def begin(engine, offer: Offer) -> None:
    engine.begin_receive(offer, TIMEOUT_S)


def wait_for(engine, *states: ReceiveState) -> tuple[ReceiveState, str]:
    """The first of ``states`` that a receive reaches, with its reason."""
    deadline = time.monotonic() + LIMIT_S / 2
    while time.monotonic() < deadline:
        status = engine.poll_receive()
        if status.state in (*states, ReceiveState.FAILED):
            return status.state, status.reason
        time.sleep(0.002)
    raise AssertionError(f"{status.state} after {LIMIT_S / 2} s, not {states}")


def apply(engine) -> None:
    engine.apply()


def version_of(engine) -> PolicyVersion:
    return engine.version


def load(engine, version: PolicyVersion, tensors: Sequence[tuple[str, Tensor]]) -> bool:
    """Apply ``tensors`` as if they were staged, at tensor parallel 1; whether it went by a plan.

    What was staged is overwritten afterwards, as the next version would.
    """
    worker = engine._engine.model_executor.driver_worker.worker.weight_transfer_engine
    staged = [(name, tensor.clone()) for name, tensor in tensors]
    take, worker.receiver.take = worker.receiver.take, lambda: (None, staged)
    engine._receiving = version
    try:
        engine.apply()
    finally:
        worker.receiver.take = take
    for _, tensor in staged:
        tensor.fill_(float("nan"))
    return worker.plan is not None


def score(engine, sequences: Sequence[TokenIds]) -> list[np.ndarray]:
    return engine.score(sequences)


# ---- the sender


class Sender:
    """Rank 0 of the broadcast groups, as the trainer is. Versions go to one engine of the child."""

    def __init__(self, child: EngineChild, engine: str, workers: int = 1) -> None:
        self.child, self.engine, self.workers = child, engine, workers
        self._store = None
        self._port = 0
        self._epoch = -1
        self.group: Group | None = None

    def new_epoch(self) -> None:
        """The next version goes through a new group."""
        self.close()
        # One number for all senders: two epochs of an engine are never equal.
        self._epoch = time.monotonic_ns()
        self._store, self._port = host_store("127.0.0.1", TIMEOUT_S)

    def offer(self, manifest: Manifest) -> Offer:
        number = time.monotonic_ns()
        assert self._store is not None
        Round(self._store, number, self._epoch, TIMEOUT_S).open()
        return Offer(
            version=manifest.version,
            manifest=encode_manifest(manifest),
            round=number,
            epoch=self._epoch,
            host="127.0.0.1",
            port=self._port,
            rank=1,
            world_size=1 + self.workers,
            backend="gloo",
        )

    def join(self) -> Group:
        if self.group is None:
            self.group = join_group(
                host="127.0.0.1",
                port=self._port,
                epoch=self._epoch,
                rank=0,
                world_size=1 + self.workers,
                backend="gloo",
                timeout_s=TIMEOUT_S,
            )
        return self.group

    def post(self, manifest: Manifest) -> Group:
        """Offer, join, and wait until the receiver waits for the first bucket."""
        self.child.call(self.engine, begin, self.offer(manifest))
        group = self.join()
        state, reason = self.child.call(self.engine, wait_for, ReceiveState.POSTED)
        assert state is ReceiveState.POSTED, reason
        return group

    def stage(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
    ) -> tuple[ReceiveState, str]:
        """Send a version into staging; how the receive ended."""
        manifest, buckets = build_buckets(version, tensors, bucket_bytes, owner=0)
        send_version(self.post(manifest), manifest, buckets)
        return self.child.call(self.engine, wait_for, ReceiveState.STAGED)

    def publish(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = 64 << 20
    ) -> None:
        state, reason = self.stage(version, tensors, bucket_bytes)
        assert state is ReceiveState.STAGED, reason
        self.child.call(self.engine, apply)

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = self._store = None


def started_engines(models: dict, tmp_path_factory, **specs: dict[str, Any]) -> Iterator[EngineChild]:
    """A child with one engine a model, for a fixture to yield from; ``specs`` are fields of ``EngineSpec`` by name."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    child = EngineChild({name: EngineSpec(folder=folder / name, **specs.get(name, {})) for name in models})
    yield child
    child.close()
