"""The trainer's head against Megatron's output layer, through the real GPTModel.

T packed tokens, R response positions, H hidden size, V rows of the vocabulary of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import stock_head
import tiny
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tba_megatron.errors import KernelError
from tba_megatron.kernels.reference import linear_logprob_reference
from tba_megatron.models.registry import read_model
from tba_megatron.packing import pack, padding
from tba_megatron.trainer import head as head_room
from tba_megatron.trainer import step
from tba_megatron.trainer.head import HeadSettings, forward_responses
from tba_megatron.trainer.load_hf import load_hf, load_random
from tba_megatron.trainer.model import build_chunks, build_policy, forward, named_parameters, to_device

VOCAB = 150  # of two ranks the first has 128, with labels on both
LARGE_VOCAB = 16_000
GROUPS = tiny.train_groups(4, seed=5, vocab=VOCAB)
LAYOUTS: dict[str, dict] = {
    "one_rank": {},
    "tp2": {"tp": 2},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_pp2_sequence_parallel": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
FAST = [
    *[("qwen2", True, layout) for layout in LAYOUTS if layout != "tp2_pp2"],
    ("qwen2", False, "tp2_pp2"),
    ("qwen2", False, "one_rank"),
    ("gpt2", True, "tp2_sequence_parallel"),
    ("gpt2", False, "pp2"),
]
ALL = [(kind, tied, layout) for kind in ("qwen2", "gpt2") for tied in (True, False) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def save(kind: str, tied: bool, seed: int = 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "VOCAB", VOCAB)
            return tiny.save_model(root / f"{kind}-{tied}-{seed}", kind, tied=tied, seed=seed)

    return save


def sizes_of(layout: dict) -> dict[str, int]:
    return {name: size for name, size in layout.items() if name in ("tp", "pp", "dp")}


@dataclass(kw_only=True)
class Model:
    """One rank's part of a model that was read from a folder, or drawn with ``vocab`` tokens."""

    chunks: tuple
    ddp: tuple  # empty without DDP
    policy: Any
    head: Any


def build(groups, trainer, folder, *, ddp: bool = True, frozen: bool = False, vocab: int | None = None) -> Model:
    architecture, shape = read_model(folder)
    shape = replace(shape, vocab_size=vocab or shape.vocab_size)
    chunks = build_chunks(shape, trainer, groups)
    if vocab:
        load_random(chunks, architecture, shape, 0, groups)
    else:
        load_hf(chunks, architecture, shape, folder, groups)
    if frozen and chunks[-1].post_process:
        cast(Tensor, chunks[-1].output_layer.weight).requires_grad_(False)
    policy = build_policy(chunks, trainer, trainer.optimizer, 10) if ddp else None
    if not ddp:
        chunks[0].config.finalize_model_grads_func = None  # Megatron's asks DDP
    head = HeadSettings(temperature=0.7, vocab_size=shape.vocab_size)
    return Model(chunks=chunks, ddp=policy.ddp if policy else (), policy=policy, head=head)


def batches_of(groups, trainer, *, train_groups=GROUPS, tokens: int = 40) -> list:
    """Some microbatches; the second has no response position."""
    packs = pack(train_groups, tokens, groups.tp_size if trainer.sequence_parallel else 1)
    microbatches = [made.microbatch for made in packs]
    microbatches.insert(1, padding(2 * groups.tp_size))
    return [to_device(microbatch, groups.device) for microbatch in microbatches]


@dataclass(kw_only=True)
class Found:
    """Of one rank."""

    logprobs: list[Tensor]  # [R] of each microbatch, on the last stage
    gradients: dict[str, Tensor]
    added: bool  # whether the head's weight says that its gradient is in main_grad


