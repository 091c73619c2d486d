"""From YAML and ``section.key=value`` overrides to a ``Config``: every problem at once, each with its place.

A line of a ``ConfigError`` is ``FILE:LINE: section.key = value: what is wrong; what to do`` or
``override 'section.key=value': ...``. Rules that span sections are checked once every single value is right.

Semantics: a later override wins over an earlier one and over the file. A section keeps its defaults for keys
that are not written, ``kind`` included. Changing ``kind`` keeps the keys that were written for the former
kind, and reports those that the new one lacks; a mapping replaces all of them, as in
``objective.loss={kind: tba_prime, beta: 0.1}``. Relative paths are relative to the current directory.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tba_megatron.config import Config
from tba_megatron.config_sections import Section
from tba_megatron.errors import ConfigError, RunFolderError

KeyPath = tuple[str, ...]

# What may differ between two attempts of one run, because the learning problem stays the same: how long, how
# often saved, how watched, on how many ranks, where, and with which searchers. A star stands for anything.
MAY_CHANGE = frozenset(
    {
        "run.folder",
        "sft.save_every_steps",
        "trainer.steps",
        "trainer.save_every_steps",
        "trainer.keep_checkpoints",
        "trainer.async_save",
        "trainer.tensor_parallel",
        "trainer.pipeline_parallel",
        "trainer.virtual_pipeline",
        "trainer.data_parallel",
        "trainer.sequence_parallel",
        "trainer.recompute",
        "trainer.layers",
        "trainer.microbatch_tokens",
        "trainer.megatron_extra.*pipeline*",
        "trainer.threads",
        "trainer.distributed_timeout_s",
        "weights.bucket_bytes",
        "weights.timeout_s",
        "transport.*",
        "launch.*",
        "search.searchers",
        "search.source*",
        *("search.epochs", "search.absent_*"),
        "search.prompts_in_engine",
        "search.engine.threads",
        "search.engine.kv_cache_bytes",
        "search.engine.max_sequences",
        "evaluation.*",
        "metrics.*",
    }
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The tree of a YAML file with ``section.key=value`` overrides; ConfigError holds all problems."""
    source = _Source(str(path))
    source.read()
    for override in overrides:
        source.override(override)
    try:
        config = Config.model_validate(_with_defaults(Config, source.values))
    except ValidationError as error:
        raise ConfigError(source.problems + _explain(error, source)) from None
    source.problems += _bools_read_as_numbers(source, config)
    if source.problems:
        raise ConfigError(source.problems)
    return config


