"""Changes to Megatron-Core, one small file a change. Nothing happens on import.

``apply()`` is the first line of each trainer entry point, before any import of ``megatron``. Each file has a header:
upstream symbol, versions, why, effect, its test, and when to delete it.
"""

import importlib.metadata
import logging

TESTED = "0.16.1"

_log = logging.getLogger(__name__)


def apply() -> tuple[str, ...]:
    """Apply every change that this machine needs; returns their names and logs them. Calling it again is harmless.

    RuntimeError when Megatron-Core is another version than the one the changes were written for, or was already
    imported without the CPU names.
    """
    version = importlib.metadata.version("megatron-core")
    if version != TESTED:
        raise RuntimeError(f"megatron-core is {version}, but megatron_patches is written for {TESTED}")
    import torch

    from megatron_patches import bucket_padding, cpu, torch_adamw

    done = []
    if not torch.cuda.is_available():
        cpu.install()
        done.append("cpu")
    if torch_adamw.apply():
        done.append("torch_adamw")
    if bucket_padding.apply():
        done.append("bucket_padding")
    _log.info("megatron-core %s with patches: %s", version, ", ".join(done) or "none")
    return tuple(done)