def gradients_of(model: Model, batches: Sequence, compute: Callable, groups) -> Found:
    """Through Megatron's schedule: a weighted sum of log-probs, backward, and all that follows but the optimizer."""
    for wrapped in model.ddp:
        wrapped.zero_grad_buffer()
    parameters = named_parameters(model.chunks)
    for parameter in parameters.values():
        parameter.grad = None
    logprobs: list[Tensor] = []

    def on_logprobs(found: Tensor):
        assert found.dtype == torch.float32
        weights = torch.randn(len(found), generator=torch.Generator().manual_seed(len(logprobs)))
        logprobs.append(found.detach().clone())
        return (found * weights).sum(), None

    def forward_step(data, chunk):
        return compute(chunk, next(data), model.head, groups), on_logprobs

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches)],
        model=list(model.ddp or model.chunks),
        num_microbatches=len(batches),
        seq_length=max(batch.tokens.shape[1] for batch in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    gradients = {
        name: cast(Any, parameter.main_grad if model.ddp else parameter.grad).clone()  # type: ignore[attr-defined]
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }
    added = [getattr(p, "grad_added_to_main_grad", False) for p in parameters.values()]
    return Found(logprobs=logprobs, gradients=gradients, added=any(added))


def both_heads(groups, trainer, folder, ddp: bool) -> tuple[Found, Found]:
    """(the trainer's head, the stock one)."""
    model = build(groups, trainer, folder, ddp=ddp)
    batches = batches_of(groups, trainer)
    assert len(batches) > 2 and not len(batches[1].rows)
    ours, stock = (
        gradients_of(model, batches, function, groups) for function in (forward_responses, stock_head.forward_responses)
    )
    return ours, stock


def with_and_without_ddp(groups, trainer, folder) -> dict[str, tuple[Found, Found]]:
    return {"ddp": both_heads(groups, trainer, folder, True), "bare": both_heads(groups, trainer, folder, False)}


def off_by(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to what was expected."""
    difference = float((found.double() - expected.double()).norm())
    return difference and difference / float(expected.double().norm())


@pytest.mark.parametrize(
    ("kind", "tied", "layout"),
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in ALL],
)
def test_log_probs_and_every_gradient_are_those_of_the_stock_head(kind, tied, layout, folder_of):
    trainer = tiny.trainer_config(**LAYOUTS[layout])
    ranks = run_ranks(with_and_without_ddp, trainer, folder_of(kind, tied), **sizes_of(LAYOUTS[layout]))
    for way in ("ddp", "bare"):
        for ours, stock in (rank[way] for rank in ranks):
            assert ours.gradients.keys() == stock.gradients.keys()
            for name, gradient in ours.gradients.items():
                assert off_by(gradient, stock.gradients[name]) <= 1e-6, name
            for found, expected in zip(ours.logprobs, stock.logprobs, strict=True):
                assert off_by(found, expected) <= 1e-6
            # On the last stage, and with a main_grad to add to.
            assert ours.added == (bool(ours.logprobs) and way == "ddp") and not stock.added
    assert any(ours.logprobs for ours, _ in (rank["ddp"] for rank in ranks))


def test_a_tied_embedding_gets_the_gradient_of_both_its_uses_on_one_stage_and_on_two(folder_of, tmp_path):
    tied = folder_of("qwen2", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "VOCAB", VOCAB)
        untied = tiny.hf_model("qwen2", tied=False)
    untied.load_state_dict(tiny.load_hf_model(tied).state_dict())
    untied.save_pretrained(tmp_path / "untied")
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"

    ((parts, _),) = run_ranks(both_heads, tiny.trainer_config(), tmp_path / "untied", False)
    expected = parts.gradients[embedding] + parts.gradients[output]
    for part in (embedding, output):
        assert off_by(parts.gradients[part], expected) > 0.1
    ((one_stage, _),) = run_ranks(both_heads, tiny.trainer_config(), tied, True)
    assert output not in one_stage.gradients and off_by(one_stage.gradients[embedding], expected) <= 1e-6
    (first, _), (last, _) = run_ranks(both_heads, tiny.trainer_config(pp=2), tied, True, pp=2)
    assert off_by(first.gradients[embedding], expected) <= 1e-6
    assert off_by(last.gradients[output], expected) <= 1e-6


def in_float64(groups, trainer, folder) -> dict[str, list[float]]:
    """Errors of log-probs: ``found`` and ``stock`` by microbatch, against float64 on the head's own input.

    Errors of gradients against the stock head under ``gradients``, one a parameter.
    """
    model = build(groups, trainer, folder)
    batches = [batch for batch in batches_of(groups, trainer) if len(batch.rows)]
    seen: list[Tensor] = []
    layer = model.chunks[0].output_layer
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    ours = gradients_of(model, batches, forward_responses, groups)
    hook.remove()
    stock = gradients_of(model, batches, stock_head.forward_responses, groups)
    weight = model.chunks[0].shared_embedding_or_output_weight().detach()
    shards = [torch.empty_like(weight) for _ in range(groups.tp_size)]
    dist.all_gather(shards, weight, group=cast(Any, parallel_state.get_tensor_model_parallel_group()))
    errors: dict[str, list[float]] = {"found": [], "stock": []}
    for hidden, batch, *logprobs in zip(seen, batches, ours.logprobs, stock.logprobs, strict=True):
        exact = linear_logprob_reference(
            hidden[batch.rows, 0],
            torch.cat(shards),
            batch.labels,
            temperature=model.head.temperature,
            valid_rows=model.head.vocab_size,
        ).logprob
        for name, found in zip(errors, logprobs, strict=True):
            errors[name].append(float((found - exact).abs().max()))
    gradients = [off_by(ours.gradients[name], stock.gradients[name]) for name in ours.gradients]
    return errors | {"gradients": gradients}


@pytest.mark.parametrize("layout", ["one_rank", "tp2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_exact_for_the_hidden_states_of_either_dtype(dtype, layout, folder_of):
    trainer = tiny.trainer_config(**LAYOUTS[layout], dtype=dtype)
    for errors in run_ranks(in_float64, trainer, folder_of("qwen2", True), **sizes_of(LAYOUTS[layout])):
        assert max(errors["found"]) <= 5e-6
        if dtype == "bfloat16":  # of which the stock head rounds the logits
            assert min(errors["stock"]) > 1e-3
            assert max(errors["gradients"]) <= 3e-2


class Made(TorchDispatchMode):
    """The shapes of the tensors that operations give, and those that products of matrices give."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0  # elements
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *[leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]])
        if func.__name__.split(".")[0] in ("mm", "addmm", "addmm_", "bmm"):
            self.products.append(tuple(out.shape))
        return out


