"""Weights into Megatron's shards: from a Hugging Face folder, of which a rank reads its part, or seeded at random."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from tba_megatron.dist import Groups
from tba_megatron.errors import ModelError, shown
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.models.hf_folder import HfTensors, Stored, list_tensors
from tba_megatron.models.layouts import Rule, Source
from tba_megatron.models.random_weights import RandomTensors
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.exchange import from_rank_0, gather_on_all
from tba_megatron.trainer.model import named_parameters
from tba_megatron.trainer.stream_hf import is_finite

_log = logging.getLogger(__name__)

HEAD = "output_layer.weight"  # with tied embeddings the last of several stages owns a copy of the embedding under it
EMBEDDING = "embedding.word_embeddings.weight"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
COMPARED_ROWS = 4096  # at a time: bounds the memory of a comparison
NAMED = 6  # tensors in one line


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Where every parameter of the whole model has its values from, under Hugging Face's names.

    ``tied``: the head of a model with tied embeddings, which has the embedding's values. ``ignored``: stored, but
    nothing that a model computes with depends on it. ``n_parameters`` counts elements of what is loaded and
    initialised, once each.
    """

    source: str
    loaded: tuple[str, ...]
    tied: tuple[str, ...]
    initialised: tuple[str, ...]
    ignored: tuple[str, ...]
    n_parameters: int

    def __str__(self) -> str:
        ignored = f"; ignored {_some(self.ignored)}" if self.ignored else ""
        return (
            f"weights from {self.source}: {self.n_parameters:,} parameters; tensors loaded {len(self.loaded)}, "
            f"tied {len(self.tied)}, initialised {len(self.initialised)}{ignored}"
        )


def load_hf(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, folder: Path, groups: Groups
) -> LoadReport:
    """Copy this rank's shards out of ``folder``, file by file; a collective over all ranks.

    Rank 0 reads the headers of all files, every other rank opens only those that hold something of its shard. The same
    ModelError on every rank when anything is missing, unexpected, of another shape, no float, not finite, or cannot
    be read by any one rank.
    """
    found: tuple[dict[str, Stored], tuple[str, ...]] | None = None
    with AllOrNone("", groups.world, raised=ModelError):
        if groups.rank == 0:
            found = read_headers(folder, architecture, shape)
    stored, ignored = from_rank_0(found, groups)
    with AllOrNone("", groups.world, raised=ModelError), HfTensors(stored) as tensors:
        _fill(chunks, architecture, shape, tensors, groups)
        heads = [name for name in _head_names(architecture, shape) if name in stored]
        if shape.tied and groups.is_last_stage and groups.dp_rank == 0:
            _compare_heads(heads, architecture, shape, tensors, next(chunks[-1].parameters()).dtype, groups)
    return _report(chunks, architecture, shape, groups, source=str(folder), initialised=False, ignored=ignored)


