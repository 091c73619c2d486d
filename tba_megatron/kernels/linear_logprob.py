"""Log-probs of the taken tokens from hidden states and the head's weight, without the logits ever being whole.

The logits of a chunk of the vocabulary are computed in float32 by the library's GEMM, reduced to a few numbers a token
by a row kernel, and dropped; the backward pass computes them again. Cutting the vocabulary and not the tokens writes
each row of the weight's gradient once. Tensor ranks hold contiguous rows of the vocabulary and exchange [T] numbers.

Logits are never rounded to the model's dtype: trajectory balance squares sums of thousands of log-probs, and bfloat16
logits put nats of noise into such a sum. T tokens, H hidden size, V rows of this rank's shard of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tba_megatron.errors import KernelError
from tba_megatron.kernels import torch_rows
from tba_megatron.kernels.back_end import Impl, uses_triton
from tba_megatron.kernels.torch_rows import Upstream, new_statistics, rescale

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}  # float32 logits of a chunk: what a cache holds; what a GEMM needs
MIN_COLUMNS = 256
FAR = 1 << 62
TEMPERATURES = (1e-30, 1e30)  # their reciprocals are float32 numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobOut:
    """Float32 [T] each, in nats, 0 where the label is ignored; the same bits on every tensor rank."""

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor | None  # log of the sum of exp(logits / temperature); never differentiable


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    valid_rows: int | None = None,
    reduce_hidden_grad: bool = True,
    entropy: bool = False,
    entropy_grad: bool = False,
    lse: bool = False,
    impl: Impl = "auto",
    chunk: int | None = None,
    main_grad: Tensor | None = None,
) -> LogprobOut:
    """log softmax(hidden weight^T / temperature)[label] for each token.

    ``hidden`` [T, H] and ``weight`` [V, H] have one dtype of float32, bfloat16 and float16, of which the last needs a
    loss that is scaled for it. ``labels`` [T] are global ids; negative ones are ignored, whatever the hidden state and
    the temperature. ``temperature`` is a number or [T].

    ``weight`` holds the rows from ``vocab_start`` on; those from ``valid_rows`` on are padding, which never gets
    probability nor gradient. ``tp_group`` holds the other rows; all its ranks call with the same hidden and labels.
    ``reduce_hidden_grad`` sums the gradient of ``hidden`` over it; with sequence parallelism say False, where the
    gather's backward pass does.

    ``entropy`` of each distribution has a gradient, as a bonus needs, only with ``entropy_grad`` too. ``chunk`` is how
    many columns of the vocabulary are computed at a time. With ``main_grad`` [V, H], float32, the gradient of the
    parameter ``weight`` is added to it and ``weight.grad_added_to_main_grad`` is set, as Megatron's
    LinearWithGradAccumulationAndAsyncCommunication does (0.16.1). What autograd gets instead is to be dropped: memory
    that was never written, or zeros where ``weight.zero_out_wgrad`` asks for them.

    KernelError for a temperature that is not positive, a label that no rank holds, and arguments of the wrong shape or
    dtype: the same on all ranks of ``tp_group`` that are given the same.
    """
    _check(hidden, weight, labels, vocab_start, valid_rows, entropy, entropy_grad, chunk, main_grad)
    _check_temperature(temperature, labels)
    taken = labels >= 0
    n_taken = int(taken.sum())
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(labels))
    rows = None if n_taken == len(labels) else taken.nonzero()[:, 0]
    if rows is not None:
        hidden, labels, temperatures = hidden[rows], labels[rows], temperatures[rows]
    call = _Call(
        tp_group=None if tp_group is None or tp_group.size() == 1 else tp_group,
        vocab_start=vocab_start,
        n_rows=weight.shape[0] if valid_rows is None else valid_rows,
        reduce_hidden_grad=reduce_hidden_grad,
        entropy=entropy,
        entropy_grad=entropy_grad,
        kernels=_row_kernels(impl, hidden.device),
        chunk=chunk,
        main_grad=main_grad,
        parameter=None if main_grad is None else weight,
    )
    with _full_precision(hidden.device):
        logprob, entropies, lses = _LinearLogprob.apply(  # type: ignore[misc]
            hidden, weight, labels.long(), temperatures.reciprocal(), call
        )

    def spread(values: Tensor) -> Tensor:
        return values if rows is None else values.new_zeros(len(taken)).index_put((rows,), values)

    return LogprobOut(
        logprob=spread(logprob), entropy=spread(entropies) if entropy else None, lse=spread(lses) if lse else None
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """The settings of one call."""

    tp_group: dist.ProcessGroup | None  # None: this rank holds the whole vocabulary
    vocab_start: int
    n_rows: int  # of this rank, padding excluded
    reduce_hidden_grad: bool
    entropy: bool
    entropy_grad: bool
    kernels: ModuleType
    chunk: int | None
    main_grad: Tensor | None
    parameter: Tensor | None  # with main_grad the weight itself: hooks on saved tensors (checkpoint) give back another

    def chunks(self, n_tokens: int, device: torch.device) -> list[slice]:
        """This rank's columns of the vocabulary, in pieces; none where there is no token."""
        if not n_tokens:
            return []
        columns = self.chunk
        if columns is None:
            columns = max(MIN_COLUMNS, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * n_tokens))
            columns = min(columns, max(1, -(-self.n_rows // 2)))  # logits are never whole, however small
        return [slice(first, min(first + columns, self.n_rows)) for first in range(0, self.n_rows, columns)]


class _LinearLogprob(torch.autograd.Function):
    """Without ignored tokens: (logprob, entropy or None, lse), float32 [T] each."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, inverse_temperature: Tensor, call: _Call):
        operand = _operand(hidden)
        statistics = new_statistics(len(hidden), hidden.device, entropy=call.entropy)
        for piece in call.chunks(len(hidden), hidden.device):
            logits = _matmul(operand, _operand(weight[piece]).t())
            columns = labels - (call.vocab_start + piece.start)
            call.kernels.update_statistics(statistics, logits, columns, inverse_temperature)
            del logits  # or the next chunk's are made while these are held
        if call.tp_group is not None and len(hidden):
            _join(statistics, call.tp_group)
        _check_labels(labels, statistics.n_labels, call)
        log_sum = statistics.exp_sum.log()
        # Differences with the maximum before the logarithm is taken off: both stay small where logits are large.
        logprob = (statistics.label_logit - statistics.maximum) - log_sum
        lse = statistics.maximum + log_sum
        entropy = None if statistics.moment is None else log_sum - statistics.moment / statistics.exp_sum
        ctx.save_for_backward(
            *(hidden, weight, labels, inverse_temperature, statistics.maximum, statistics.exp_sum),
            entropy if call.entropy_grad else None,
        )
        ctx.call = call
        ctx.mark_non_differentiable(lse, *([] if entropy is None or call.entropy_grad else [entropy]))
        return logprob, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor, entropy_grad: Tensor | None, _lse_grad: Tensor | None):
        with _full_precision(logprob_grad.device):
            return _gradients(ctx, logprob_grad, entropy_grad)


def _gradients(ctx: Any, logprob_grad: Tensor, entropy_grad: Tensor | None):
    """The gradient of each argument of ``_LinearLogprob.forward``."""
    hidden, weight, labels, inverse_temperature, maximum, exp_sum, entropy = ctx.saved_tensors
    call: _Call = ctx.call
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    upstream = Upstream(
        maximum=maximum,
        exp_sum=exp_sum,
        entropy=entropy,
        logprob_grad=logprob_grad.contiguous(),
        entropy_grad=entropy_grad.contiguous() if call.entropy_grad and entropy_grad is not None else None,
    )
    operand = _operand(hidden)
    # What the library multiplies: low precision where it takes it, as the model's other gradients are.
    dtype = hidden.dtype if call.kernels is not torch_rows else operand.dtype
    hidden_grad = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wants_hidden else None
    weight_grad = call.main_grad
    if wants_weight and weight_grad is None:
        weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for piece in call.chunks(len(hidden), hidden.device):
        rows = _operand(weight[piece])
        logits = _matmul(operand, rows.t())
        columns = labels - (call.vocab_start + piece.start)
        gradients = call.kernels.logit_gradients(logits, columns, inverse_temperature, upstream, dtype)
        del logits
        if hidden_grad is not None:
            _add_matmul(hidden_grad, gradients, rows)
        if wants_weight and weight_grad is not None:
            _add_matmul(weight_grad[piece], gradients.t(), operand)
        del gradients
    if hidden_grad is not None and len(hidden) and call.tp_group is not None and call.reduce_hidden_grad:
        dist.all_reduce(hidden_grad, group=call.tp_group)
    return (
        None if hidden_grad is None else hidden_grad.to(hidden.dtype),
        (weight_grad if call.parameter is None else _stand_in(call.parameter)) if wants_weight else None,
        None,
        None,
        None,
    )


def _join(statistics: torch_rows.Statistics, group: dist.ProcessGroup) -> None:
    """The statistics of the whole vocabulary on every rank: a maximum and a sum over [T] numbers."""
    maximum = statistics.maximum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    rescale(statistics, maximum)
    sums = [statistics.exp_sum, statistics.label_logit, statistics.n_labels]
    sums += [] if statistics.moment is None else [statistics.moment]
    stacked = torch.stack(sums)
    dist.all_reduce(stacked, group=group)
    for mine, total in zip(sums, stacked, strict=True):
        mine.copy_(total)


def _stand_in(parameter: Tensor) -> Tensor:
    """What autograd gets for a gradient that is in ``main_grad`` already."""
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Megatron's hook adds weight.grad all the same where zero_out_wgrad is set: a tied embedding's part is in it.
    return torch.zeros_like(parameter) if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)


def _full_precision(device: torch.device) -> torch.autocast:
    """Autocast would compute the products in low precision, results included."""
    return torch.autocast(device.type, enabled=False)


def _operand(matrix: Tensor) -> Tensor:
    """``matrix`` as ``_matmul`` wants it: a CPU has no product of low-precision matrices with a float32 result."""
    return matrix if matrix.is_cuda else matrix.float()


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, accumulated in float32."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to ``total``, rounded once if that is in low precision."""
    if total.dtype == a.dtype == b.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total.add_(_matmul(a, b))


def _row_kernels(impl: Impl, device: torch.device) -> ModuleType:
    if not uses_triton("linear_logprob", impl, device):
        return torch_rows
    from tba_megatron.kernels import triton_rows

    return triton_rows


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_start: int,
    valid_rows: int | None,
    entropy: bool,
    entropy_grad: bool,
    chunk: int | None,
    main_grad: Tensor | None,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise KernelError(f"linear_logprob: hidden and weight have the shapes {shapes}; they must be [T, H] and [V, H]")
    if hidden.dtype != weight.dtype or hidden.dtype not in DTYPES:
        dtypes = f"{hidden.dtype} and {weight.dtype}"
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise KernelError(f"linear_logprob: hidden and weight are {dtypes}; both must be the same of {allowed}")
    if not hidden.device == weight.device == labels.device:
        devices = f"{hidden.device}, {weight.device} and {labels.device}"
        raise KernelError(f"linear_logprob: hidden, weight and labels are on {devices}; they must be on one device")
    if labels.shape != hidden.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        found = f"{tuple(labels.shape)} of {labels.dtype}"
        raise KernelError(f"linear_logprob: labels are {found}; they must be {len(hidden)} integers, one a token")
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        library: Any = torch.backends.cuda if hidden.is_cuda else torch.backends.mkldnn
        if (precision := library.matmul.fp32_precision) not in ("none", "ieee"):
            raise KernelError(
                f"linear_logprob: float32 products on {hidden.device.type} have the precision {precision!r}, which "
                "rounds logits; call torch.set_float32_matmul_precision('highest')"
            )
    if vocab_start < 0:
        raise KernelError(f"linear_logprob: vocab_start is {vocab_start}; it is the id of the first row of weight")
    if valid_rows is not None and not 0 <= valid_rows <= weight.shape[0]:
        raise KernelError(f"linear_logprob: valid_rows is {valid_rows}, but weight has {weight.shape[0]} rows")
    if chunk is not None and chunk < 1:
        raise KernelError(f"linear_logprob: chunk is {chunk}; at least one column must be computed at a time")
    if entropy_grad and not entropy:
        raise KernelError("linear_logprob: entropy_grad asks for the gradient of an entropy that entropy=False omits")
    if main_grad is not None and main_grad.shape != weight.shape:
        shapes = f"{tuple(main_grad.shape)}, but weight {tuple(weight.shape)}"
        raise KernelError(f"linear_logprob: main_grad has the shape {shapes}; they must be equal")
    if main_grad is not None and weight.requires_grad and not weight.is_leaf:
        raise KernelError("linear_logprob: main_grad is of a parameter, but weight was computed from one; leave it out")
    if main_grad is not None and main_grad.dtype != torch.float32:
        raise KernelError(f"linear_logprob: main_grad is {main_grad.dtype}; it must be float32")


def _check_temperature(temperature: float | Tensor, labels: Tensor) -> None:
    if isinstance(temperature, Tensor) and temperature.requires_grad:
        raise KernelError("linear_logprob: temperature requires a gradient, which is not computed; detach it")
    least, most = TEMPERATURES
    if isinstance(temperature, Tensor) and temperature.dim():
        if temperature.shape != labels.shape:
            shapes = f"{tuple(temperature.shape)}; it must be a number or [{len(labels)}]"
            raise KernelError(f"linear_logprob: temperature has the shape {shapes}")
        bad = (labels >= 0) & ~((temperature >= least) & (temperature <= most))  # NaN is neither
        if not bad.any():
            return
        position = int(bad.nonzero()[0, 0])
        what = f"temperature[{position}] is {float(temperature[position])}"
    else:
        if least <= (value := float(temperature)) <= most:
            return
        what = f"temperature is {value}"
    raise KernelError(
        f"linear_logprob: {what}; it must be a number from {least} to {most} (greedy choice has no log-probs)"
    )


def _check_labels(labels: Tensor, n_holders: Tensor, call: _Call) -> None:
    """KernelError unless each label was found in exactly one shard; every rank comes to the same conclusion."""
    wrong = n_holders != 1
    if not wrong.any():
        return
    position = int(wrong.nonzero()[0, 0])
    holders = int(n_holders[position])
    # A rank of padding alone has no first row; its last one is before all others.
    first_and_last = (call.vocab_start, 1 - call.vocab_start - call.n_rows) if call.n_rows else (FAR, FAR)
    ends = labels.new_tensor(first_and_last)
    if call.tp_group is not None:
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=call.tp_group)
    where = "no rank has" if holders == 0 else f"{holders} ranks have (is vocab_start the same on them?)"
    rows = f"go from {int(ends[0])} to {-int(ends[1])}" if ends[0] < FAR else "do not exist"
    raise KernelError(
        f"linear_logprob: label {int(labels[position])} is a row of the vocabulary that {where}; rows that are no "
        f"padding {rows}, and negative labels are ignored"
    )
