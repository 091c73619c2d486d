"""The changes to Megatron-Core: names are replaced, line numbers stay, torch and others are left alone."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megatron_patches
from megatron_patches import cpu
from megatron_patches.cpu import compile_for_cpu

ROOT = Path(__file__).parents[2]
SOURCE = """\
import torch
device = torch.cuda.current_device()
stream = torch.cuda.current_stream()
torch.cuda.synchronize()
state = torch.cuda.get_rng_state(device)
seed = torch.cuda.manual_seed(7)
put = torch.cuda.set_rng_state(state)
moved = torch.ones(2).cuda(non_blocking=True)
made = torch.zeros(2, device="cuda")
kind = made.type() == "torch.cuda.FloatTensor"
words = "cuda in a sentence"
def fails():
    raise ValueError("line 13")
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_cuda_names_become_cpu_names_and_lines_stay():
    import torch

    space: dict = {}
    exec(compile_for_cpu(SOURCE, "patched.py"), space)
    assert space["device"] == torch.device("cpu")
    assert space["stream"] is None
    assert space["state"].dtype == torch.uint8
    assert space["moved"].device.type == space["made"].device.type == "cpu"
    assert space["kind"] is True
    assert space["words"] == "cuda in a sentence"
    with pytest.raises(ValueError, match="line 13") as caught:
        space["fails"]()
    assert caught.traceback[-1].lineno + 1 == 13
    assert caught.traceback[-1].path == "patched.py"


def test_every_node_keeps_its_line():
    def lines(tree):
        return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}

    code = compile_for_cpu(SOURCE, "patched.py")
    assert {line for _, _, line in code.co_lines() if line} >= lines(ast.parse(SOURCE)) - {13}


def test_the_hook_changes_megatron_and_leaves_torch_alone():
    answer = run(
        "import torch, inspect\n"
        "before = {n: getattr(torch.cuda, n) for n in ('current_device', 'synchronize', 'manual_seed')}\n"
        "is_available, tensor_cuda = torch.cuda.is_available, torch.Tensor.cuda\n"
        "import logging, megatron_patches\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "first, second = megatron_patches.apply(), megatron_patches.apply()\n"
        "assert first == second == ('cpu', 'torch_adamw', 'bucket_padding'), (first, second)\n"
        "import sys, megatron_patches.cpu as cpu\n"
        "assert sum(isinstance(f, cpu._Finder) for f in sys.meta_path) == 1\n"
        "assert all(getattr(torch.cuda, n) is f for n, f in before.items())\n"
        "assert torch.cuda.is_available is is_available and torch.Tensor.cuda is tensor_cuda\n"
        "import megatron.core.tensor_parallel.random as random\n"
        "assert type(random.__loader__) is cpu._Loader\n"
        "import json.tool\n"
        "assert type(json.tool.__loader__) is not cpu._Loader\n"
        "from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as D\n"
        "assert D._tba_torch_adamw and D.load_state_dict.__module__ == 'megatron_patches.torch_adamw'\n"
        "assert D.load_state_dict.__closure__[0].cell_contents.__module__.startswith('megatron')\n"
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("with patches: cpu, torch_adamw, bucket_padding") == 2


def test_nothing_happens_on_import():
    answer = run(
        "import sys\nbefore = list(sys.meta_path)\nimport megatron_patches, megatron_patches.cpu\n"
        "assert sys.meta_path == before\nassert 'torch' not in sys.modules and 'megatron' not in sys.modules\n"
    )
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_late_call_is_refused_with_the_module_that_came_too_early(monkeypatch):
    others = {name: module for name, module in sys.modules.items() if not name.startswith("megatron")}
    monkeypatch.setattr(sys, "modules", others | {"megatron.core.early": types.ModuleType("early")})
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, cpu._Finder)])
    with pytest.raises(RuntimeError, match=r"must run before the import of megatron\.core\.early"):
        cpu.install()
    assert not any(isinstance(finder, cpu._Finder) for finder in sys.meta_path)


def test_another_version_of_megatron_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.0")
    with pytest.raises(RuntimeError, match=r"megatron-core is 0\.99\.0, but megatron_patches is written for"):
        megatron_patches.apply()
