"""DistributedOptimizer checkpoints of buffers with several buckets: a tied embedding on more than one pipeline stage.

Upstream symbol: megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_param_state_fully_reshardable.
Versions: 0.16.1.
Why: the tensor it cuts parameters from has no padding between buckets (``get_parameter_state_dp_zero``), but it cuts at
    positions of the buffer, which has. A tied embedding on several stages has a bucket of its own, so it is saved
    shifted by up to 127 elements, with zeros at its end, and a resume trains on with a broken embedding. Upstream only
    logs a warning.
Effect: while the state is cut, positions are those without padding. Checkpoints of one bucket do not change.
Test: tests/dist/test_checkpoint.py (a resume on two stages with tied embeddings is exact).
Delete when: upstream's warning "param range exceeds unpadded buffer" can no longer happen.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any


def apply() -> bool:
    """Patch the class once."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    base: Any = DistributedOptimizer
    if getattr(base, "_tba_bucket_padding", False):
        return True
    cut = base.sharded_param_state_fully_reshardable

    def patched_cut(self, *args, **kwargs):
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _without_padding(buffer)
            return cut(self, *args, **kwargs)
        finally:
            for buffer, index_map in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = index_map

    base.sharded_param_state_fully_reshardable = patched_cut
    base._tba_bucket_padding = True
    return True


def _without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """(start, end, bucket) of each parameter where the padding at the end of each bucket is left out."""
    paddings = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = [0, *accumulate(paddings)]
    return {
        parameter: (start - before[bucket], end - before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }
