"""The README is true: its tree is the tree, its paths and configuration values exist, its commands parse."""

import re
import shlex
import typing
from pathlib import Path

import pytest

from tba_megatron.cli.main import COMMANDS, RUN_COMMANDS, build_parser
from tba_megatron.config import Config
from tba_megatron.config_load import load_config
from tba_megatron.config_sections import Section

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
        "docs/parallelism.md",
        "docs/kernels.md",
        "docs/buffer.md",
        "docs/weights.md",
        "docs/searchers.md",
        "docs/security.md",
    )
]
TOP = ("tba_megatron", "megatron_patches", "configs", "scripts", "tests", "benchmarks", "requirements", "docs")


def blocks(text):
    return re.findall(r"^```\n(.*?)^```$", text, flags=re.M | re.S)


def spans(text):
    """Code between single backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def tree():
    """Path -> description of the block that shows the tree."""
    (block,) = [block for block in blocks(README) if block.startswith("tba_megatron/\n")]
    found, folders = {}, []
    for line in block.splitlines():
        indent, name, words = re.fullmatch(r"( *)(\S+) *(.*)", line).groups()
        folders = folders[: len(indent) // 2]
        found["".join(folders) + name] = words
        if name.endswith("/"):
            folders.append(name)
    return found


def keys(section: type[Section], prefix=""):
    """Every configuration value and section by its dotted name."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for part in _sections(field.annotation):
            yield from keys(part, f"{prefix}{name}.")


def _sections(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections(part)]


def test_every_module_has_a_line_in_the_tree_and_every_line_exists():
    shown = tree()
    modules = {
        str(path.relative_to(ROOT))
        for folder in ("tba_megatron", "megatron_patches")
        for path in (ROOT / folder).rglob("*.py")
        if path.stat().st_size
    }
    assert modules - shown.keys() == set(), "these modules have no line in the README's tree"
    assert [path for path in shown if not (ROOT / path).exists()] == []
    assert [path for path, words in shown.items() if not path.endswith("/") and not words] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_and_link_exists(document):
    text = document.read_text(encoding="utf-8")
    paths = [span for span in spans(text) if span.split("/")[0] in TOP and "/" in span]
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [p for p in paths if not (ROOT / p).exists()]
    assert missing + [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_value_exists(document):
    known = set(keys(Config))
    named = [s for s in spans(document.read_text(encoding="utf-8")) if re.fullmatch(r"[a-z]+(\.[a-z_]+)+", s)]
    suffixes = (".py", ".md", ".yaml", ".json", ".jsonl", ".txt", ".toml", ".in", ".lock", ".sh")
    assert [
        s for s in named if s.split(".")[0] in Config.model_fields and not s.endswith(suffixes) and s not in known
    ] == []


def test_the_sections_of_the_configuration_are_all_described():
    table = README.partition("| section | decides |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", table, flags=re.M) == list(Config.model_fields)


def test_the_commands_are_all_described():
    table = README.partition("| command | does |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `tba ([a-z]+)` \|", table, flags=re.M)) == {*COMMANDS, *RUN_COMMANDS}


def test_every_command_line_is_accepted(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = [line for block in blocks(README) for line in block.splitlines() if line.startswith(("tba ", "make "))]
    assert len(lines) > 5
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for line in lines:
        program, first, *more = shlex.split(line, comments=True)
        if program == "make":
            assert first in targets, line
            overrides = [part.removeprefix("ARGS=") for part in more]
            load_config("configs/quickstart.yaml", [word for part in overrides for word in shlex.split(part)])
        else:
            args = build_parser().parse_args([first, *more])
            if "config" in args:
                load_config(args.config, args.overrides)


def test_the_lock_recipe_is_the_one_of_the_requirements():
    recipe = (ROOT / "requirements" / "cpu.in").read_text()
    commands = [re.sub(r"^# +", "", line) for line in recipe.splitlines() if re.match(r"#   (cd|  --no-header)", line)]
    assert len(commands) == 2
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(command in text for command in commands)
