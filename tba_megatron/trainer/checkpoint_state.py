"""What a checkpoint holds of the policy: Megatron's sharded state dict."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from tba_megatron.trainer.model import Policy

LOG_Z = "log_z.npz"  # a file of its own: it is the same on all ranks, and no part of the model

METADATA = {
    # The one optimizer format that loads at other parallel sizes with torch.optim.AdamW (0.16.1).
    "distrib_optim_sharding_type": "fully_reshardable",
    # Its state is gathered over gloo, on the rank that writes it, instead of on every replica.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}

# The optimizer's tensors: gathered into buffers that nobody else knows (get_parameter_state_dp_zero, 0.16.1).
GATHERED = "optimizer.state."


def policy_to_save(policy: Policy) -> dict[str, Any]:
    """Model, optimizer, schedule and RNG as Megatron shards them; a collective over all ranks.

    Tensors are the living ones, except under ``GATHERED``: copy them before the next step. ``content_metadata`` is what
    ``dist_checkpointing.save`` of 0.16.1 would add.
    """
    return {
        **_model_and_optimizer(policy, loading=False),
        "scheduler": policy.scheduler.state_dict(),
        "rng": _rng(_rng_state()),
        "content_metadata": METADATA,
    }


def policy_to_load(policy: Policy, saved_keys: Container[str]) -> dict[str, Any]:
    """The request for what ``policy_to_save`` saved, at this run's parallel sizes; a collective over all ranks."""
    wanted = _model_and_optimizer(policy, loading=True)
    rng = _rng(None)
    # Saved for each place in a tp x pp grid. At other sizes a rank goes on with its own: nothing draws from it while
    # dropout is 0.
    return {**wanted, "rng": rng} if rng.unique_key in saved_keys else wanted


def load_into(policy: Policy, loaded: dict[str, Any]) -> None:
    """Take over what ``dist_checkpointing.load`` returned."""
    load_model(policy.chunks, loaded)
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.scheduler.load_state_dict(loaded["scheduler"])
    if (rng := loaded.get("rng")) is not None:
        torch.set_rng_state(rng["torch"])
        _tracker().set_states(rng["tracker"])
        if "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])


def model_to_load(chunks: Sequence[GPTModel]) -> dict[str, Any]:
    """The model's part of what is saved, chunk by chunk."""
    return {f"model{i}": chunk.sharded_state_dict(metadata=METADATA) for i, chunk in enumerate(chunks)}


def load_model(chunks: Sequence[GPTModel], loaded: Mapping[str, Any]) -> None:
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])


def _model_and_optimizer(policy: Policy, *, loading: bool) -> dict[str, Any]:
    model = model_to_load(policy.chunks)
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA)
    if optimizer.get("param_state", ...) is None:  # where nothing was gathered; Megatron would warn of a difference
        del optimizer["param_state"]
    return {**model, "optimizer": optimizer}


def _rng_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "tracker": _tracker().get_states()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _tracker() -> CudaRNGStatesTracker:
    """The streams of tensor-parallel ranks."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    return tracker


def _rng(state: dict[str, Any] | None) -> ShardedObject:
    """One for each tensor and pipeline rank; replicas draw the same."""
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    place = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    return ShardedObject("rng", state, sizes, place, replica_id=parallel_state.get_data_parallel_rank())
