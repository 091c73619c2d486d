"""Every Triton kernel of the project, compiled for an H100 or H200 (sm_90) as a launch there would, without a GPU.

The launchers are called as they are; a stand-in for Triton's driver makes each launch end after the compiler. So what
is compiled has the types, the alignments and the options of a real launch, and what ptxas says of it is what would run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tba_megatron.kernels
from tba_megatron.kernels.torch_rows import Upstream, new_statistics

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

META = torch.device("meta")  # tensors of any size that take no memory; Triton counts them as aligned
MANY = 1 << 19  # tokens; times the columns of a chunk more than 32 bits can count
WARP = 32  # threads


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a kernel may take at most. A multiprocessor of sm_90 has 65536 registers and runs up to 2048 threads."""

    registers: int  # a thread
    shared_bytes: int  # a program


# Shared memory is only for reductions between the warps of a program.
BOUNDS = {
    "update_statistics_kernel": Bound(registers=64, shared_bytes=1024),
    "logit_gradients_kernel": Bound(registers=64, shared_bytes=1024),
    "segment_sum_kernel": Bound(registers=128, shared_bytes=1024),
    "group_kernel": Bound(registers=128, shared_bytes=1024),
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One launch's kernel."""

    kernel: str
    registers: int  # a thread
    spilled_bytes: int  # of registers that found no place, and whatever else each thread has in memory
    shared_bytes: int
    products: frozenset[str]  # types of the integer products in the source
    fused: bool  # whether a product and a sum may become one operation


def logits_of(layout: str) -> Tensor:
    """[T, C] whose sizes and strides are multiples of 16, or are not, or are 1: Triton tells these apart."""
    shape, row_stride = {
        "aligned": ((MANY, 8192), 8192),
        "unaligned": ((MANY, 8191), 8193),
        "one column": ((MANY, 1), 1),
    }[layout]
    return torch.empty_strided(shape, (row_stride, 1), dtype=torch.float32, device=META)


def update_rows(layout: str, *, entropy: bool) -> None:
    from tba_megatron.kernels import triton_rows

    columns = torch.empty(MANY, dtype=torch.int64, device=META)
    statistics = new_statistics(MANY, META, entropy=entropy)
    triton_rows.update_statistics(statistics, logits_of(layout), columns, torch.empty(MANY, device=META))


def gradient_rows(layout: str, dtype: torch.dtype, *, entropy: bool) -> None:
    from tba_megatron.kernels import triton_rows

    columns = torch.empty(MANY, dtype=torch.int64, device=META)
    row = torch.empty(MANY, device=META)
    upstream = Upstream(
        maximum=row,
        exp_sum=row,
        entropy=row if entropy else None,
        logprob_grad=row,
        entropy_grad=row if entropy else None,
    )
    triton_rows.logit_gradients(logits_of(layout), columns, row, upstream, dtype)


def sum_segments(dtype: torch.dtype, *, reference: bool) -> None:
    from tba_megatron.kernels import triton_balance

    logprob = torch.zeros(64, dtype=dtype)
    triton_balance.sums(logprob, logprob if reference else None, torch.zeros(64, dtype=torch.int64), 2)


def join_groups() -> None:
    from tba_megatron.kernels import triton_balance

    ones = torch.ones(8, dtype=torch.float64)
    triton_balance.coefficients(ones, ones, ones, torch.zeros(8, dtype=torch.int64), 2, scale=1.0)


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Each launch that the compiler tells apart, by name."""
    for entropy in (False, True):
        tail = ", entropy" if entropy else ""
        for layout in ("aligned", "unaligned", "one column"):
            yield f"rows, {layout}{tail}", lambda layout=layout, entropy=entropy: update_rows(layout, entropy=entropy)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                yield (
                    f"gradients, {layout}, {dtype}{tail}",
                    lambda layout=layout, dtype=dtype, entropy=entropy: gradient_rows(layout, dtype, entropy=entropy),
                )
    for dtype in (torch.float32, torch.float64):
        for reference in (False, True):
            yield (
                f"segments, {dtype}{', reference' if reference else ''}",
                lambda dtype=dtype, reference=reference: sum_segments(dtype, reference=reference),
            )
    yield "groups", join_groups


LAUNCHES = dict(launches())


@contextlib.contextmanager
def compiling_only(cache: Path) -> Iterator[list[Compiled]]:
    """Where a launch compiles for sm_90, adds to the list and does no more."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    assert not knobs.runtime.interpret, "unset TRITON_INTERPRET: interpreted kernels cannot be compiled"
    run = triton.JITFunction.run
    found: list[Compiled] = []

    def compile_only(self, *args, warmup, **options):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *args, warmup=True, **options)
        assert kernel is not None
        (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
        ((stack, stores, loads),) = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue()
        )
        found.append(
            Compiled(
                kernel=self.__name__,
                registers=int(registers),
                spilled_bytes=max(int(stack), int(stores), int(loads)),
                shared_bytes=kernel.metadata.shared,
                products=frozenset(re.findall(r"arith\.muli .* : (i\d+)", kernel.asm["ttir"])),
                fused=kernel.metadata.enable_fp_fusion,
            )
        )

    device = SimpleNamespace(
        get_current_device=lambda: "none",  # Triton keeps kernels by device: no real one gets those of this test
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, WARP),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        patch.setattr(triton.JITFunction, "run", compile_only)
        patch.setattr(driver, "_active", device)
        yield found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, Compiled]:
    """By the name of the launch."""
    by_launch = {}
    with compiling_only(tmp_path_factory.mktemp("triton")) as found:
        for name, launch in LAUNCHES.items():
            launch()
            (by_launch[name],) = found
            found.clear()
    return by_launch


def test_every_kernel_is_compiled_and_has_bounds(compiled):
    from triton.runtime import KernelInterface

    kernels = set()
    for module in pkgutil.walk_packages(tba_megatron.kernels.__path__, "tba_megatron.kernels."):
        members = vars(importlib.import_module(module.name))
        kernels |= {name for name, member in members.items() if isinstance(member, KernelInterface)}
    assert kernels == {one.kernel for one in compiled.values()} == BOUNDS.keys()


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_needs_no_memory_for_its_registers_and_stays_within_its_bounds(name, compiled):
    one = compiled[name]
    assert one.spilled_bytes == 0
    assert one.registers <= BOUNDS[one.kernel].registers
    assert one.shared_bytes <= BOUNDS[one.kernel].shared_bytes


@pytest.mark.parametrize("name", LAUNCHES)
def test_places_of_rows_are_not_counted_in_32_bits(name, compiled):
    one = compiled[name]
    assert "i32" not in one.products
    if "aligned" in name:  # a row's place is a product only where its stride is not 1
        assert "i64" in one.products


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_round_a_product_before_they_add_to_it(name, compiled):
    assert not compiled[name].fused


def test_a_block_too_large_for_the_registers_is_found_out(monkeypatch, tmp_path):
    from tba_megatron.kernels import triton_rows

    monkeypatch.setitem(triton_rows.LAUNCH, "BLOCK", 65536)
    with compiling_only(tmp_path) as found:
        LAUNCHES["gradients, unaligned, torch.bfloat16, entropy"]()
    assert found[0].spilled_bytes > 0