def dump_config(config: Config) -> str:
    """The resolved tree as YAML; ``load_config`` of it gives an equal tree."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def store_config(config: Config, folder: Path) -> None:
    """Write ``config.yaml`` into a run folder, whole or not at all; the folder is made where there is none.

    RunFolderError when it holds another configuration: one that differs in a key outside ``MAY_CHANGE``.
    """
    target = folder / "config.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            _refuse_another(config, target)
        staged = folder / f".config.yaml.{os.getpid()}"
        staged.write_text(dump_config(config), encoding="utf-8")
        staged.replace(target)
    except OSError as error:
        raise RunFolderError(f"run folder {folder} cannot be written: {error.strerror or error}") from None


def _refuse_another(config: Config, target: Path) -> None:
    try:
        stored = load_config(target)
    except ConfigError as error:
        raise RunFolderError(
            f"{target} cannot be read ({error.problems[0]}); choose another run.folder or remove this one"
        ) from None
    if found := differences(stored, config, lambda key: not any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)):
        what = f"run folder {target.parent} holds another configuration: {found}"
        raise RunFolderError(f"{what}; choose another run.folder or remove this one")


def differences(there: Config, here: Config, matters: Callable[[str], bool]) -> str:
    """The keys that matter and differ, with both values; empty where none does."""
    theirs, ours = (dict(_leaves(tree.model_dump(mode="json"))) for tree in (there, here))
    different = [
        f"{key} is {_show(theirs.get(key))} there and {_show(ours.get(key))} here"
        for key in dict.fromkeys([*theirs, *ours])
        if theirs.get(key) != ours.get(key) and matters(key)
    ]
    more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
    return f"{', '.join(different[:3])}{more}"


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Source:
    """Plain values, and for each key where it was written."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        self.places: dict[KeyPath, str] = {}  # a place is what goes in front of a problem
        self.problems: list[str] = []

    def read(self) -> None:
        """ConfigError where there is no mapping to go on with."""
        try:
            node = yaml.compose(Path(self.file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except OSError as error:
            raise ConfigError([f"{self.file}: {error.strerror or error}"]) from None
        except UnicodeDecodeError as error:
            raise ConfigError([f"{self.file}: not UTF-8 text ({error.reason})"]) from None
        except yaml.YAMLError as error:
            raise ConfigError([f"{self.file}{_yaml_problem(error)}"]) from None
        if node is None:
            raise ConfigError([f"{self.file}: empty; a configuration has the sections {_listed(_keys(Config))}"])
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([f"{self.file}: not a mapping; a configuration is made of 'section:' blocks"])
        self.values = self._plain(node, (), lambda mark: f"{self.file}:{mark.line + 1}: ")

    def override(self, text: str) -> None:
        place = f"override {text!r}: "
        dotted, equals, value_text = text.partition("=")
        path = tuple(dotted.strip().split("."))
        if not equals or not all(path):
            self.problems.append(f"{place}not of the form section.key=value")
            return
        try:
            node = yaml.compose(value_text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            self.problems.append(f"{place}the value is not YAML{_yaml_problem(error, line=False)}")
            return
        section = self.values
        for depth, key in enumerate(path[:-1], start=1):
            if key not in section:
                section[key] = {}
                self.places[path[:depth]] = place
            section = section[key]
            if not isinstance(section, dict):
                self.problems.append(f"{place}{'.'.join(path[:depth])} is a value, not a section")
                return
        self.places = {p: where for p, where in self.places.items() if p[: len(path)] != path}
        self.places[path] = place
        section[path[-1]] = None if node is None else self._plain(node, path, lambda _: place)

    def _plain(self, node: yaml.Node, path: KeyPath, place: Any, above: tuple[int, ...] = ()) -> Any:
        if id(node) in above:
            self.problems.append(f"{place(node.start_mark)}{'.'.join(path)}: an alias that holds itself")
            return None
        above = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, path, place, above) for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node, path, place)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, where = str(key_node.value), place(key_node.start_mark)
            if key in values:
                first = self.places.get((*path, key), "").removesuffix(": ")
                self.problems.append(f"{where}{'.'.join((*path, key))}: written twice, first at {first}")
                continue
            self.places[*path, key] = where
            values[key] = self._plain(value_node, (*path, key), place, above)
        return values

    def _scalar(self, node: yaml.Node, path: KeyPath, place: Any) -> Any:
        # YAML 1.1 reads 1e-5, which has no dot, as a string.
        if node.tag.endswith(":str") and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", node.value):
            return float(node.value)
        try:
            return yaml.constructor.SafeConstructor().construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            reason = getattr(error, "problem", None) or error
            self.problems.append(f"{place(node.start_mark)}{'.'.join(path)} = {node.value}: {reason}")
            return node.value

    def place(self, path: KeyPath) -> str:
        """Where a key, or else the nearest section around it, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return f"{self.file}: "

    def place_of_rule(self, sentence: str) -> str:
        """Of the keys a rule names: an override before a line of the file, the first before a later one."""
        named = [tuple(dotted.split(".")) for dotted in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", sentence)]
        written = [self.places[path] for path in named if path in self.places]
        overridden = [place for place in written if place.startswith("override ")]
        return (overridden or written or [self.place(named[0] if named else ())])[0]


def _yaml_problem(error: yaml.YAMLError, *, line: bool = True) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f":{mark.line + 1}" if mark is not None and line else ""
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    if "'\\t'" in reason:
        reason = "a tab; YAML is indented with spaces"
    return f"{place}: {reason}"


def _sections(annotation: object) -> tuple[type[Section], ...]:
    """The Section classes of a field's type: one, several for a tagged union, none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(section for part in typing.get_args(annotation) for section in _sections(part))
    return ()


def _keys(section: type[Section]) -> list[str]:
    return list(section.model_fields)


def _kind(section: type[Section]) -> str | None:
    return section.model_fields["kind"].default if "kind" in section.model_fields else None


def _all_keys(section: type[Section] = Config, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str | None]]:
    """(path, the kind that it belongs to) of every key there is."""
    for key, field in section.model_fields.items():
        yield (*path, key), _kind(section)
        for inner in _sections(field.annotation):
            yield from _all_keys(inner, (*path, key))


def _with_defaults(section: type[Section], values: dict[str, Any]) -> dict[str, Any]:
    """``values`` over the defaults of the sections that are written in part: no default is lost."""
    filled = dict(values)
    for key, field in section.model_fields.items():
        given = values.get(key)
        if not isinstance(given, dict):
            continue
        if isinstance(field.default, Section):
            filled[key] = _merge(field.default.model_dump(), given)
        elif len(inner := _sections(field.annotation)) == 1:
            filled[key] = _with_defaults(inner[0], given)
    return filled


