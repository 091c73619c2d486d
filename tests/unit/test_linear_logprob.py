"""``linear_logprob`` on one rank against its float64 specification: exact, without logits, clear about bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tba_megatron.errors import KernelError
from tba_megatron.kernels.linear_logprob import LogprobOut, linear_logprob
from tba_megatron.kernels.reference import linear_logprob_reference

EPS = torch.finfo(torch.float32).eps
GRADIENT_ERROR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def problem(n_tokens=61, width=40, n_rows=301, dtype=torch.float32, *, spread=0.4, seed=0):
    """(hidden [T, H], weight [V, H], labels [T]); about every fifth label is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n_tokens, width, generator=generator).to(dtype)
    weight = (torch.randn(n_rows, width, generator=generator) * spread).to(dtype)
    labels = torch.randint(0, n_rows, (n_tokens,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def both(hidden, weight, labels, *, entropy=True, temperature: Any = 1.0, valid_rows=None, seed=1, **settings):
    """What the op and the specification give, forward and backward, for the same random gradients."""
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(2, len(labels), generator=generator)
    found_leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    out = linear_logprob(
        *found_leaves,
        labels,
        temperature=temperature,
        valid_rows=valid_rows,
        entropy=entropy,
        entropy_grad=entropy,
        lse=True,
        **settings,
    )
    exact_leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = linear_logprob_reference(*exact_leaves, labels, temperature=temperature, valid_rows=valid_rows)
    for result in (out, exact):
        total = (result.logprob * upstream[0]).sum()
        if entropy:
            total = total + (result.entropy * upstream[1]).sum()
        total.backward()
    return out, exact, [x.grad for x in found_leaves], [x.grad for x in exact_leaves]


def sizes(hidden, weight, labels, temperature, seed=1) -> list[float]:
    """The norms of both gradients if no two of their terms had opposite signs: what rounding is to be held against."""
    generator = torch.Generator().manual_seed(seed)
    logprob_grad, entropy_grad = torch.randn(2, len(labels), generator=generator).double().abs()[:, :, None]
    taken = (labels >= 0)[:, None]
    temperatures = torch.as_tensor(temperature, dtype=torch.float64).expand(len(labels))[:, None]
    logprobs = torch.log_softmax(hidden.double() @ weight.double().t() / temperatures, -1)
    p = logprobs.exp()
    entropy = -(p * logprobs).sum(1, keepdim=True)
    onehot = torch.nn.functional.one_hot(labels.clamp(0), len(weight))
    terms = logprob_grad * (onehot + p) + entropy_grad * p * (logprobs.abs() + entropy)
    terms = torch.where(taken, terms / temperatures, 0.0)
    return [float((terms @ weight.double().abs()).norm()), float((terms.t() @ hidden.double().abs()).norm())]


def assert_exact(hidden, weight, labels, *, temperature: Any = 1.0, may_cancel=False, **settings) -> None:
    """Within the bounds of the module; with ``may_cancel`` the gradients' are of what they are the small sum of."""
    out, exact, found, expected = both(hidden, weight, labels, temperature=temperature, **settings)
    norms = [float(right.norm()) for right in expected]
    if may_cancel:
        norms = sizes(hidden, weight[: settings.get("valid_rows")], labels, temperature)
    taken = labels >= 0
    temperatures = torch.as_tensor(temperature, dtype=torch.float64).expand(len(labels))[taken, None]
    logits = hidden.double()[taken] @ weight.double().t() / temperatures
    bound = max(5e-6, 4 * EPS * float(logits.abs().max())) if logits.numel() else 5e-6
    for name in ("logprob", "entropy", "lse"):
        values = getattr(out, name)
        if values is None:
            continue
        assert values.dtype == torch.float32
        assert not values[~taken].any()
        torch.testing.assert_close(values.double(), getattr(exact, name), rtol=0, atol=bound)
    # Where logits are large their own float32 rounding is what a gradient can know.
    allowed = max(GRADIENT_ERROR[hidden.dtype], EPS * float(logits.abs().max() if logits.numel() else 0))
    for gradient, right, norm in zip(found, expected, norms, strict=True):
        assert gradient.dtype == hidden.dtype and gradient.isfinite().all()
        assert float((gradient.double() - right).norm()) <= allowed * norm


@pytest.mark.parametrize("dtype", GRADIENT_ERROR, ids=str)
@pytest.mark.parametrize("entropy", [False, True], ids=["logprob", "entropy"])
@pytest.mark.parametrize("chunk", [None, 1, 64, 300, 1000])
def test_values_and_gradients_are_those_of_the_specification(dtype, entropy, chunk):
    assert_exact(*problem(dtype=dtype), entropy=entropy, temperature=0.7, chunk=chunk)


@pytest.mark.parametrize("n_tokens, width, n_rows", [(1, 16, 3), (7, 1, 1), (2, 3, 2), (200, 8, 5), (0, 8, 5)])
def test_small_and_odd_shapes(n_tokens, width, n_rows):
    assert_exact(*problem(n_tokens, width, n_rows), chunk=2)
    assert_exact(*problem(n_tokens, width, n_rows))


@pytest.mark.parametrize("temperature", [0.05, 3.0, torch.linspace(0.3, 2.0, 61)], ids=["0.05", "3", "by token"])
def test_temperature_is_a_number_or_one_a_token(temperature):
    assert_exact(*problem(), temperature=temperature, chunk=100)


@given(
    n_tokens=st.integers(0, 9),
    width=st.integers(1, 9),
    n_rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    temperature=st.floats(0.2, 5),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
@settings(max_examples=60)
def test_any_shape_chunk_and_padding(n_tokens, width, n_rows, chunk, temperature, seed, data):
    hidden, weight, labels = problem(n_tokens, width, n_rows, seed=seed)
    valid = data.draw(st.integers(max(1, int(labels.max()) + 1 if n_tokens else 1), n_rows))
    assert_exact(hidden, weight, labels, temperature=temperature, chunk=chunk, valid_rows=valid, may_cancel=True)


def test_padded_rows_have_neither_probability_nor_gradient():
    hidden, weight, labels = problem()
    labels = labels.clamp(max=249)
    weight[250:] *= 100  # they would win every softmax
    _, _, (_, gradient), _ = both(hidden, weight, labels, valid_rows=250, chunk=64)
    assert gradient[:250].abs().sum(1).gt(0).all() and not gradient[250:].any()
    assert_exact(hidden, weight, labels, valid_rows=250, chunk=64)


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_large_logits_lose_only_their_own_rounding(shift):
    hidden, weight, labels = problem()
    hidden[:, 0], weight[:, 0] = shift, 1.0
    assert_exact(hidden, weight, labels, chunk=64)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_ignored_tokens_count_for_nothing_whatever_is_in_them(garbage):
    hidden, weight, labels = problem()
    hidden[labels < 0] = garbage
    out, _, (hidden_grad, weight_grad), _ = both(hidden, weight, labels, chunk=64)
    assert out.logprob.isfinite().all() and weight_grad.isfinite().all() and not hidden_grad[labels < 0].any()
    leaf = hidden.clone().requires_grad_()
    logprob = linear_logprob(leaf, weight, labels).logprob
    upstream = torch.where(labels < 0, garbage, 1.0)
    (gradient,) = torch.autograd.grad(logprob, leaf, upstream)
    assert gradient.isfinite().all() and not gradient[labels < 0].any()


def test_all_tokens_ignored():
    hidden, weight, labels = problem()
    assert_exact(hidden, weight, torch.full_like(labels, -1))


def test_a_hidden_state_that_is_not_a_number_is_seen():
    hidden, weight, labels = problem()
    hidden[1] = math.nan
    out = linear_logprob(hidden, weight, labels, chunk=64)
    assert out.logprob[1].isnan() and out.logprob.isnan().sum() == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
def test_labels_of_any_integer_type_and_views_of_any_stride(dtype):
    hidden, weight, labels = problem(n_rows=300)
    expected = linear_logprob(hidden, weight, labels).logprob
    wide = torch.empty(61, 80)
    wide[:, ::2] = hidden
    out = linear_logprob(wide[:, ::2], weight.t().contiguous().t(), labels.to(dtype))
    torch.testing.assert_close(out.logprob, expected, rtol=0, atol=5e-6)
    leaves = [wide.requires_grad_(), weight.t().contiguous().requires_grad_()]
    linear_logprob(leaves[0][:, ::2], leaves[1].t(), labels.to(dtype)).logprob.sum().backward()
    assert not leaves[0].grad[:, 1::2].any() and leaves[0].grad[:, ::2].any() and leaves[1].grad.any()


def test_runs_repeat_bit_for_bit():
    (first, _, grads, _), (second, _, again, _) = (both(*problem(dtype=torch.bfloat16), chunk=64) for _ in range(2))
    for a, b in zip([first.logprob, first.entropy, *grads], [second.logprob, second.entropy, *again], strict=True):
        assert torch.equal(a, b)


def test_autocast_does_not_round_the_logits():
    hidden, weight, labels = problem()
    outside = both(hidden, weight, labels, chunk=64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        out = linear_logprob(*leaves, labels, chunk=64)
        out.logprob.sum().backward()
    assert torch.equal(out.logprob, outside[0].logprob)
    leaf = weight.clone().requires_grad_()
    linear_logprob(hidden, leaf, labels, chunk=64).logprob.sum().backward()
    assert torch.equal(leaves[1].grad, leaf.grad)


def test_an_entropy_without_gradient_has_none():
    hidden, weight, labels = problem()
    out = linear_logprob(hidden.requires_grad_(), weight, labels, entropy=True, lse=True)
    assert out.logprob.requires_grad and not out.entropy.requires_grad and not out.lse.requires_grad
    plain = linear_logprob(hidden, weight, labels)
    assert plain.entropy is None and plain.lse is None


class Operators(TorchDispatchMode):
    """Counts matrix products, and the elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def watched(function: Callable[[], Any]) -> Operators:
    with Operators() as seen:
        function()
    return seen


def naive(hidden, weight, labels) -> LogprobOut:
    logprobs = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return LogprobOut(logprob=logprobs.gather(1, labels.clamp(0)[:, None])[:, 0], entropy=None, lse=None)


@pytest.mark.parametrize("dtype", GRADIENT_ERROR, ids=str)
@pytest.mark.parametrize("n_tokens, n_rows", [(600, 700), (200, 4000), (2048, 300), (128, 2000), (40, 60)])
def test_no_tensor_of_all_tokens_by_the_vocabulary_is_made(dtype, n_tokens, n_rows):
    hidden, weight, labels = problem(n_tokens, 16, n_rows, dtype)
    leaves = [x.requires_grad_() for x in (hidden, weight)]

    def step(op):
        return lambda: op(*leaves, labels.clamp(0)).logprob.sum().backward()

    assert watched(step(linear_logprob)).largest < n_tokens * n_rows <= watched(step(naive)).largest


@pytest.mark.parametrize("wanted, products", [((True, True), 8), ((True, False), 6), ((False, True), 6)])
def test_a_frozen_side_costs_no_matrix_products(wanted, products):
    hidden, weight, labels = problem()
    leaves = [x.requires_grad_(wants) for x, wants in zip((hidden, weight), wanted, strict=True)]
    seen = watched(lambda: linear_logprob(*leaves, labels, chunk=151).logprob.sum().backward())
    assert seen.products == products  # two chunks: forward, again, and each gradient
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_the_backward_pass_keeps_numbers_a_token_and_no_more():
    hidden, weight, labels = (x.requires_grad_() if x.is_floating_point() else x for x in problem())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_logprob(hidden, weight, labels.abs(), entropy=True, entropy_grad=True, chunk=64)
    assert {x.data_ptr() for x in saved if x.dim() == 2} == {hidden.data_ptr(), weight.data_ptr()}
    saved.clear()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = linear_logprob(hidden, weight, labels)
    assert not saved and out.logprob.grad_fn is None


@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_goes_straight_into_main_grad(zero_out, dtype):
    _, weight, labels = problem(dtype=dtype)
    leaf = torch.nn.Parameter(weight.clone())
    leaf.grad_added_to_main_grad, leaf.zero_out_wgrad = False, zero_out  # as Megatron's DDP marks its parameters
    main_grad = torch.full(weight.shape, 2.0)
    total = torch.zeros(weight.shape, dtype=torch.float64)
    for seed in range(3):  # over microbatches it stays float32
        states = problem(dtype=dtype, seed=seed)[0]
        linear_logprob(states, leaf, labels, chunk=64, main_grad=main_grad, valid_rows=301).logprob.sum().backward()
        exact = weight.double().requires_grad_()
        linear_logprob_reference(states, exact, labels).logprob.sum().backward()
        total += exact.grad
    assert leaf.grad_added_to_main_grad
    assert not zero_out or not leaf.grad.any()
    error = (main_grad.double() - 2 - total).norm() / total.norm()
    assert error <= 1e-6  # also for bfloat16: the products' sums are never rounded to it


BAD = {
    "temperature 0": ({"temperature": 0.0}, "temperature is 0.0; it must be a number from 1e-30 to 1e.30"),
    "temperature NaN": ({"temperature": math.nan}, "temperature is nan"),
    "temperature negative": ({"temperature": -1}, "temperature is -1.0"),
    "temperature infinite": ({"temperature": math.inf}, "temperature is inf"),
    "temperature of a token": (
        {"temperature": torch.ones(61).index_fill(0, torch.tensor(7), 0)},
        r"temperature\[7\] is 0.0",
    ),
    "temperature shape": ({"temperature": torch.ones(3)}, r"temperature has the shape \(3,\)"),
    "temperature gradient": ({"temperature": torch.ones(61, requires_grad=True)}, "detach it"),
    "valid rows": ({"valid_rows": 302}, "valid_rows is 302, but weight has 301 rows"),
    "chunk": ({"chunk": 0}, "chunk is 0"),
    "entropy": ({"entropy_grad": True}, "entropy_grad asks for"),
    "main grad dtype": ({"main_grad": torch.zeros(301, 40).bfloat16()}, "main_grad is torch.bfloat16; .* float32"),
    "vocab start": ({"vocab_start": -1}, "vocab_start is -1"),
    "computed weight": (
        {"weight": torch.zeros(301, 40, requires_grad=True) * 1, "main_grad": torch.zeros(301, 40)},
        "main_grad is of a parameter",
    ),
    "main grad": ({"main_grad": torch.zeros(3, 40)}, r"main_grad has the shape \(3, 40\)"),
    "impl": ({"impl": "cuda"}, "impl is 'cuda'; it must be auto, torch or triton"),
    "dtypes": ({"weight": torch.zeros(301, 40).bfloat16()}, "torch.float32 and torch.bfloat16; both must be the same"),
    "double": (
        {"hidden": torch.zeros(61, 40).double(), "weight": torch.zeros(301, 40).double()},
        "both must be the same of float32, bfloat16, float16",
    ),
    "width": ({"weight": torch.zeros(301, 41)}, r"shapes \(61, 40\) and \(301, 41\)"),
    "three dimensions": ({"hidden": torch.zeros(61, 1, 40)}, r"must be \[T, H\] and \[V, H\]"),
    "labels shape": ({"labels": torch.zeros(60, dtype=torch.long)}, "they must be 61 integers"),
    "labels dtype": ({"labels": torch.zeros(61)}, "they must be 61 integers"),
    "label beyond": ({"labels": torch.full((61,), 301)}, "label 301 is a row of the vocabulary that no rank has"),
    "label in padding": ({"labels": torch.full((61,), 299), "valid_rows": 299}, "label 299 .* go from 0 to 298"),
    "devices": ({"weight": torch.zeros(301, 40, device="meta")}, "on cpu, meta and cpu"),
    "label before": ({"vocab_start": 10}, r"label \d is a row .* that no rank has; .* go from 10 to 310"),
    "no rows": ({"valid_rows": 0}, "no rank has"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name):
    changes, message = BAD[name]
    arguments = dict(zip(("hidden", "weight", "labels"), problem(), strict=True)) | changes
    with pytest.raises(KernelError, match=message) as caught:
        linear_logprob(**arguments)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("linear_logprob: ")


@pytest.mark.parametrize("name", ["checkpoint", "offload"])
@pytest.mark.parametrize("zero_out", [False, True])
def test_main_grad_is_that_of_the_parameter_whatever_hooks_do_to_saved_tensors(name, zero_out):
    from torch.utils.checkpoint import checkpoint

    hidden, weight, labels = problem()
    leaf, main_grad = torch.nn.Parameter(weight.clone()), torch.zeros_like(weight)
    leaf.grad_added_to_main_grad, leaf.zero_out_wgrad = False, zero_out
    states = hidden.clone().requires_grad_()

    def logprob(states):
        return linear_logprob(states, leaf, labels, chunk=64, main_grad=main_grad).logprob

    if name == "checkpoint":
        out = checkpoint(logprob, states, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            out = logprob(states)
    out.sum().backward()
    expected = weight.clone().requires_grad_()
    linear_logprob(hidden, expected, labels, chunk=64).logprob.sum().backward()
    torch.testing.assert_close(main_grad, expected.grad)
    assert leaf.grad_added_to_main_grad and (not zero_out or not leaf.grad.any())


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_of_less_than_float32_are_refused(precision):
    hidden, weight, labels = problem()
    torch.set_float32_matmul_precision(precision)
    try:
        with pytest.raises(KernelError, match=r"float32 products on cpu .*set_float32_matmul_precision") as caught:
            linear_logprob(hidden, weight, labels)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "\n" not in str(caught.value)
    linear_logprob(hidden, weight, labels)


def test_an_entropy_without_gradient_may_be_changed_before_the_backward_pass():
    hidden, weight, labels = problem()
    leaf = weight.clone().requires_grad_()
    out = linear_logprob(hidden, leaf, labels.abs(), entropy=True)
    out.entropy.mul_(2)
    out.logprob.sum().backward()
    assert leaf.grad.any()


def test_the_temperature_of_an_ignored_token_is_not_looked_at():
    hidden, weight, labels = problem()
    temperature = torch.where(labels < 0, math.nan, 0.7)
    out = linear_logprob(hidden, weight, labels, temperature=temperature)
    torch.testing.assert_close(out.logprob, linear_logprob(hidden, weight, labels, temperature=0.7).logprob)