def products(groups, trainer, folder, frozen: bool, ddp: bool) -> tuple[Found, int]:
    """What a step finds, and how many products have the shape of a half of the head's weight, one of two chunks."""
    model = build(groups, trainer, folder, frozen=frozen, ddp=ddp)
    batches = batches_of(groups, trainer)
    with Made() as made:
        found = gradients_of(model, batches, forward_responses, groups)
    rows = min(VOCAB, model.chunks[0].output_layer.weight.shape[0])
    return found, made.products.count((rows // 2, model.chunks[0].config.hidden_size))


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "bare"])
def test_a_frozen_head_multiplies_nothing_for_its_weight(ddp, folder_of):
    folder, trainer = folder_of("qwen2", False), tiny.trainer_config()
    ((trained, n_trained),) = run_ranks(products, trainer, folder, False, ddp)
    ((frozen, n_frozen),) = run_ranks(products, trainer, folder, True, ddp)
    assert (n_trained, n_frozen) == (2 * sum(len(found) > 0 for found in trained.logprobs), 0)
    assert trained.gradients.keys() - frozen.gradients.keys() == {"output_layer.weight"}
    assert all(torch.equal(gradient, trained.gradients[name]) for name, gradient in frozen.gradients.items())


def saved(groups, trainer, folder) -> dict[str, list[int]]:
    """The elements of each tensor that a forward pass keeps for a backward pass."""
    model = build(groups, trainer, folder)
    batch = batches_of(groups, trainer)[0]
    kept: dict[str, list[int]] = {}
    for name, enabled in (("grad", True), ("no_grad", False)):
        sizes = kept[name] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.set_grad_enabled(enabled), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            forward_responses(model.ddp[0], batch, model.head, groups)
    return kept


@pytest.mark.parametrize("layout", ["one_rank", "tp2_sequence_parallel"])
def test_nothing_is_saved_where_no_gradient_is_wanted(layout, folder_of):
    folder, sizes = folder_of("qwen2", True), sizes_of(LAYOUTS[layout])
    for kept in run_ranks(saved, tiny.trainer_config(**LAYOUTS[layout]), folder, **sizes):
        assert kept["grad"] and not kept["no_grad"]


