"""Which back end computes a kernel: plain torch anywhere, Triton on CUDA devices."""

from __future__ import annotations

from typing import Literal

import torch

from tba_megatron.errors import KernelError

Impl = Literal["auto", "torch", "triton"]


def uses_triton(op: str, impl: Impl, device: torch.device) -> bool:
    """Whether ``op`` computes tensors on ``device`` with Triton; ``auto`` does so for CUDA tensors.

    Raises KernelError where Triton is asked for and not installed, or cannot read the tensors; its interpreter
    (TRITON_INTERPRET=1) reads any.
    """
    if impl not in ("auto", "torch", "triton"):
        raise KernelError(f"{op}: impl is {impl!r}; it must be auto, torch or triton")
    if impl == "torch" or (impl == "auto" and device.type != "cuda"):
        return False
    try:
        import triton
    except ModuleNotFoundError as error:
        raise KernelError(f"{op}: impl triton needs the package {error.name}; install it or use torch") from None
    if device.type != "cuda" and not triton.knobs.runtime.interpret:  # type: ignore[attr-defined]
        raise KernelError(f"{op}: impl triton needs CUDA tensors, these are on {device.type}; use torch or auto")
    return True