def read_headers(
    folder: Path, architecture: Architecture, shape: ModelShape
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """Where each tensor of the rules lies, and what the folder holds beside them; no data is read.

    ModelError unless the folder is exactly this model, as far as headers tell.
    """
    stored, ignored = _canonical(list_tensors(folder), architecture)
    _check(stored, architecture, shape, folder)
    return stored, ignored


def load_random(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, seed: int, groups: Groups
) -> LoadReport:
    """This rank's shards of seeded random weights, the same model for every parallel layout."""
    _fill(chunks, architecture, shape, _Random(RandomTensors(architecture, shape, seed)), groups)
    return _report(chunks, architecture, shape, groups, source=f"seed {seed}", initialised=True, ignored=())


class _Readable(Protocol):
    def read(self, wanted: Sequence[tuple[str, ...]]) -> Iterator[tuple[int, list[Source]]]: ...

    def place(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class _Random:
    """``RandomTensors`` where ``HfTensors`` is expected."""

    tensors: RandomTensors

    def place(self, name: str) -> str:
        return "random weights"

    def read(self, wanted: Sequence[tuple[str, ...]]) -> Iterator[tuple[int, list[Source]]]:
        for i, names in enumerate(wanted):
            yield i, [self.tensors[name] for name in names]


def _canonical(stored: Mapping[str, Stored], architecture: Architecture) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """The weights of ``stored`` under the names of the rules, and the names of what holds no weights."""
    weights: dict[str, Stored] = {}
    ignored: list[str] = []
    for name, found in sorted(stored.items()):
        known_as = architecture.canonical(name)
        if known_as is None:
            ignored.append(name)
        elif known_as in weights:
            both = f"{shown(name)} and {shown(weights[known_as].name)}"
            raise ModelError(f"{found.path}: {both} are one weight; remove one of them")
        else:
            weights[known_as] = found
    return weights, tuple(ignored)


def _check(stored: Mapping[str, Stored], architecture: Architecture, shape: ModelShape, folder: Path) -> None:
    """ModelError unless ``stored`` is exactly this model, as far as headers tell."""
    used = {name for rule in architecture.rules(shape, 1) for name in rule.hf}
    extra = stored.keys() - used - set(_head_names(architecture, shape) if shape.tied else ())
    quantised = sorted(name for name in stored if stored[name].dtype not in FLOATS)
    if quantised:
        kinds = ", ".join(sorted({stored[name].dtype for name in quantised}))
        raise ModelError(
            f"{stored[quantised[0]].path}: {_some(quantised)} stored as {kinds}; quantised weights are not supported, "
            "convert them to bfloat16"
        )
    missing = sorted(used - stored.keys())
    if missing or extra:
        problems = [f"weights missing: {_some(missing)}"] if missing else []
        problems += [f"unexpected: {_some(sorted(extra))}"] if extra else []
        raise ModelError(f"{folder}: {'; '.join(problems)}; the weights must be those of config.json")
    shapes = architecture.tensor_shapes(shape)
    wrong = sorted(name for name in used if stored[name].shape != shapes[name])
    if wrong:
        name = wrong[0]
        more = f" (and {len(wrong) - 1} more tensors do not fit)" if len(wrong) > 1 else ""
        raise ModelError(
            f"{stored[name].path}: {name} has the shape {shown(stored[name].shape)}, but config.json asks for "
            f"{shapes[name]}{more}; the weights must be those of config.json"
        )


def _head_names(architecture: Architecture, shape: ModelShape) -> tuple[str, ...]:
    """The Hugging Face names of the head, of which a tied model may store a copy."""
    untied = architecture.rules(dataclasses.replace(shape, tied=False), 1)
    return next((rule.hf for rule in untied if rule.megatron == HEAD), ())


def _rules(architecture: Architecture, shape: ModelShape, groups: Groups) -> dict[str, Rule]:
    """By Megatron's name, the tied copy of the head included."""
    rules = {rule.megatron: rule for rule in architecture.rules(shape, groups.tp_size)}
    rules.setdefault(HEAD, rules[EMBEDDING])
    return rules


def _fill(
    chunks: Sequence[GPTModel], architecture: Architecture, shape: ModelShape, tensors: _Readable, groups: Groups
) -> None:
    own, rules = named_parameters(chunks), _rules(architecture, shape, groups)
    strange = sorted(own.keys() - rules.keys())
    if strange:
        raise ModelError(f"{architecture.name} has no rule for Megatron's parameter {_some(strange)}")
    names = list(own)
    for i, sources in tensors.read([rules[name].hf for name in names]):
        parameter, rule = own[names[i]], rules[names[i]]
        _copy(parameter, rule, sources, groups)
        if not is_finite(parameter.detach()):
            named = zip(rule.hf, sources, strict=True)
            bad = next((name for name, source in named if not is_finite(source[(slice(None),)])), None)
            what = f"{bad} not finite" if bad else f"{rule.hf[0]} too large for {parameter.dtype}"
            raise ModelError(
                f"{tensors.place(bad or rule.hf[0])}: {what}; a model with NaN or infinity cannot be trained"
            )
        del sources  # its pages stay in memory for as long as anything refers to them


def _copy(parameter: torch.nn.Parameter, rule: Rule, sources: Sequence[Source], groups: Groups) -> None:
    shard = rule.layout.to_rank(sources, groups.tp_rank, groups.tp_size)
    if shard.shape != parameter.shape:
        raise ModelError(
            f"{', '.join(rule.hf)} give {rule.megatron} the shape {tuple(shard.shape)}, but Megatron built "
            f"{tuple(parameter.shape)}; is a size changed by trainer.megatron_extra?"
        )
    with torch.no_grad():
        parameter.copy_(shard)


def _compare_heads(
    heads: Sequence[str],
    architecture: Architecture,
    shape: ModelShape,
    tensors: HfTensors,
    dtype: torch.dtype,
    groups: Groups,
) -> None:
    """ModelError when the folder of a tied model stores a head with other values than the embedding's.

    transformers ignores such a head; whoever trained it meant it to be used. Tensor ranks share the rows.
    """
    embedding = _rules(architecture, shape, groups)[EMBEDDING].hf[0]
    for i, (ours, theirs) in tensors.read([(embedding, head) for head in heads]):
        start, stop = (shape.vocab_size * rank // groups.tp_size for rank in (groups.tp_rank, groups.tp_rank + 1))
        same = list(ours.shape) == list(theirs.shape)
        for first in range(start, stop, COMPARED_ROWS):
            rows = (slice(first, min(first + COMPARED_ROWS, stop)),)
            same = same and torch.equal(ours[rows].to(dtype), theirs[rows].to(dtype))
        if not same:
            raise ModelError(
                f"{tensors.stored[heads[i]].path}: {heads[i]} differs from {embedding}, but config.json says that they "
                "are tied; set tie_word_embeddings to false there, or remove the tensor"
            )


def _report(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    shape: ModelShape,
    groups: Groups,
    *,
    source: str,
    initialised: bool,
    ignored: tuple[str, ...],
) -> LoadReport:
    """The whole model's report on every rank, logged by rank 0. ModelError when a parameter is on no rank."""
    own = named_parameters(chunks) if groups.is_stage_leader else {}
    rules = architecture.rules(shape, groups.tp_size)
    held = set().union(*gather_on_all(set(own), groups))
    homeless = [name for rule in rules if rule.megatron not in held for name in rule.hf]
    if homeless:
        raise ModelError(f"{source}: no pipeline stage holds {_some(homeless)}")
    names = tuple(name for rule in rules for name in rule.hf)
    shapes = architecture.tensor_shapes(shape)
    report = LoadReport(
        source=source,
        loaded=() if initialised else names,
        tied=_head_names(architecture, shape) if shape.tied else (),
        initialised=names if initialised else (),
        ignored=ignored,
        n_parameters=sum(torch.Size(shapes[name]).numel() for name in names),
    )
    if groups.rank == 0:
        _log.info("%s", report)
    return report


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(shown(name) for name in names[:NAMED]) + more
