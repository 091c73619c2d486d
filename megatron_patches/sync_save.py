"""Checkpoints that are saved at once need no manager process.

Upstream symbol: megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue.
Versions: 0.16.1.
Why: the first save of each rank spawns a Python process that holds one queue for background saves. It imports torch
    again (seconds, hundreds of MB a rank), and it dies of the SIGTERM that Slurm sends to all processes of a job, so
    the save that the signal asks for fails.
Effect: the queue lives in the rank. Saves in the background (``async_sharded_save``) do not work; we make none.
Test: tests/dist/test_checkpoint.py (a save leaves no process behind).
Delete when: upstream takes a plain queue for synchronous saves.
"""

from __future__ import annotations

import queue
from typing import Any


def apply() -> bool:
    """Put a plain queue in the place of the one that would be made on demand."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    module: Any = filesystem_async
    if module._results_queue is None:
        module._results_queue = queue.Queue()
    return True
