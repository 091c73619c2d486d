"""New weights into a vLLM model on a CPU, without the Python of a layerwise reload.

vLLM's linear layers give their weights to oneDNN, which keeps a packed copy, and drop them. To load anew, vLLM puts
every layer on the meta device, runs each weight loader twice and copies twice. Where each tensor goes is the same for
every version, though: it is recorded once, from the model's own ``load_weights`` over tensors without data, and then
only repeated. Whatever is more than a copy is refused (``Unplannable``): such a model needs vLLM's way. For vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

_aten = torch.ops.aten


class Unplannable(Exception):
    """Loading this model is more than copying tensors; the message says what was met."""


@dataclass(frozen=True, slots=True)
class View:
    """Which elements of a whole tensor; ``offset`` is from its first one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(part: Tensor, whole: Tensor) -> View:
        return View(tuple(part.size()), tuple(part.stride()), int(part.storage_offset() - whole.storage_offset()))

    def within(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.size, self.stride, int(whole.storage_offset()) + self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    name: str  # of the tensor that arrives
    source: View
    target: View


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayer:
    """A layer whose weight exists only until it is packed."""

    layer: torch.nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReloadPlan:
    """``run`` loads a version; nothing of it refers to the tensors that it was given once it has returned."""

    in_place: tuple[tuple[Tensor, Copy], ...]  # (the part of a parameter that stays, what is copied there)
    packed: tuple[PackedLayer, ...]
    repacked: tuple[torch.nn.Module, ...]  # their weights stay, and are packed beside

    @torch.no_grad()
    def run(self, tensors: Mapping[str, Tensor]) -> None:
        for part, copy in self.in_place:
            part.copy_(copy.source.within(tensors[copy.name]))
        for packed in self.packed:
            # Memory of its own: not every kernel packs what it is given, some keep it.
            weight = torch.empty(packed.shape, dtype=packed.dtype)
            for copy in packed.copies:
                copy.target.within(weight).copy_(copy.source.within(tensors[copy.name]))
            _pack(packed.layer, weight)
        for layer in self.repacked:
            _pack(layer, None)


def _pack(layer: torch.nn.Module, weight: Tensor | None) -> None:
    if weight is not None:
        layer._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]


def plan_reload(model: torch.nn.Module, expected: Mapping[str, Tensor]) -> ReloadPlan:
    """``expected``: what will arrive, by name, as contiguous tensors on the meta device. Raises ``Unplannable``.

    The model has been loaded, and never by a layerwise reload, which leaves loaders behind that wait for whole layers;
    such a one is refused. It is as before when this returns.
    """
    for layer in model.modules():
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            # MLA, for one, prepares weights of other layers for itself.
            raise Unplannable(f"the model has {type(layer).__name__}")
    targets = _Targets(model)
    recorder = _Recorder(expected, targets)
    try:
        with torch.no_grad(), recorder:
            model.load_weights((name, tensor) for name, tensor in expected.items())  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise Unplannable(f"its loader does not work without data: {error}") from error
    finally:
        targets.restore()
    return targets.plan(recorder.copies)


def memory(tensor: Tensor) -> int:
    """Equal for views of the same memory, on the meta device too; valid while one of them lives."""
    return tensor.untyped_storage()._cdata


@dataclass
class _Target:
    """A parameter: ``layers`` hold it (several where it is tied), ``tensor`` stands in for it while it is recorded."""

    tensor: Tensor
    packed: bool
    layers: list[torch.nn.Module] = field(default_factory=list)


class _Targets:
    """The parameters of a model by their memory; those that were packed away have stand-ins until ``restore``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.by_memory: dict[int, _Target] = {}
        self._away: list[tuple[torch.nn.Module, torch.nn.Parameter]] = []
        self._data: list[tuple[Tensor, Tensor]] = []
        for layer in model.modules():
            for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
                if tensor is not None:
                    self._add(layer, name, tensor)

    def _add(self, layer: torch.nn.Module, name: str, tensor: Tensor) -> None:
        restored = get_layerwise_info(layer).restore_metadata[0].get(name)
        packed = tensor.numel() == 0 and restored is not None and restored.numel() > 0
        if packed:
            assert restored is not None and name == "weight" and isinstance(tensor, torch.nn.Parameter)
            with torch.device("meta"):
                stand_in = restore_layer_refs(materialize_meta_tensor(restored), layer)
            self._away.append((layer, tensor))
            layer._parameters[name] = stand_in  # type: ignore[assignment]
            tensor = stand_in
        else:
            self._data.append((tensor, tensor.data))
        self.by_memory.setdefault(memory(tensor), _Target(tensor, packed)).layers.append(layer)

    def restore(self) -> None:
        for layer, parameter in self._away:
            layer._parameters["weight"] = parameter
        for tensor, data in self._data:
            tensor.data = data

    def plan(self, copies: Mapping[int, list[Copy]]) -> ReloadPlan:
        in_place: list[tuple[Tensor, Copy]] = []
        packed: list[PackedLayer] = []
        repacked: list[torch.nn.Module] = []
        for key, target in self.by_memory.items():
            written = tuple(copies.get(key, ()))
            if not written and not target.packed:
                continue
            for layer in target.layers:
                _refuse_unknown(layer)
            if target.packed:
                _refuse_gaps(target, written)
                (layer,) = target.layers
                shape, dtype = tuple(target.tensor.shape), target.tensor.dtype
                packed.append(PackedLayer(layer=layer, shape=shape, dtype=dtype, copies=written))
            else:
                in_place += [(copy.target.within(target.tensor.data), copy) for copy in written]
                repacked += [layer for layer in target.layers if hasattr(layer, "cpu_linear")]
        # A bias of a packed layer is no reason to pack it twice.
        once = {id(item.layer) for item in packed}
        return ReloadPlan(
            in_place=tuple(in_place),
            packed=tuple(packed),
            repacked=tuple(layer for layer in repacked if id(layer) not in once),
        )


def _refuse_unknown(layer: torch.nn.Module) -> None:
    method = getattr(layer, "quant_method", None)
    if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        raise Unplannable(f"a layer is of the kind {type(method).__name__}")
    if is_deferred_attention_layer(layer):
        raise Unplannable(f"{type(layer).__name__} has weights of its own")


def _refuse_gaps(target: _Target, copies: tuple[Copy, ...]) -> None:
    written = torch.zeros(target.tensor.shape, dtype=torch.bool)
    for copy in copies:
        copy.target.within(written).fill_(True)
    if not written.all() or len(target.layers) != 1:
        raise Unplannable(f"a {type(target.layers[0]).__name__} is not filled by what arrives")


class _Recorder(TorchDispatchMode):
    """Writes down copies from what arrives into targets instead of doing them."""

    def __init__(self, expected: Mapping[str, Tensor], targets: _Targets) -> None:
        super().__init__()
        self._sources = {memory(tensor): (name, tensor) for name, tensor in expected.items()}
        self._targets = targets.by_memory
        self.copies: dict[int, list[Copy]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = self._targets.get(memory(args[0]))
        if target is not None and func in (_aten.fill_.Scalar, _aten.zero_.default):
            return args[0]  # padding: it stays what it is
        if target is None or func is not _aten.copy_.default:
            raise Unplannable(f"its loader calls {func} on what is no parameter of the model")
        name, whole = self._sources.get(memory(args[1]), ("", None))
        if whole is None or args[0].dtype != args[1].dtype:
            raise Unplannable("its loader copies what it has computed")
        copy = Copy(name=name, source=View.of(args[1], whole), target=View.of(args[0], target.tensor))
        self.copies.setdefault(memory(args[0]), []).append(copy)
        return args[0]