def _merge(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    if given.get("kind", defaults.get("kind")) != defaults.get("kind"):
        return given
    both = {
        key: _merge(defaults[key], value)
        for key, value in given.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    return {**defaults, **given, **both}


def suggestion(word: str, names: Sequence[str], otherwise: str = "choose one of") -> str:
    """Which of ``names`` an unknown ``word`` was meant to be; ``otherwise`` and all of them where none is like it."""
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]}" if near else f"{otherwise} {_listed(names)}"


def _explain(error: ValidationError, source: _Source) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        if not problem["loc"]:
            rules = str(problem.get("ctx", {}).get("error", problem["msg"]))
            lines += [source.place_of_rule(rule) + rule for rule in rules.splitlines()]
            continue
        path, sections = _resolve(problem["loc"])
        key, place = ".".join(path), source.place(path)
        given = f"{key} = {_show(problem['input'])}"
        match problem["type"]:
            case "missing":
                lines.append(f"{place}{key}: missing{_needs(sections)}")
            case "extra_forbidden":
                lines.append(f"{place}{given}: unknown key; {_suggest(path, sections)}")
            case "union_tag_not_found" | "union_tag_invalid":
                kinds = [kind for inner in sections if (kind := _kind(inner))]
                written = problem.get("ctx", {}).get("tag")
                place, name = source.place((*path, "kind")), f"{key}.kind"
                what = f"{name}: missing" if written is None else f"{name} = {written}: unknown"
                lines.append(f"{place}{what}; {suggestion(str(written), kinds)}")
            case "model_type" | "model_attributes_type":
                lines.append(f"{place}{given}: should be a section with the keys {_listed(_keys(sections[0]))}")
            case _:
                words = problem["msg"].removeprefix("Input ").removesuffix(" for <class 'pathlib.Path'>")
                lines.append(f"{place}{given}: {words}")
    return lines


def _resolve(location: tuple[int | str, ...]) -> tuple[KeyPath, tuple[type[Section], ...]]:
    """The key path of a pydantic location, which also names the tag of each union, and the sections there.

    For an unknown key the sections are those of the mapping around it.
    """
    path: KeyPath = ()
    sections: tuple[type[Section], ...] = (Config,)
    for part in location:
        tagged = tuple(section for section in sections if _kind(section) == part)
        if len(sections) > 1 and tagged:
            sections = tagged
            continue
        path = (*path, str(part))
        field = sections[0].model_fields.get(str(part)) if sections else None
        if field is not None:
            sections = _sections(field.annotation)
    return path, sections


def _needs(sections: tuple[type[Section], ...]) -> str:
    """What a missing section has to hold."""
    if len(sections) > 1:
        return f"; it needs kind, one of {_listed([kind for s in sections if (kind := _kind(s))])}"
    needed = [key for s in sections for key, field in s.model_fields.items() if field.is_required()]
    return f"; it needs {_listed(needed)}" if needed else ""


def _suggest(path: KeyPath, sections: tuple[type[Section], ...]) -> str:
    """What an unknown key was meant to be: a key of another kind or section, or a key spelled alike."""
    key = path[-1]
    everywhere = list(_all_keys())
    other_kinds = [kind for known, kind in everywhere if known == path and kind]
    if other_kinds:
        own = next((kind for section in sections if (kind := _kind(section))), None)
        return f"it belongs to kind {' and '.join(other_kinds)}, but {'.'.join(path[:-1])}.kind is {own}"
    here = [name for section in sections for name in _keys(section)]
    if near := difflib.get_close_matches(key, here, n=1):
        return f"did you mean {'.'.join((*path[:-1], near[0]))}"
    names = {known[-1] for known, _ in everywhere}
    if near := [key] if key in names else difflib.get_close_matches(key, sorted(names), n=1):
        meant = [known for known, _ in everywhere if known[-1] == near[0]]
        inside = [known for known in meant if known[: len(path) - 1] == path[:-1]]
        verb = "it exists as" if near == [key] else "did you mean"
        return f"{verb} {' or '.join(dict.fromkeys('.'.join(known) for known in inside or meant))}"
    return f"the keys here are {_listed(here)}"


def _bools_read_as_numbers(source: _Source, config: Config) -> list[str]:
    """pydantic turns true into 1, so that ``trainer.steps: yes`` would train for one step."""
    resolved = dict(_leaves(config.model_dump()))
    return [
        f"{source.place(tuple(key.split('.')))}{key} = {_show(value)}: should be a number"
        for key, value in _leaves(source.values)
        if isinstance(value, bool) and isinstance(resolved.get(key, value), int | float)
        if not isinstance(resolved.get(key, value), bool)
    ]


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "{...}"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
