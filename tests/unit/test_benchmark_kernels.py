"""The benchmark of the kernels runs, at small shapes, on the CPU; it finds what is wrong and says what it left out."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import head_methods, kernels, kernels_cpu, kernels_gpu
from benchmarks.head_methods import Shape, exact_logprob, make_problem
from benchmarks.kernel_parity import CASES, balance_inputs, compare, compare_balance
from tba_megatron.kernels import torch_rows

CPU = torch.device("cpu")
TINY = Shape(tokens=64, hidden=16, vocabulary=300)


def bench(**changes) -> kernels_gpu.Bench:
    made = kernels_gpu.Bench(
        device=CPU,
        shapes=(TINY,),
        impls=("torch",),
        compile_backend="eager",
        sweep=(100,),
        repetitions=1,
        deadline_s=math.inf,
    )
    return replace(made, **changes)


@pytest.fixture
def no_liger(monkeypatch):
    """Its import alone takes seconds."""
    for module in (kernels_cpu, kernels_gpu):
        monkeypatch.setattr(module, "liger", lambda device: (None, "not installed"))


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(kernels_gpu, "CASES", CASES[:1])


def tiny_cpu(**changes) -> kernels_cpu.Options:
    made = kernels_cpu.Options(
        shape=TINY,
        rounding_shape=Shape(tokens=2 * kernels_cpu.SEQUENCE_TOKENS, hidden=16, vocabulary=64),
        repetitions=1,
        threads=1,
    )
    return replace(made, **changes)


@pytest.fixture
def in_this_process(monkeypatch):
    """With made-up memory, since this process has room to reuse."""
    monkeypatch.setattr(kernels_cpu, "_alone", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(kernels_cpu, "_status_kib", {"VmRSS": 1024, "VmHWM": 3072}.__getitem__)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_cpu(monkeypatch, capfd, options) -> tuple[int, dict]:
    monkeypatch.setattr(kernels_cpu, "FULL", options)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    code = kernels.main(["--device", "cpu"])
    return code, json.loads(capfd.readouterr().out)


def test_on_a_cpu_every_method_has_memory_time_and_error(no_liger, in_this_process, monkeypatch, capfd):
    code, report = run_cpu(monkeypatch, capfd, tiny_cpu())
    assert code == 0 and report["ok"] and report["liger_kernel"] == "not installed"
    for rows in report["methods"].values():
        assert set(rows) == {kernels_cpu.OURS, kernels_cpu.NAIVE}
        assert all(row["cpu_s"] > 0 and row["wall_s"] > 0 and row["peak_mib"] == 2 for row in rows.values())
        assert rows[kernels_cpu.NAIVE]["time_ratio"] == rows[kernels_cpu.NAIVE]["memory_ratio"] == 1
    assert report["methods"]["float32"][kernels_cpu.OURS]["gradient_difference"] < 1e-6
    low = report["methods"]["bfloat16"]
    assert low[kernels_cpu.OURS]["logprob_error"] < 1e-5 < 1e-3 < low[kernels_cpu.NAIVE]["logprob_error"]
    around = report["rounding"]["logits around 20"]
    assert around["linear_logprob"]["sum_max"] < 1e-3 < 0.1 < around["logits in bfloat16"]["sum_max"]


@pytest.mark.parametrize("limit", ["memory_limit", "time_limit"])
def test_a_limit_that_does_not_hold_is_an_exit_code(limit, no_liger, in_this_process, monkeypatch, capfd):
    code, report = run_cpu(monkeypatch, capfd, tiny_cpu(**{limit: -1.0}))
    broken = [claim for claim, holds in report["claims"].items() if not holds]
    assert code == 1 and not report["ok"] and broken == [f"{limit.removesuffix('_limit')}_ratio at most -1.0"]


def test_nothing_is_claimed_against_liger_where_there_is_none(no_liger, in_this_process, monkeypatch, capfd):
    _, report = run_cpu(monkeypatch, capfd, tiny_cpu(against_liger=True))
    assert not any("liger" in claim for claim in report["claims"])


def test_the_peak_is_that_of_the_method_in_its_own_process():
    """Logits are 64 MiB here, three times at the peak; without them there are gradients and some chunks of 8 MiB."""
    options = tiny_cpu(shape=Shape(tokens=2048, hidden=32, vocabulary=8192))
    whole = kernels_cpu._alone(kernels_cpu._memory, kernels_cpu.NAIVE, "float32", options)
    chunked = kernels_cpu._alone(kernels_cpu._memory, kernels_cpu.OURS, "float32", options)
    assert whole["peak_mib"] > 2.5 * 64
    assert 1 < chunked["peak_mib"] < 64


@pytest.mark.slow
def test_liger_kernel_computes_the_same():
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    method, note = head_methods.liger(CPU)
    assert method is not None, note
    problem = make_problem(TINY, torch.float32, CPU)
    exact = exact_logprob(problem)
    assert exact.error(problem.forward(method)) <= exact.limit


def test_the_lines_for_a_gpu_run_on_a_cpu_too(no_liger, few_cases):
    report: dict = {}
    kernels_gpu.measure(bench(), report)
    assert report["ok"] and all(report["claims"].values())
    methods = report["shapes"][str(TINY)]["methods"]
    ours = [name for name in methods if name.startswith(kernels_gpu.OURS)]
    assert len(ours) == 4 and {"naive logits", "naive logits, torch.compile"} < set(methods)
    for name, row in methods.items():
        assert row["exact"] == (name in ours), name
        assert row["forward_ms"]["median"] > 0 and row["share_of_gemm_rate"] > 0
    assert min(report["shapes"][str(TINY)]["gemm_tflops"].values()) > 0
    json.dumps(report)


@pytest.mark.parametrize(
    "error, result",
    [
        (torch.OutOfMemoryError("no room"), kernels_gpu.OUT_OF_MEMORY),
        (ValueError("a\nfault"), "failed: ValueError: a fault"),
    ],
    ids=["out of memory", "fault"],
)
def test_a_rival_that_fails_is_a_result(error, result, no_liger, few_cases, monkeypatch):
    def fails(hidden, weight, labels):
        raise error

    monkeypatch.setattr(kernels_gpu, "naive", fails)
    report: dict = {}
    kernels_gpu.measure(bench(sweep=()), report)
    assert report["shapes"][str(TINY)]["methods"]["naive logits"] == result and report["ok"]


def test_one_of_ours_that_fails_is_not_passed_over(no_liger, few_cases, monkeypatch):
    def fails(*_arguments, **settings):
        if settings.get("main_grad") is not None:
            raise torch.OutOfMemoryError("no room")
        return plain(*_arguments, **settings)

    plain = head_methods.linear_logprob
    monkeypatch.setattr(head_methods, "linear_logprob", fails)
    report: dict = {}
    kernels_gpu.measure(bench(sweep=()), report)
    assert not report["ok"] and not report["claims"]["logits are not rounded at any shape"]
    assert report["claims"]["linear_logprob is its specification"]


def test_out_of_time_nothing_is_started_and_nothing_claimed(no_liger, few_cases):
    report: dict = {}
    kernels_gpu.measure(bench(deadline_s=time.perf_counter()), report)
    assert report["shapes"][str(TINY)] == {"methods": {}, "result": kernels_gpu.OUT_OF_TIME} and not report["ok"]


def test_a_fault_leaves_what_the_other_parts_measured(no_liger, few_cases, monkeypatch, capfd):
    def fault(*_):
        raise ValueError("a fault")

    monkeypatch.setattr(kernels_gpu, "gemm_tflops", fault)
    monkeypatch.setattr(kernels_gpu, "compare_balance", fault)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels_gpu, "on_cuda", lambda quick, deadline_s: bench())
    assert kernels.main(["--device", "cuda"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["claims"]["linear_logprob is its specification"] and not report["ok"]
    assert report["balance"]["result"] == report["shapes"][str(TINY)]["result"] == "failed: ValueError: a fault"


def test_one_shape_that_fails_is_not_made_up_for_by_another(no_liger, few_cases, monkeypatch):
    def fails_once(bench, problem):
        if problem.hidden.shape[0] == TINY.tokens:
            raise ValueError("a fault")
        return plain(bench, problem)

    plain = kernels_gpu.gemm_tflops
    monkeypatch.setattr(kernels_gpu, "gemm_tflops", fails_once)
    other = Shape(tokens=TINY.tokens + 1, hidden=TINY.hidden, vocabulary=TINY.vocabulary)
    report: dict = {}
    kernels_gpu.measure(bench(shapes=(TINY, other), sweep=()), report)
    assert report["shapes"][str(other)]["methods"]["linear_logprob, torch"]["unrounded"]
    assert not report["claims"]["logits are not rounded at any shape"] and not report["ok"]


def test_what_was_measured_before_a_stop_is_printed(no_liger, few_cases, monkeypatch, capfd):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels_gpu, "gemm_tflops", stop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels_gpu, "on_cuda", lambda quick, deadline_s: bench())
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["--device", "cuda"])
    report = json.loads(capfd.readouterr().out)
    assert report["parity"] and report["balance"] and not report["ok"]


def test_liger_kernel_that_cannot_be_imported_is_a_note(monkeypatch):
    def broken(name):
        raise ImportError("built for another torch")

    monkeypatch.setattr(head_methods.importlib, "import_module", broken)
    assert head_methods.liger(CPU) == (None, "not importable: ImportError: built for another torch")


def test_without_a_gpu_it_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        kernels.main(["--device", "cuda"])
    assert caught.value.code == 2 and "no CUDA device here; use --device cpu" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["update_statistics", "logit_gradients"])
def test_parity_finds_a_row_kernel_that_is_wrong(name, monkeypatch):
    right = getattr(torch_rows, name)

    def wrong(first, *rest):
        if isinstance(first, torch.Tensor):
            return right(first * (1 + 1e-5), *rest)
        return right(first, rest[0] * (1 + 1e-5), *rest[1:])

    assert compare(CASES[1], torch.float32, "torch", CPU)["ok"]
    monkeypatch.setattr(torch_rows, name, wrong)
    assert not compare(CASES[1], torch.float32, "torch", CPU)["ok"]


def test_parity_of_balance_finds_a_wrong_sum(monkeypatch):
    from tba_megatron.kernels import balance

    inputs = balance_inputs(200, 9, 5, CPU)
    assert compare_balance(inputs, ["torch"])["torch"]["ok"]
    right = balance.segment_sum
    monkeypatch.setattr(balance, "segment_sum", lambda values, index, n: right(values.float(), index, n))
    assert not compare_balance(inputs, ["torch"])["torch"]["ok"]