def many_tokens(groups, trainer, folder) -> list[tuple[Found, float]]:
    """Of either head, its largest tensor as a share of R x V, in one step of a vocabulary of several chunks."""
    model = build(groups, trainer, folder, vocab=LARGE_VOCAB)
    batches = batches_of(groups, trainer, train_groups=tiny.train_groups(8, seed=1, vocab=LARGE_VOCAB), tokens=1000)
    rows = model.chunks[0].shared_embedding_or_output_weight().shape[0]
    logits = max(len(batch.rows) for batch in batches) * rows
    found = []
    for compute in (forward_responses, stock_head.forward_responses):
        with Made() as made:
            found.append((gradients_of(model, batches, compute, groups), made.largest / logits))
    return found


@pytest.mark.parametrize("layout", ["one_rank", "tp2_sequence_parallel"])
def test_no_tensor_of_responses_times_vocabulary_is_made_and_chunks_change_no_gradient(layout, folder_of):
    trainer, sizes = tiny.trainer_config(**LAYOUTS[layout]), sizes_of(LAYOUTS[layout])
    for (ours, share), (stock, whole) in run_ranks(many_tokens, trainer, folder_of("qwen2", True), **sizes):
        assert share < 0.6
        assert whole >= 1.0  # so it would have been noticed
        for name, gradient in ours.gradients.items():
            assert off_by(gradient, stock.gradients[name]) <= 1e-6, name


def two_passes(groups, trainer, folders, stock: bool) -> tuple[bool, int, tiny.Trained]:
    """(whether a group was split, calls of the fused head, what two steps left)."""
    calls, fused = [], head_room.linear_logprob

    def counted(*args, **kwargs):
        calls.append(None)
        return fused(*args, **kwargs)

    head_room.linear_logprob = counted
    if stock:
        step.forward_responses = stock_head.forward_responses
    rank = tiny.Rank(groups, trainer, *folders)
    split = any(pack.microbatch.split_group >= 0 for pack in rank.packs(GROUPS))
    return split, len(calls), rank.train([GROUPS, tiny.train_groups(4, seed=6, vocab=VOCAB)])


@pytest.mark.parametrize("layout", ["one_rank", "tp2_sequence_parallel", "pp2"])
def test_groups_in_two_passes_train_as_with_the_stock_head(layout, folder_of):
    folders, sizes = [folder_of("qwen2", True, seed) for seed in (1, 2)], sizes_of(LAYOUTS[layout])
    trainer = tiny.trainer_config(**LAYOUTS[layout], microbatch_tokens=20)
    ours = run_ranks(two_passes, trainer, folders, False, **sizes)
    stock = run_ranks(two_passes, trainer, folders, True, **sizes)
    for (split, calls, found), (_, no_calls, expected) in zip(ours, stock, strict=True):
        assert split and not no_calls
        assert bool(calls) == bool(found.logprobs)
        assert found.logprobs == pytest.approx(expected.logprobs, rel=1e-6)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6, nan_ok=True)
        assert found.norms == pytest.approx(expected.norms, rel=1e-6)
    weights = [tiny.whole([trained.weights[-1] for _, _, trained in ranks]) for ranks in (ours, stock)]
    tiny.assert_same_weights(weights[0], weights[1], 1e-6)


def after_an_error(groups, trainer, folder) -> tuple[str, bool, bool]:
    """(what is said of a label of padding, whether the layer is as before, whether its logits are)."""
    model = build(groups, trainer, folder)
    batch = batches_of(groups, trainer)[0]
    layer = model.chunks[0].output_layer
    before, attributes = forward(model.ddp[0], batch), set(vars(layer))
    with pytest.raises(KernelError) as error:
        forward_responses(model.ddp[0], replace(batch, labels=batch.labels + VOCAB), model.head, groups)
    return str(error.value), set(vars(layer)) == attributes, torch.equal(forward(model.ddp[0], batch), before)


def test_the_output_layer_is_as_before_after_an_error(folder_of):
    ranks = run_ranks(after_an_error, tiny.trainer_config(tp=2), folder_of("qwen2", False), tp=2)
    said = ranks[0][0]
    assert "that no rank has" in said and "\n" not in said
    assert ranks == [(said, True, True)] * 2
