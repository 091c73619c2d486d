"""Megatron-Core on CPU with gloo.

Upstream symbol: every module of ``megatron.core`` that names its device (``torch.cuda.current_device()``,
    ``device="cuda"``, ``param.type() == "torch.cuda.FloatTensor"``, ``tensor.cuda()``, the CUDA RNG functions).
Versions: written for 0.16.1.
Why: Megatron-Core takes no device argument. Its maths and communication run on CPU once the names are replaced.
Effect: an import hook compiles each module with the CPU names in place, line numbers kept. Nothing in ``torch`` is
    touched, nothing is written to disk, other packages are not affected. Must run before ``import megatron``.
Test: tests/unit/test_megatron_patches.py and every test under tests/dist.
Delete when: Megatron-Core takes its device from its configuration.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from types import CodeType, ModuleType
from typing import Any

_PACKAGE = "megatron.core"

_CALLS = {  # a call, whatever its arguments -> an expression
    "torch.cuda.current_device": "torch.device('cpu')",
    "torch.cuda.current_stream": "None",
    "torch.cuda.synchronize": "None",
    "torch.cuda.empty_cache": "None",
    "torch.cuda.get_rng_state": "torch.get_rng_state()",
    "torch.cuda.random.get_rng_state": "torch.get_rng_state()",
}
_FUNCTIONS = {  # a function -> one that takes the same arguments
    "torch.cuda.manual_seed": "torch.manual_seed",
    "torch.cuda.set_rng_state": "torch.set_rng_state",
}
_STRINGS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _expression(source: str, like: ast.AST) -> ast.expr:
    return ast.copy_location(ast.parse(source, mode="eval").body, like)


class _ToCpu(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = _dotted(node.func)
        if name in _CALLS:
            return _expression(_CALLS[name], node)
        if name in _FUNCTIONS:
            node.func = _expression(_FUNCTIONS[name], node.func)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return node.func.value  # tensor.cuda(...) is the tensor itself
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str) and node.value in _STRINGS:
            return ast.copy_location(ast.Constant(_STRINGS[node.value]), node)
        return node


def compile_for_cpu(source: str | bytes, path: str) -> CodeType:
    """The code of a Megatron-Core module with CPU names."""
    tree = ast.fix_missing_locations(_ToCpu().visit(ast.parse(source, path)))
    return compile(tree, path, "exec", dont_inherit=True)


def _finish(module: Any) -> None:
    """What replaced names do not cover."""
    if module.__name__ == "megatron.core.jit":
        module.disable_jit_fuser()  # torch.compile of a handful of tiny kernels costs seconds each on CPU
    elif module.__name__ == "megatron.core.tensor_parallel.random":
        set_rng_state = module.torch.set_rng_state
        module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: set_rng_state(state)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:  # never reads or writes .pyc files
        return compile_for_cpu(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _finish(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(_PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def install() -> None:
    """Install the hook once; RuntimeError when a module of Megatron-Core was imported without it."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = next((name for name in sys.modules if name.startswith(_PACKAGE)), None)
    if early is not None:
        raise RuntimeError(f"megatron_patches.apply() must run before the import of {early}")
    sys.meta_path.insert(0, _Finder())
