"""Where the time of a step goes: by phase of the trainer (Python's profiler), by torch operator, and in the head.

T packed tokens, H hidden.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ranks import Model
from tba_megatron.kernels.linear_logprob import linear_logprob
from tba_megatron.trainer.model import Batch

# Phase -> functions, each as (end of its file, name). None of them calls another of the table.
PHASES = {
    "packing": (("tba_megatron/packing.py", "pack"), ("trainer/model.py", "to_device")),
    "forward and loss": (("pipeline_parallel/schedules.py", "forward_step"),),
    "backward": (("pipeline_parallel/schedules.py", "backward_step"),),
    "gradients to float32 and over ranks": (("distributed/finalize_model_grads.py", "finalize_model_grads"),),
    "gradient norm and clip": (
        ("optimizer/optimizer.py", "get_grad_norm"),
        ("optimizer/clip_grads.py", "clip_grad_by_total_norm_fp32"),
    ),
    "optimizer": (("optimizer/distrib_optimizer.py", "step_with_ready_grads"),),
    "zero gradients": (
        ("distributed/distributed_data_parallel.py", "zero_grad_buffer"),
        ("optimizer/distrib_optimizer.py", "zero_grad"),
    ),
    "statistics": (("trainer/step.py", "_reduce_statistics"),),
}

# Kind -> how the names of torch's operators begin; the first that fits.
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention"),
    "copies and gathers": (
        *("aten::copy_", "aten::cat", "aten::clone", "aten::index", "aten::gather", "aten::embedding", "aten::_index"),
        *("aten::masked_fill", "aten::fill_", "aten::zero_", "aten::slice_backward", "aten::select_backward"),
    ),
    "optimizer": ("aten::_fused_adam", "aten::addcdiv_", "aten::addcmul_", "aten::lerp_", "Optimizer.", "aten::sqrt"),
}


def phases(step: Callable[[], object]) -> dict[str, float]:
    """The share of one step that each phase takes, under Python's profiler; what is left is ``other``."""
    profile = cProfile.Profile()
    profile.runcall(step)
    stats: Any = pstats.Stats(profile)
    seconds = {
        phase: sum(
            row[3]
            for (file, _, name), row in stats.stats.items()
            if any(name == function and file.endswith(end) for end, function in functions)
        )
        for phase, functions in PHASES.items()
    }
    seconds["other"] = stats.total_tt - sum(seconds.values())
    return {phase: round(value / stats.total_tt, 4) for phase, value in seconds.items()}


def operators(step: Callable[[], object], top: int = 10) -> dict[str, Any]:
    """Milliseconds of one step by kind of torch operator, and the ``top`` operators; all without their children.

    ``outside`` is what no operator takes: Python, autograd's bookkeeping, and the profiler itself.
    """
    from torch.profiler import ProfilerActivity, profile

    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
        wall_ms = (time.perf_counter() - started) * 1e3
    by_name = {event.key: event.self_cpu_time_total / 1e3 for event in found.key_averages()}
    kinds: defaultdict[str, float] = defaultdict(float)
    for name, milliseconds in by_name.items():
        kind = next((kind for kind, starts in KINDS.items() if name.startswith(starts)), "the rest of the operators")
        kinds[kind] += milliseconds
    kinds["outside"] = wall_ms - sum(by_name.values())
    largest = sorted(by_name.items(), key=_last)[:top]
    return {
        "kinds_ms": {kind: round(value, 1) for kind, value in sorted(kinds.items(), key=_last)},
        "top_ms": {name: round(value, 1) for name, value in largest},
    }


def head_cpu_s(model: Model, batches: Sequence[Batch]) -> dict[str, float]:
    """CPU seconds that the head takes of a step at one rank, forward and backward, from hidden states to the loss.

    As the trainer computes it, without logits, and as torch's linear and cross entropy do.
    """
    gpt = model.policy.chunks[0]
    weight: Any = gpt.shared_embedding_or_output_weight() if model.shape.tied else gpt.output_layer.weight

    def ours(hidden: Tensor, batch: Batch) -> Tensor:
        rows, head = hidden[:, 0].index_select(0, batch.rows), model.head
        settings = {"temperature": head.temperature, "valid_rows": head.vocab_size, "main_grad": weight.main_grad}
        return linear_logprob(rows, weight, batch.labels, **settings).logprob.sum()

    def of_torch(hidden: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(F.linear(hidden[batch.rows, 0], weight), batch.labels, reduction="sum")

    found = {}
    for name, head in (("this trainer", ours), ("torch", of_torch)):
        hidden_TH = [torch.randn(b.tokens.shape[1], 1, model.shape.hidden_size, requires_grad=True) for b in batches]
        started = time.process_time()
        for hidden, batch in zip(hidden_TH, batches, strict=True):
            head(hidden, batch).backward()
        found[name] = round(time.process_time() - started, 4)
    return found


def _last(item: tuple[str, float]) -> float:
    """Sorts the largest first."""
    return -item[1]
