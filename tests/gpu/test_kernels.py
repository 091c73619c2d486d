"""Both ops against their float64 specification: on a CUDA device with both back ends, on a CPU with the torch one."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.head_methods import Shape, exact_logprob, make_problem
from benchmarks.kernel_parity import CASES, GRADIENT_LIMIT, balance_inputs, compare, compare_balance
from tba_megatron.errors import KernelError
from tba_megatron.kernels.linear_logprob import linear_logprob

needs_gpu = pytest.mark.gpu
PLACES = [
    pytest.param("cpu", "torch", id="torch on cpu"),
    pytest.param("cuda", "torch", id="torch on cuda", marks=needs_gpu),
    pytest.param("cuda", "triton", id="triton on cuda", marks=needs_gpu),
]
on_each_place = pytest.mark.parametrize("device, impl", PLACES)


def place(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device(device)


@on_each_place
@pytest.mark.parametrize("dtype", GRADIENT_LIMIT, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_the_specification_and_repeat(case, dtype, device, impl):
    found = compare(case, dtype, impl, place(device))
    assert found["ok"], found


@on_each_place
def test_the_balance_is_that_of_the_specification_and_repeats(device, impl):
    found = compare_balance(balance_inputs(2000, 23, 7, place(device)), [impl])
    assert found[impl]["ok"], found


@on_each_place
def test_a_balance_without_tokens_or_sequences_is_nothing(device, impl):
    where = place(device)
    empty, none = torch.zeros(0, device=where), torch.zeros(0, dtype=torch.int64, device=where)
    inputs = balance_inputs(8, 3, 4, where)
    without_tokens = type(inputs)(
        logprob=empty,
        reference=empty,
        sequence_index=none,
        group_index=inputs.group_index,
        reward_over_beta=inputs.reward_over_beta,
        copies=inputs.copies,
        n_groups=4,
    )
    found = without_tokens.run(empty.clone().requires_grad_(), impl)
    assert found.loss.isfinite() and not found.kl.any()
    nothing = type(inputs)(
        logprob=empty,
        reference=empty,
        sequence_index=none,
        group_index=none,
        reward_over_beta=empty,
        copies=empty,
        n_groups=0,
    )
    assert not nothing.run(empty.clone().requires_grad_(), impl).loss.any()


@on_each_place
@pytest.mark.parametrize("n_columns", [256, 4096, 1 << 20])
def test_log_probs_of_a_wide_vocabulary_do_not_depend_on_the_chunk(n_columns, device, impl):
    problem = make_problem(Shape(tokens=40, hidden=64, vocabulary=20_011), torch.bfloat16, place(device))
    exact = exact_logprob(problem)
    assert exact.error(linear_logprob(*inputs_of(problem), impl=impl, chunk=n_columns).logprob) <= exact.limit


@on_each_place
def test_a_frozen_weight_has_no_gradient_and_the_hidden_states_theirs(device, impl):
    problem = make_problem(Shape(tokens=40, hidden=64, vocabulary=1011), torch.float32, place(device))
    linear_logprob(*inputs_of(problem), impl=impl).logprob.sum().backward()
    frozen = linear_logprob(problem.hidden, problem.weight.detach(), problem.labels, impl=impl).logprob
    (gradient,) = torch.autograd.grad(frozen.sum(), problem.hidden)
    assert problem.hidden.grad is not None and torch.equal(gradient, problem.hidden.grad)


@on_each_place
@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_one_line(temperature, device, impl):
    problem = make_problem(Shape(tokens=4, hidden=8, vocabulary=16), torch.float32, place(device))
    with pytest.raises(KernelError, match="temperature is"):
        linear_logprob(*inputs_of(problem), impl=impl, temperature=temperature)


@needs_gpu
def test_a_chunk_of_more_than_two_to_the_31_elements_is_addressed_right():
    """The last rows of [65537, 32768] logits lie beyond what 32 bits can address."""
    device = place("cuda")
    if torch.cuda.get_device_properties(device).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    problem = make_problem(Shape(tokens=65_537, hidden=64, vocabulary=32_768), torch.bfloat16, device)
    out = linear_logprob(*inputs_of(problem), impl="triton", chunk=32_768).logprob
    (gradient,) = torch.autograd.grad((out * problem.upstream).sum(), problem.hidden)
    last, weight = problem.hidden.detach()[-200:].requires_grad_(), problem.weight.detach()
    alone = linear_logprob(last, weight, problem.labels[-200:], impl="torch", chunk=1024).logprob
    (expected,) = torch.autograd.grad((alone * problem.upstream[-200:]).sum(), last)
    torch.testing.assert_close(out[-200:], alone, rtol=0, atol=1e-5)
    assert (gradient[-200:] - expected).norm() <= 2 * GRADIENT_LIMIT[torch.bfloat16] * expected.norm()


@needs_gpu
def test_float32_logits_are_not_rounded_to_tf32():
    problem = make_problem(Shape(tokens=16, hidden=64, vocabulary=256), torch.float32, place("cuda"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(KernelError, match="TF32"):
            linear_logprob(*inputs_of(problem))
    finally:
        torch.set_float32_matmul_precision(before)


def inputs_of(problem):
    return problem.hidden, problem.weight, problem.labels
