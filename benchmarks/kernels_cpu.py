"""Log-probs on CPU: memory and time of each method, beside naive logits and liger-kernel's fallback, and rounding.

Memory is measured with each method in a process of its own, time with all of them in turn in one process.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.head_methods import (
    LogProb,
    Shape,
    exact_logprob,
    liger,
    make_problem,
    naive,
    ours,
)

CPU = torch.device("cpu")
OURS, NAIVE, LIGER = "linear_logprob", "naive logits", "liger-kernel"
CLAIMED = "float32"  # what the limits are about
DTYPES = (CLAIMED, "bfloat16")
WARM_UP = Shape(tokens=32, hidden=64, vocabulary=512)
SEQUENCE_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    shape: Shape
    rounding_shape: Shape  # tokens: a multiple of SEQUENCE_TOKENS
    repetitions: int
    threads: int
    memory_limit: float = math.inf  # of ours over naive logits, in float32
    time_limit: float = math.inf
    against_liger: bool = False  # whether to be below liger-kernel is claimed


FULL = Options(
    shape=Shape(tokens=4096, hidden=512, vocabulary=32000),
    rounding_shape=Shape(tokens=8 * SEQUENCE_TOKENS, hidden=256, vocabulary=4096),
    repetitions=5,
    threads=2,
    memory_limit=0.25,
    time_limit=1.4,
    against_liger=True,
)
# Where everything fits into a cache, what is not the products weighs more, so nothing is claimed.
QUICK = Options(
    shape=Shape(tokens=1024, hidden=128, vocabulary=8000),
    rounding_shape=Shape(tokens=2 * SEQUENCE_TOKENS, hidden=64, vocabulary=1024),
    repetitions=2,
    threads=2,
)


def measure(options: Options, report: dict[str, Any]) -> None:
    """Fill ``report`` part by part; ``ok`` says whether every claim that could be measured holds."""
    found, note = liger(CPU)
    names = [OURS, NAIVE, *([LIGER] if found else [])]
    report |= {
        "device": "cpu",
        "threads": options.threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "torch": torch.__version__,
        "liger_kernel": note,
        "shape": str(options.shape),
        "gradients_mib": {},
        "methods": {},
    }
    for dtype in DTYPES:
        rows = report["methods"][dtype] = {name: {} for name in names}
        for name in names:
            _say(f"{dtype}: memory of {name}")
            rows[name] |= _alone(_memory, name, dtype, options)
        repetitions = options.repetitions if dtype == CLAIMED else min(2, options.repetitions)
        _say(f"{dtype}: time")
        for name, row in _alone(_time, names, dtype, options, repetitions).items():
            rows[name] |= row
    rows = report["methods"][CLAIMED]
    for name in names:
        for dtype in DTYPES:
            _add_ratios(report["methods"][dtype][name], report["methods"][dtype][NAIVE])
    report |= {key: rows[OURS][key] for key in ("memory_ratio", "time_ratio", "wall_ratio")}
    report["gradients_mib"] = {
        dtype: _mib((options.shape.tokens + options.shape.vocabulary) * options.shape.hidden * size)
        for dtype, size in (("float32", 4), ("bfloat16", 2))
    }
    _say("rounding")
    report["rounding"] = _alone(rounding, options)
    claims = {f"exact in {dtype}": bool(report["methods"][dtype][OURS]["exact"]) for dtype in DTYPES}
    for ratio, limit in (("memory_ratio", options.memory_limit), ("time_ratio", options.time_limit)):
        if limit < math.inf:
            claims[f"{ratio} at most {limit}"] = report[ratio] <= limit
    if options.against_liger and LIGER in names:
        claims |= {f"less {key} than liger-kernel": rows[OURS][key] < rows[LIGER][key] for key in ("peak_mib", "cpu_s")}
    report |= {"claims": claims, "ok": all(claims.values())}


def _add_ratios(row: dict[str, Any], base: dict[str, Any]) -> None:
    for ratio, key in (("memory_ratio", "peak_mib"), ("time_ratio", "cpu_s"), ("wall_ratio", "wall_s")):
        row[ratio] = round(row[key] / base[key], 3)


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function`` returns in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _method(name: str) -> LogProb:
    if name == LIGER:
        found, note = liger(CPU)
        if found is None:
            raise RuntimeError(f"liger-kernel was there a moment ago: {note}")
        return found
    return naive if name == NAIVE else ours()


def _memory(name: str, dtype: str, options: Options) -> dict[str, float]:
    """Peak of the resident set above the inputs, forward and backward, both gradients included; and the error."""
    torch.set_num_threads(options.threads)
    method, type_ = _method(name), getattr(torch, dtype)
    # Thread pools and libraries come with the first call, whatever its size.
    make_problem(WARM_UP, type_, CPU).forward_backward(method)
    problem = make_problem(options.shape, type_, CPU)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts again from the present size
    before = _status_kib("VmRSS")
    logprob = problem.forward(method)
    (logprob * problem.upstream).sum().backward()
    peak = _status_kib("VmHWM")
    exact = exact_logprob(problem)
    return {
        "peak_mib": _mib((peak - before) * 1024),
        "logprob_error": exact.error(logprob),
        "exact": exact.error(logprob) <= exact.limit,
    }


def _status_kib(key: str) -> int:
    (kib,) = re.findall(rf"^{key}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.M)
    return int(kib)


def _time(names: list[str], dtype: str, options: Options, repetitions: int) -> dict[str, dict[str, float]]:
    """Least CPU and wall seconds of forward and backward, and how far the gradients are from those of naive logits."""
    torch.set_num_threads(options.threads)
    methods = {name: _method(name) for name in names}
    problem = make_problem(options.shape, getattr(torch, dtype), CPU)
    gradients = {}
    for name, method in methods.items():
        problem.forward_backward(method)
        gradients[name] = [leaf.grad for leaf in (problem.hidden, problem.weight)]
    differences = {
        name: max(_relative(a, b) for a, b in zip(found, gradients[NAIVE], strict=True))
        for name, found in gradients.items()
    }
    del gradients
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name, method in methods.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            problem.forward_backward(method)
            cpu[name].append(time.process_time() - cpu_started)
            wall[name].append(time.perf_counter() - started)
    return {
        name: {
            "cpu_s": round(min(cpu[name]), 4),
            "wall_s": round(min(wall[name]), 4),
            "gradient_difference": differences[name],
        }
        for name in names
    }


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def rounding(options: Options) -> dict[str, Any]:
    """What logits rounded to low precision do to log-probs, by where the logits lie; inputs in bfloat16.

    ``token_rms`` is the error of a log-prob in nats, ``sum_rms`` and ``sum_max`` that of sums over sequences of
    ``SEQUENCE_TOKENS``. The softmax does not depend on where the logits lie; their rounding does.
    """
    torch.set_num_threads(options.threads)
    problem = make_problem(options.rounding_shape, torch.bfloat16, CPU)
    found: dict[str, Any] = {
        "sequences": options.rounding_shape.tokens // SEQUENCE_TOKENS,
        "tokens_each": SEQUENCE_TOKENS,
    }
    for centre in (0.0, 20.0):
        with torch.no_grad():
            problem.hidden[:, 0], problem.weight[:, 0] = 1.0, centre
            exact = exact_logprob(problem, options.rounding_shape.tokens).logprob
            logits = problem.hidden.float() @ problem.weight.float().t()
            rows = {
                f"logits in {str(dtype).removeprefix('torch.')}": torch.log_softmax(
                    logits.to(dtype).float(), -1
                ).gather(1, problem.labels[:, None])[:, 0]
                for dtype in (torch.bfloat16, torch.float16)
            }
            rows[OURS] = problem.forward(ours())
        found[f"logits around {centre:g}"] = {name: _errors(row, exact) for name, row in rows.items()}
    return found


def _errors(logprob: Tensor, exact: Tensor) -> dict[str, float]:
    errors = logprob.double() - exact
    sums = errors.view(-1, SEQUENCE_TOKENS).sum(1)
    return {
        "token_rms": _short(errors.square().mean().sqrt()),
        "sum_rms": _short(sums.square().mean().sqrt()),
        "sum_max": _short(sums.abs().max()),
    }


def _short(value: Tensor) -> float:
    return float(f"{float(value):.2e}")


def _mib(n_bytes: int) -> float:
    return round(n_bytes / 2**20, 1)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
