"""What the roles share at their start."""

from __future__ import annotations

import logging
import warnings


def start_logging() -> None:
    """One plain line a record on stderr; the chatter of libraries at its start is left out."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S", force=True)
    for noisy in ("megatron", "transformers", "vllm", "torch", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
