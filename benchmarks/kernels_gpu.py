"""Both ops on a GPU: parity with the specification, milliseconds, share of the GEMM rate, memory, beside other ways.

The device is an argument, and so is how it is timed: on a CPU the same lines run, and their figures mean nothing.
"""

from __future__ import annotations

import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.head_methods import Exact, LogProb, Problem, Shape, exact_logprob, liger, make_problem, naive, ours
from benchmarks.kernel_parity import CASES, GRADIENT_LIMIT, Case, balance_inputs, compare, compare_balance
from tba_megatron.kernels.balance import Impl

SHAPES = (
    Shape(tokens=16384, hidden=3584, vocabulary=152064),
    Shape(tokens=16384, hidden=3584, vocabulary=38016),  # the same on one of four tensor ranks
    Shape(tokens=2048, hidden=3584, vocabulary=152064),
    Shape(tokens=8192, hidden=4096, vocabulary=128256),
    Shape(tokens=4096, hidden=1024, vocabulary=49152),
)
SWEEP = (4096, 8192, 16384, 32768)  # columns at a time
GEMM_COLUMNS = 32768
BALANCE = (16384, 64, 8)  # tokens, sequences, groups
OURS = "linear_logprob"
OUT_OF_MEMORY, OUT_OF_TIME, FAILED = "out of memory", "not started: out of time", "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    device: torch.device
    shapes: tuple[Shape, ...]
    impls: tuple[Impl, ...]  # of both ops, the first with all variants
    compile_backend: str
    sweep: tuple[int, ...]  # columns at a time, tried at the first shape
    repetitions: int
    deadline_s: float  # of time.perf_counter

    def late(self) -> bool:
        return time.perf_counter() > self.deadline_s

    def milliseconds(self, step: Callable[[], Any]) -> dict[str, float]:
        for _ in range(2):
            step()
        times = [self._once(step) for _ in range(self.repetitions)]
        return {"median": round(statistics.median(times), 3), "min": round(min(times), 3)}

    def _once(self, step: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            step()
            return (time.perf_counter() - started) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak_mib(self, step: Callable[[], Any]) -> float | None:
        """Most memory allocated during ``step``, above what was before; None where the device does not count."""
        if self.device.type != "cuda":
            step()
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        return round((torch.cuda.max_memory_allocated(self.device) - before) / 2**20, 1)

    def clear(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def on_cuda(*, quick: bool, deadline_s: float) -> Bench:
    return Bench(
        device=torch.device("cuda", torch.cuda.current_device()),
        shapes=SHAPES[2:3] + SHAPES[-1:] if quick else SHAPES,
        impls=("triton", "torch"),
        compile_backend="inductor",
        sweep=() if quick else SWEEP,
        repetitions=3 if quick else 7,
        deadline_s=deadline_s,
    )


def measure(bench: Bench, report: dict[str, Any]) -> None:
    """Fill ``report`` part by part. ``ok``: both ops agree with their specification, and logits were not rounded.

    What fails is a result that says so; one of ours also fails its claim.
    """
    report |= {"ok": False, **_about(bench.device)}
    _, report["liger_kernel"] = liger(bench.device)
    report["parity"], report["balance"], report["shapes"] = {}, {}, {}
    parity(bench, report["parity"])
    if problem := _attempt(functools.partial(_balance, bench, report["balance"])):
        report["balance"]["result"] = problem
    ours_unrounded: list[bool] = []
    for shape in bench.shapes:
        found: dict[str, Any] = {"methods": {}}
        report["shapes"][str(shape)] = found
        problem = OUT_OF_TIME if bench.late() else _attempt(functools.partial(_shape, bench, shape, found))
        if problem:
            found["result"] = problem
            ours_unrounded += [False] if problem.startswith(FAILED) else []
        for name, row in found["methods"].items():
            if name.startswith(OURS) and row != OUT_OF_TIME:
                ours_unrounded.append(isinstance(row, dict) and row["unrounded"])
        bench.clear()
    balance_parity = report["balance"].get("parity", {})
    claims = {
        "linear_logprob is its specification": all(case["ok"] for case in report["parity"].values()),
        "balance is its specification": all(balance_parity.get(impl, {}).get("ok") for impl in bench.impls),
        "logits are not rounded at any shape": bool(ours_unrounded) and all(ours_unrounded),
    }
    report |= {"claims": claims, "ok": all(claims.values())}


def _attempt(step: Callable[[], None]) -> str | None:
    """What kept ``step`` from its end: a machine with a GPU may be had once, and the other parts are worth it."""
    try:
        step()
    except torch.OutOfMemoryError:
        return OUT_OF_MEMORY
    except Exception as error:  # compilers, libraries and drivers raise what they like
        problem = f"{FAILED}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        _say(problem)
        return problem
    return None


def _about(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": str(device), "torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        found["triton"] = importlib.import_module("triton").__version__
    except ModuleNotFoundError:
        found["triton"] = "not installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        found |= {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        found |= {"capability": capability, "multiprocessors": properties.multi_processor_count}
    return found


def parity(bench: Bench, found: dict[str, Any]) -> None:
    for impl in bench.impls:
        for dtype in GRADIENT_LIMIT:
            _say(f"parity: {impl}, {dtype}")
            for case in CASES:
                name = f"{case.name}, {str(dtype).removeprefix('torch.')}, {impl}"
                found[name] = {"ok": False}
                step = functools.partial(_case, found[name], case, dtype, impl, bench.device)
                if problem := _attempt(step):
                    found[name]["result"] = problem


def _case(row: dict[str, Any], case: Case, dtype: torch.dtype, impl: Impl, device: torch.device) -> None:
    row |= compare(case, dtype, impl, device)


def _balance(bench: Bench, found: dict[str, Any]) -> None:
    _say("balance")
    found["parity"] = compare_balance(balance_inputs(2000, 23, 7, bench.device), bench.impls)
    inputs = balance_inputs(*BALANCE, bench.device)
    leaf = inputs.logprob.clone().requires_grad_()

    def step(impl: Impl) -> None:
        leaf.grad = None
        inputs.run(leaf, impl).loss.backward()

    found["tokens, sequences, groups"] = list(BALANCE)
    found["forward_backward_ms"] = {impl: bench.milliseconds(lambda impl=impl: step(impl)) for impl in bench.impls}


def _shape(bench: Bench, shape: Shape, found: dict[str, Any]) -> None:
    problem = make_problem(shape, torch.bfloat16, bench.device)
    exact = exact_logprob(problem)
    rates = gemm_tflops(bench, problem)
    gemm_ms = 2e-9 * shape.tokens * shape.hidden * shape.vocabulary / rates["bfloat16 logits"]
    gradients = (problem.hidden.nbytes + problem.weight.nbytes) / 2**20
    found |= {"gemm_tflops": rates, "gemm_ms": gemm_ms, "gradients_mib": round(gradients, 1)}
    for name, n_gemms, method, given in _methods(bench, problem, sweep=shape == bench.shapes[0]):
        _say(f"{shape}: {name}")
        row: dict[str, Any] = {}
        step = functools.partial(_row, bench, given, method, exact, row)
        result = OUT_OF_TIME if bench.late() else _attempt(step)
        if not result:
            share = n_gemms * gemm_ms / row["forward_backward_ms"]["median"]
            row |= {"gemms": n_gemms, "share_of_gemm_rate": round(share, 3)}
        found["methods"][name] = result or row
        _say(f"  {json.dumps(found['methods'][name])}")  # a run that is killed leaves this much
        problem.drop_gradients()
        bench.clear()


def _methods(bench: Bench, problem: Problem, *, sweep: bool) -> Iterator[tuple[str, int, LogProb, Problem]]:
    """(name, number of matrix products of forward and backward, method, what it is given)."""
    for impl in bench.impls:
        yield f"{OURS}, {impl}", 4, ours(impl=impl), problem
    impl = bench.impls[0]
    main_grad = torch.zeros(problem.weight.shape, device=bench.device)
    yield f"{OURS}, {impl}, into main_grad", 4, ours(impl=impl, main_grad=main_grad), problem
    del main_grad
    frozen = replace(problem, weight=problem.weight.detach())
    yield f"{OURS}, {impl}, frozen weight", 3, ours(impl=impl), frozen
    for columns in bench.sweep if sweep else ():
        yield f"{OURS}, {impl}, {columns} columns at a time", 4, ours(impl=impl, chunk=columns), problem
    yield "naive logits", 3, naive, problem
    torch.compiler.reset()
    yield "naive logits, torch.compile", 3, torch.compile(naive, backend=bench.compile_backend, dynamic=False), problem
    found, note = liger(bench.device)
    if found is not None:
        yield f"liger-kernel, {note}", 4, found, problem


def _row(bench: Bench, problem: Problem, method: LogProb, exact: Exact, row: dict[str, Any]) -> None:
    logprob = problem.forward(method)
    row |= {"logprob_error": exact.error(logprob), "logprob_mean_error": exact.mean_error(logprob)}
    row |= {"exact": row["logprob_error"] <= exact.limit, "unrounded": row["logprob_error"] <= exact.unrounded_limit}
    del logprob
    problem.forward_backward(method)  # a compiler's first call needs memory of its own
    problem.drop_gradients()
    row["peak_mib"] = bench.peak_mib(lambda: problem.forward_backward(method))
    problem.drop_gradients()
    row["forward_ms"] = bench.milliseconds(lambda: problem.forward(method))
    row["forward_backward_ms"] = bench.milliseconds(lambda: problem.forward_backward(method))


@torch.no_grad()
def gemm_tflops(bench: Bench, problem: Problem) -> dict[str, float]:
    """Rates of the head's products at ``GEMM_COLUMNS`` columns: logits as a model makes them, then as the op does."""
    hidden, rows = problem.hidden, problem.weight[:GEMM_COLUMNS]
    logits = hidden @ rows.t()
    products = {
        "bfloat16 logits": lambda: torch.mm(hidden, rows.t(), out=logits),
        "float32 logits": lambda: _product(hidden, rows.t()),
        "hidden gradient": lambda: _product(logits, rows),
        "weight gradient": lambda: _product(logits.t(), hidden),
    }
    flops = 2 * hidden.shape[0] * hidden.shape[1] * len(rows)
    return {name: flops / bench.milliseconds(step)["median"] / 1e9 for name, step in products.items()}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b with a float32 result; a CPU has no such product of bfloat16 matrices."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
