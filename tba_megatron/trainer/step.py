"""One optimizer step, and forward-only passes, through Megatron's pipeline schedules.

All ranks of a replica walk the same packed microbatches. R response positions, S sequences.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from tba_megatron.dist import Groups
from tba_megatron.kernels.balance import segment_sum
from tba_megatron.loss.base import Loss, LossInputs, LossOutput, join_inputs, loss_inputs, mean_statistics
from tba_megatron.loss.statistics import entropy_sums
from tba_megatron.packing import padding
from tba_megatron.trainer.head import HeadSettings, forward_responses, nobody
from tba_megatron.trainer.log_z_step import LogZStep
from tba_megatron.trainer.model import Batch, Policy, to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What an optimizer step did. ``statistics`` and ``histograms`` (``LossOutput``) are over the whole global batch,
    known on rank 0 only."""

    skipped: bool
    grad_norm: float
    learning_rate: float
    statistics: Mapping[str, float]
    histograms: Mapping[str, Sequence[float]] = field(default_factory=dict)


def _run_schedule(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[Batch],
    on_logprobs: Callable[[Tensor, Batch], tuple[Tensor, object]],
    head: HeadSettings,
    groups: Groups,
    *,
    forward_only: bool,
    see: Callable[[Tensor, Batch], None] = nobody,
) -> list:
    """Megatron's schedule for this pipeline size; what ``on_logprobs`` made of each forward pass, on the last stage.

    Before it ``see`` is shown the last hidden states, there too.
    """
    n_batches = len(batches)
    batches = fill_up(batches, len(chunks), groups)

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module):
        batch = next(batches)
        return forward_responses(model, batch, head, groups, see), lambda logprobs: on_logprobs(logprobs, batch)

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=max(batch.tokens.shape[1] for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return outputs[:n_batches]


def fill_up(batches: Sequence[Batch], n_chunks: int, groups: Groups) -> Sequence[Batch]:
    """``batches`` and, with interleaved stages, microbatches of padding: that schedule (0.16.1) takes multiples of
    the pipeline size only. They have no responses, so they add nothing to loss or gradient."""
    n_missing = -len(batches) % groups.pp_size if n_chunks > 1 else 0
    return [*batches, *[to_device(padding(groups.tp_size), groups.device)] * n_missing]


def sequence_logprobs(
    chunks: Sequence[torch.nn.Module], batches: Sequence[Batch], head: HeadSettings, groups: Groups
) -> list[Tensor]:
    """Sum of the completion's log-probs for each sequence: float64 [S] a microbatch, on the last stage only."""

    def on_logprobs(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        sums = segment_sum(logprobs, batch.sequence_index, batch.host.n_sequences)
        return logprobs.new_zeros(()), sums.clone()

    with torch.no_grad():
        return _run_schedule(chunks, batches, on_logprobs, replace(head, entropy=False), groups, forward_only=True)


def token_logprobs(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[Batch],
    head: HeadSettings,
    groups: Groups,
    see: Callable[[Tensor, Batch], None] = nobody,
) -> list[Tensor]:
    """Log-probs of the response tokens: float32 [R] a microbatch, on the last stage only."""

    def on_logprobs(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return logprobs.new_zeros(()), logprobs.clone()

    with torch.no_grad():
        without = replace(head, entropy=False)
        return _run_schedule(chunks, batches, on_logprobs, without, groups, forward_only=True, see=see)


def update(
    policy: Policy,
    batches: Sequence[Batch],
    loss: Loss,
    normaliser: float,
    head: HeadSettings,
    groups: Groups,
    *,
    reference_logprobs: Sequence[Tensor] = (),
) -> Update:
    """Forward, backward and one optimizer step over this replica's ``batches``.

    ``normaliser`` is the global number of rollouts (or tokens, for the warm start) that the loss is divided by, so
    the gradient does not depend on how groups fall into microbatches and replicas. A non-finite gradient skips the
    step: neither a weight nor log Z changes, on any rank; the schedule goes on. ``reference_logprobs``, [R] a batch on
    the last stage, are for a loss that reads them by token.
    """
    for chunk in policy.ddp:
        chunk.train()
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    # Megatron averages over microbatches and over data-parallel ranks; ours is a sum with one global normaliser.
    scale = len(fill_up(batches, len(policy.chunks), groups)) * groups.dp_size

    assert policy.log_z is not None or not loss.needs.log_z, "a loss that needs log Z trains a policy without it"
    log_z = LogZStep(policy.log_z if loss.needs.log_z else None, groups)
    # On other stages than the last there are none.
    by_batch = dict(zip(map(id, batches), reference_logprobs, strict=True)) if reference_logprobs else {}

    def inputs_of(logprobs: Tensor, batch: Batch) -> LossInputs:
        # A microbatch of padding is none of ``batches``, and has no response.
        reference = by_batch.get(id(batch), logprobs.detach()) if by_batch else None
        return loss_inputs(
            batch.host,
            logprobs,
            normaliser=normaliser,
            reference_logprob_T=reference,
            log_z_S=log_z.values(batch),
        )

    if log_z.starts:
        _start_log_z(policy, batches, loss, inputs_of, log_z, head, groups)
    split = _split_groups(policy, batches, loss, inputs_of, log_z, head, groups)

    def on_logprobs(found: Tensor, batch: Batch) -> tuple[Tensor, LossOutput]:
        logprobs = found[0] if head.entropy else found
        if batch.host.split_group < 0:
            output = loss(inputs_of(logprobs, batch))
            log_z.add([batch], output)
        else:
            output = LossOutput(loss=(logprobs * split.gradients[id(batch)]).sum(), sums={})
        if head.entropy:
            copies_S = torch.as_tensor(batch.host.copies, dtype=torch.float64, device=found.device)
            sums = {**output.sums, **entropy_sums(found[1], copies_S, batch.sequence_index)}
            output = replace(output, sums=sums)
        return (output.loss * scale).float(), output

    parts = _run_schedule(policy.ddp, batches, on_logprobs, head, groups, forward_only=False, see=log_z.see)
    # Before the update, so that step k of a warm-up of w steps is made at k / w of the peak, and none at rate 0.
    policy.scheduler.step(1)
    norm, skipped = _apply_gradient(policy, others_finite=log_z.is_finite())
    log_z.finish(skipped=skipped)
    statistics, histograms = _reduce_statistics(parts + split.outputs, groups)
    return Update(
        skipped=skipped,
        grad_norm=norm,
        learning_rate=policy.optimizer.param_groups[0]["lr"],
        statistics=statistics,
        histograms=histograms,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SplitGroups:
    """What the first of two passes finds about groups larger than a microbatch; on the last stage only."""

    gradients: Mapping[int, Tensor]  # id of the batch -> d loss / d log-prob of its response tokens, [R]
    outputs: list[LossOutput]  # one a group


def _split_groups(
    policy: Policy,
    batches: Sequence[Batch],
    loss: Loss,
    inputs_of: Callable[[Tensor, Batch], LossInputs],
    log_z: LogZStep,
    head: HeadSettings,
    groups: Groups,
) -> _SplitGroups:
    """The exact two-pass mode: log-probs of all parts first, without gradient; then the loss of each whole group.

    Its gradient with respect to each log-prob makes the second pass linear, so every microbatch of that pass stands
    alone. No step lies between the passes and there is no dropout, so the log-probs are the same in both.
    """
    parts = [batch for batch in batches if batch.host.split_group >= 0]
    if not parts:
        return _SplitGroups(gradients={}, outputs=[])
    logprobs = token_logprobs(policy.ddp, parts, head, groups, log_z.see)
    by_group: dict[int, list[tuple[Batch, Tensor]]] = defaultdict(list)
    for batch, logprobs_R in zip(parts, logprobs, strict=False):  # none on other stages than the last
        by_group[batch.host.split_group].append((batch, logprobs_R.requires_grad_()))
    gradients: dict[int, Tensor] = {}
    outputs = []
    for members in by_group.values():
        inputs = [inputs_of(leaf, batch) for batch, leaf in members]
        output = loss(join_inputs(inputs))
        log_z.add([batch for batch, _ in members], output)
        found = torch.autograd.grad(output.loss, [leaf for _, leaf in members])
        gradients |= {id(batch): gradient for (batch, _), gradient in zip(members, found, strict=True)}
        outputs.append(replace(output, loss=output.loss.detach()))
    return _SplitGroups(gradients=gradients, outputs=outputs)


def _start_log_z(
    policy: Policy,
    batches: Sequence[Batch],
    loss: Loss,
    inputs_of: Callable[[Tensor, Batch], LossInputs],
    log_z: LogZStep,
    head: HeadSettings,
    groups: Groups,
) -> None:
    """Before the first step of a run: a pass without gradient that finds where log Z starts. The gradient of a
    sequence's log Z has nothing of the rest of its group, so parts of a group are as good as the whole."""
    logprobs = token_logprobs(policy.ddp, batches, head, groups, log_z.see)
    for batch, logprobs_R in zip(batches, logprobs, strict=False):  # none on other stages than the last
        log_z.add([batch], loss(inputs_of(logprobs_R, batch)))
    log_z.start()


def _apply_gradient(policy: Policy, *, others_finite: bool) -> tuple[float, bool]:
    """(global gradient norm, skipped). The norm is reduced over all ranks, so all ranks agree. ``others_finite``:
    whether what is updated beside the weights has a finite gradient, the same on all ranks."""
    optimizer = policy.optimizer
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm() or 0.0)
    if not (math.isfinite(norm) and others_finite):
        return norm, True
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.config.clip_grad > 0.0 and not getattr(part, "is_stub_optimizer", False):
            clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=part.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm, False


def _reduce_statistics(parts: Sequence[LossOutput], groups: Groups) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Means and maxima over the global batch, and histograms, on rank 0; empty elsewhere."""
    sums: Counter[str] = Counter()
    maxima: dict[str, float] = {}
    histograms: dict[str, list[float]] = {}
    mine = [
        (
            {k: float(v) for k, v in p.sums.items()},
            {k: float(v) for k, v in p.maxima.items()},
            {k: v.tolist() for k, v in p.histograms.items()},
        )
        for p in parts
    ]
    everyone: list[list] = [mine if groups.is_leader else []]
    if groups.info.world_size > 1:
        everyone = [[] for _ in range(groups.info.world_size)]
        dist.gather_object(
            mine if groups.is_leader else [],
            everyone if groups.rank == 0 else None,
            dst=0,
            group=groups.world,
        )
    for part_sums, part_maxima, part_counts in (part for parts in everyone for part in parts):
        sums.update(part_sums)
        maxima.update({k: max(v, maxima[k]) if k in maxima else v for k, v in part_maxima.items()})
        for name, counts in part_counts.items():
            before = histograms.get(name, [0.0] * len(counts))
            histograms[name] = [a + b for a, b in zip(before, counts, strict=True)]
    return ({**mean_statistics(sums), **maxima} if sums else {}), histograms
