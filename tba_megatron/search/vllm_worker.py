"""The part that lives in each vLLM worker: the weight-transfer backend ``tba`` and the calls that drive it.

vLLM imports this module in every worker before it loads the model, because ``worker_extension_cls`` names
``WorkerExtension``; that registers the backend. Written for vLLM 0.32 (WeightTransferEngine of 0.25 and later).
"""

from __future__ import annotations

import gc
import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tba_megatron.dist import die_with_parent, prepare_weight_groups, run_environment
from tba_megatron.models.hf_folder import list_tensors
from tba_megatron.search.receiver import Receiver
from tba_megatron.search.vllm_reload import ReloadPlan, Unplannable, plan_reload
from tba_megatron.transport.messages import Offer

BACKEND = "tba"

_log = logging.getLogger(__name__)


@dataclass
class TbaInitInfo(WeightTransferInitInfo):
    """Nothing: groups are formed by ``WorkerExtension.tba_begin_receive``, version by version."""


@dataclass
class TbaUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: what is loaded is what lies in staging."""


class TbaWeightTransferEngine(WeightTransferEngine[TbaInitInfo, TbaUpdateInfo]):
    """Loads a staged version in one go; the wire is not touched between start and finish.

    On a CPU by a plan, where the model allows one; else layer by layer, as vLLM does.
    """

    init_info_cls = TbaInitInfo
    update_info_cls = TbaUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._alone = vllm_config.parallel_config.world_size > 1
        if self._alone:
            # A process of its own, which lives as long as its searcher. Signals to their group are the searcher's
            # matter: it still takes steps then, to leave with nothing in the engine.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            die_with_parent()
        prepare_weight_groups()  # the engine's own groups are there
        tied = vllm_config.model_config.hf_config.tie_word_embeddings
        dtype: torch.dtype = vllm_config.model_config.dtype
        shapes = _shapes(Path(vllm_config.model_config.model), tied=tied)
        self.plan = _plan(model, shapes, dtype) if device.type == "cpu" else None
        text = str(dtype).removeprefix("torch.")
        self.receiver = Receiver(device, {name: (shape, text) for name, shape in shapes.items()})

    def init_transfer_engine(self, init_info: TbaInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.plan is None:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base's: it synchronizes an accelerator, which raises on a CPU build (0.32).
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TbaUpdateInfo) -> None:
        _, tensors = self.receiver.take()
        if self.plan is None:
            self.model.load_weights(iter(tensors))  # type: ignore[operator]
        else:
            self.plan.run(dict(tensors))

    def finish_weight_update(self) -> None:
        if self.plan is None:
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """On CPU a tied head has a packed copy of its own, which the layerwise reload leaves as it was (0.32).

        Where a model keeps its embedding differs by family, so the head is known by the memory that it shares.
        """
        tables = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        heads = [layer for layer in tables if isinstance(layer, ParallelLMHead)]
        shared = {_address(layer) for layer in tables if layer not in heads}
        for head in heads:
            if _address(head) in shared:
                head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self.receiver.close()
        if self._alone:
            gc.freeze()  # this process ends: to look for garbage first takes seconds


def _shapes(folder: Path, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """What a trainer sends: every tensor of the model's folder, the head of a tied model never."""
    shapes = {name: stored.shape for name, stored in list_tensors(folder).items()}
    if tied:
        shapes.pop("lm_head.weight", None)
    return shapes


def _plan(model: torch.nn.Module, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> ReloadPlan | None:
    arriving = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    try:
        return plan_reload(model, arriving)
    except Unplannable as reason:
        _log.warning("new weights are loaded layer by layer, which takes some times as long: %s", reason)
        return None


def _address(layer: torch.nn.Module) -> int:
    return layer.get_parameter("weight").data_ptr()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, TbaWeightTransferEngine)


class WorkerExtension:
    """Mixed into vLLM's worker. Arguments and results are plain, so calls work in this process and in others."""

    weight_transfer_engine: TbaWeightTransferEngine
    rank: int

    def tba_begin_receive(self, offer: bytes, timeout_s: float) -> None:
        decoded = msgspec.msgpack.decode(offer, type=Offer)
        self.weight_transfer_engine.receiver.begin(decoded, self.rank, timeout_s)

    def tba_poll_receive(self) -> tuple[str, str]:
        status = self.weight_transfer_engine.receiver.poll()
        return status.state.value, status.reason

    def tba_apply(self) -> None:
        """The three parts of a weight update of vLLM's worker, in one call."""
        self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights({})  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]

    def tba_identity(self) -> str:
        """What the names of this group's files in /dev/shm and in the folder of temporary files begin with."""
        return run_environment().get("VLLM_DIST_IDENT", "")
