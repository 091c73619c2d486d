"""The architecture, enforced: who may import whom, one home for each library, the marks of a tidy file."""

import ast
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("tba_megatron", "megatron_patches") for path in (ROOT / folder).rglob("*.py"))

# A room may import the rooms of lower floors and itself, never its neighbours.
FLOORS = [
    {"types", "errors", "ragged", "untrusted"},
    {"rollout_batch", "config_sections"},
    {"config_objective", "config_search"},
    {"config"},
    {"config_load"},
    {"config_agree"},
    {"dist", "heap", "metrics", "tasks", "kernels", "models"},
    {"buffer", "packing", "loss", "transport"},
    {"trainer", "search"},
    {"ops"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# (room, what it may not import although its floor would allow it)
CLOSED_DOORS = {
    ("trainer", "tba_megatron.tasks"),
    ("search", "tba_megatron.buffer"),
    ("kernels", "tba_megatron.config"),
    ("kernels", "tba_megatron.config_load"),
    ("transport", "pickle"),
    ("buffer", "time"),
    *(("buffer", library) for library in ("torch.distributed", "tokenizers", "transformers")),
    ("loss", "torch.distributed"),
    ("tasks", "torch"),
    *((room, library) for rooms in FLOORS[:6] for room in rooms for library in ("torch", "transformers")),
}

LIBRARY_HOMES = {
    "megatron": {"trainer", "models", "megatron_patches"},
    "vllm": {"search"},
    "triton": {"kernels"},
    "tensorboard": {"metrics"},
    "torch.utils.tensorboard": {"metrics"},
    "zmq": {"transport"},
    "yaml": {"config_load"},
    "pyarrow": {"ops"},
    "sentencepiece": {"models"},
    "tokenizers": {"models"},
    "megatron_patches": {"megatron_patches", "trainer", "cli"},
}
ENVIRONMENT = {"dist", "ops", "cli"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv", "unsetenv"}

# "module:function" of every place that may catch any exception. Each counts what it caught.
BOUNDARIES = frozenset(
    {
        # A thread's fault, which the main thread raises again.
        "tba_megatron.trainer.sender:_run",
        "tba_megatron.trainer.coordinator:_run",
        # The tokenizers library raises bare Exceptions about the files it reads; each becomes a ModelError.
        "tba_megatron.models.tokenizer:_from_file",
    }
)

MAX_LINES = 400


def violations(module: str, source: str) -> list[str]:
    """What is wrong with the source of a module, given by its dotted name."""
    tree = ast.parse(source)
    found = [*_import_violations(module, tree), *_environment_violations(module, tree)]
    found += _catch_all_violations(module, tree)
    if _room(module) == "loss":
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found += ["calls .item()" for call in calls if isinstance(call, ast.Attribute) and call.attr == "item"]
    if tree.body and not ast.get_docstring(tree):
        found.append("has no docstring")
    found += [f"holds a {mark}" for mark in ("TODO", "FIXME", "XXX") if mark in source]
    if (lines := len(source.splitlines())) > MAX_LINES:
        found.append(f"has {lines} lines, more than {MAX_LINES}")
    return found


def _room(module: str) -> str:
    """``tba_megatron.trainer.loop`` -> trainer; outside the house the first part of the name."""
    parts = module.split(".")
    return parts[1] if parts[0] == "tba_megatron" and len(parts) > 1 else parts[0]


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names of everything imported anywhere in a module, for typing only included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _import_violations(module: str, tree: ast.Module) -> Iterator[str]:
    room = _room(module)
    if _within(module, "tba_megatron") and room not in FLOOR and room != "tba_megatron":
        yield f"is in the room {room}, which stands on no floor"
    for name in dict.fromkeys(_imports(module, tree)):
        homes = [home for library, home in LIBRARY_HOMES.items() if _within(name, library)]
        if any(room not in home for home in homes):
            yield f"imports {name}, whose home is {', '.join(sorted(homes[0]))}"
        if any(room == r and _within(name, closed) for r, closed in CLOSED_DOORS):
            yield f"imports {name}, which is closed to {room}"
        elif _within(name, "tba_megatron"):
            other = _room(name)
            if other != room and FLOOR.get(other, -1) >= FLOOR.get(room, 0):
                yield f"imports {name}, which is not below {room}"


def _environment_violations(module: str, tree: ast.Module) -> Iterator[str]:
    if _room(module) in ENVIRONMENT:
        return
    for node in ast.walk(tree):
        through_os = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        if through_os and node.attr in ENVIRONMENT_NAMES:
            yield f"uses os.{node.attr}, whose home is {', '.join(sorted(ENVIRONMENT))}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & ENVIRONMENT_NAMES
            yield from (f"imports os.{name}" for name in sorted(names))


def _catch_all_violations(module: str, tree: ast.Module) -> Iterator[str]:
    for function, handler in _handlers(tree, "<module>"):
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        everything = any(
            kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})
            for kind in caught
        )
        if everything and f"{module}:{function}" not in BOUNDARIES:
            yield f"catches everything in {function}, which is not a named boundary"


def _handlers(node: ast.AST, function: str) -> Iterator[tuple[str, ast.ExceptHandler]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler):
            yield function, child
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from _handlers(child, inner)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_keeps_the_rules_of_the_house(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert violations(module, path.read_text(encoding="utf-8")) == []


def test_every_named_boundary_exists():
    for boundary in BOUNDARIES:
        module, function = boundary.split(":")
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        assert any(name == function for name, _ in _handlers(tree, "<module>")), boundary


@pytest.mark.parametrize(
    ("module", "line", "problem"),
    [
        ("trainer.loop", "import tba_megatron.search.searcher", "not below trainer"),
        ("search.searcher", "from tba_megatron.trainer import loop", "not below search"),
        ("search.searcher", "from tba_megatron import trainer", "not below search"),
        ("buffer.shard", "from ..trainer.loop import run", "not below buffer"),
        ("config", "from tba_megatron.config_load import load_config", "not below config"),
        ("loss.base", "from tba_megatron.packing import pack", "not below loss"),
        ("types", "from tba_megatron import dist", "not below types"),
        ("trainer.loop", "from tba_megatron.tasks.base import Task", "closed to trainer"),
        ("search.searcher", "from tba_megatron.buffer.shard import Shard", "closed to search"),
        ("trainer.loop", "def f():\n    import vllm", "home is search"),
        ("search.x", "from megatron.core import parallel_state", "home is megatron_patches"),
        ("loss.base", "import triton.language as tl", "home is kernels"),
        ("trainer.loop", "from torch.utils.tensorboard import SummaryWriter", "home is metrics"),
        ("trainer.loop", "import zmq.asyncio", "home is transport"),
        ("search.x", "import megatron_patches", "home is cli"),
        ("types", "import torch", "closed to types"),
        ("config_load", "import torch.nn", "closed to config_load"),
        ("tasks.copy", "from torch import Tensor", "closed to tasks"),
        ("loss.base", "from torch import distributed", "closed to loss"),
        ("loss.base", "loss.item()", "calls .item()"),
        ("transport.rollouts", "import pickle", "closed to transport"),
        ("attic.old", "x = 1", "stands on no floor"),
        ("trainer.loop", "import os\nos.environ['A'] = '1'", "uses os.environ"),
        ("metrics", "from os import getenv", "imports os.getenv"),
        ("ops.run", "try:\n    f()\nexcept Exception:\n    pass", "catches everything in <module>"),
        ("ops.run", "def g():\n    try:\n        f()\n    except:\n        pass", "catches everything in g"),
        ("ops.run", "try:\n    f()\nexcept (OSError, BaseException):\n    pass", "catches everything"),
        ("ops.run", "# TO" "DO: later", "holds a TODO"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(module, line, problem):
    (found,) = violations(f"tba_megatron.{module}", f'"""Docstring."""\n{line}\n')
    assert problem in found


def test_a_file_that_is_too_long_is_found():
    assert violations("tba_megatron.ops.run", '"""D."""\n' + "x = 1\n" * 399) == []
    assert violations("tba_megatron.ops.run", '"""D."""\n' + "x = 1\n" * 400) == ["has 401 lines, more than 400"]


def test_a_missing_docstring_is_found_but_an_empty_file_needs_none():
    assert violations("tba_megatron.loss.base", "x = 1\n") == ["has no docstring"]
    assert violations("tba_megatron.loss", "") == []


def test_patches_stay_out_of_the_house():
    (found,) = violations("megatron_patches.cpu", '"""D."""\nfrom tba_megatron.config import Config\n')
    assert "not below megatron_patches" in found


def test_what_the_house_allows_is_not_reported():
    allowed = {
        "tba_megatron.cli.train": "import megatron_patches\nfrom tba_megatron.trainer import loop",
        "tba_megatron.trainer.model": "import torch\nfrom megatron.core import x\nfrom . import head",
        "tba_megatron.search.searcher": "from tba_megatron.tasks.base import Task\nfrom vllm import LLM",
        "tba_megatron.metrics": "import os\nos.getpid()\nfrom torch.utils.tensorboard import SummaryWriter",
        "tba_megatron.ops.run": "import os\nos.environ",
        "tba_megatron.dist": "try:\n    f()\nexcept OSError:\n    pass",
    }
    for module, source in allowed.items():
        assert violations(module, f'"""D."""\n{source}\n') == []


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    """pytest leaves folders of some names out without a word."""
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert Path("tests/dist") in folders
    parts = {part for folder in folders for part in folder.parts}
    assert [part for part in parts if any(fnmatch.fnmatch(part, pattern) for pattern in passed_over)] == []


def test_no_two_files_of_tests_share_a_name():
    # pytest imports them by name alone, so the second would stop the collection of all.
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))
