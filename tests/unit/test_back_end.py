"""Which back end computes a kernel, and what is said where Triton cannot."""

import sys

import pytest
import torch

from tba_megatron.errors import KernelError
from tba_megatron.kernels.back_end import uses_triton
from tba_megatron.kernels.balance import balance
from tba_megatron.kernels.linear_logprob import linear_logprob


def ops(impl):
    """Both public ops on CPU tensors."""
    zeros, index = torch.zeros(1), torch.zeros(1, dtype=torch.long)
    terms = {"reward_over_beta": zeros, "copies": zeros, "reference_sums": zeros}
    return {
        "linear_logprob": lambda: linear_logprob(torch.zeros(1, 2), torch.zeros(3, 2), index, impl=impl),
        "balance": lambda: balance(zeros, index, index, n_groups=1, scale=1.0, impl=impl, **terms),
    }


def test_triton_is_for_cuda_devices_and_torch_for_all_others():
    pytest.importorskip("triton", reason="triton is not installed")
    assert [uses_triton("op", "auto", torch.device(device)) for device in ("cpu", "cuda", "meta")] == [
        False,
        True,
        False,
    ]
    assert not uses_triton("op", "torch", torch.device("cuda"))
    assert uses_triton("op", "triton", torch.device("cuda"))


@pytest.mark.parametrize("op", ops("auto"))
def test_triton_on_a_cpu_is_one_line(op):
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(KernelError, match=f"^{op}: impl triton needs CUDA tensors, these are on cpu") as error:
        ops("triton")[op]()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("op", ops("auto"))
def test_triton_that_is_not_installed_is_one_line_and_only_where_it_is_asked_for(op, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    ops("auto")[op]()
    with pytest.raises(KernelError, match=f"^{op}: impl triton needs the package triton; install it or use torch"):
        ops("triton")[op]()


@pytest.mark.parametrize("op", ops("auto"))
def test_another_back_end_is_one_line(op):
    with pytest.raises(KernelError, match=f"^{op}: impl is 'cuda'; it must be auto, torch or triton"):
        ops("cuda")[op]()
