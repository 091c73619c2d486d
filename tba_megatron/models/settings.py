"""The JSON files of a Hugging Face folder, and config.json key by key: what is missing, odd or refused is one line."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

from tba_megatron.errors import ModelError, shown

T = TypeVar("T")

# Settings that change the computation, whatever the architecture; refused unless they are absent, null, false or 0.
REFUSED = (
    "add_cross_attention",
    "attn_logit_softcapping",
    "dual_chunk_attention_config",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "pruned_heads",
    "quantization_config",
    "use_sliding_window",
)

LARGEST_SIZE = 2**31 - 1  # what an index of a GPU kernel holds
LARGEST_NUMBER = 1e30

LFS_POINTER = b"version https://git-lfs"
_AGAIN = "copy or download it again"


def read_file(path: Path) -> bytes:
    """What a file beside the weights holds. FileNotFoundError is left to the caller, who knows whether it may lack.

    ModelError when it is no regular file (to open a pipe would wait for ever), cannot be read, is empty or is a
    git-lfs pointer.
    """
    try:
        mode = path.stat().st_mode
        data = path.read_bytes() if stat.S_ISREG(mode) else None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check what it is and who may read it") from None
    if data is None:
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ModelError(f"{path} is {kind} and not a file; remove or replace it")
    if data.startswith(LFS_POINTER):
        raise ModelError(f"{path} is a git-lfs pointer and not the file; run git lfs pull in {path.parent}")
    if not data.strip():
        raise ModelError(f"{path} is empty; {_AGAIN}")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; the errors of ``read_file``, and ModelError when it holds anything else."""
    data = read_file(path)
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:4]:
        # Windows editors write these: a byte order mark, UTF-16 with one or without.
        raise ModelError(f"{path} has a byte order mark or is UTF-16; save it as UTF-8 without a byte order mark")
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not UTF-8 text; {_AGAIN}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({shown(str(error), 200)}); {_AGAIN}") from None
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply to be read; {_AGAIN}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; {_AGAIN}")
    return value


class Settings:
    """The values of a config.json. A value of null counts as absent, as in transformers.

    Dropouts are not read: a policy is trained without them, because the log-probs of a rollout have to be those of
    the policy that a searcher samples from.
    """

    def __init__(self, values: Mapping[str, Any], architecture: str) -> None:
        self._values, self.architecture = dict(values), architecture
        for name in REFUSED:
            if values.get(name):
                raise self.error(f"{name} is not supported")
        if values.get("is_causal", True) is not True:
            # Anything else makes transformers (5, create_causal_mask) attend to later tokens, null included.
            raise self.error(f"is_causal {short(values['is_causal'])} is not supported; only true is")
        kinds = self.get("layer_types", [])
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise self.error(f"layer_types {short(kinds)} is not supported; only full_attention is")

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.architecture}: {what}")

    def join_names(self, names: Mapping[str, str]) -> None:
        """Let each setting of ``names`` be read under its other name too, which they give; both have to agree."""
        for name, other in names.items():
            first, second = self.get(name), self.get(other)
            both = first is not None and second is not None
            if both and (type(first) is not type(second) or first != second):
                what = f"{name} {short(first)} and {other} {short(second)}"
                raise self.error(f"{what} are one setting; remove one of them")
            self._values[name] = second if first is None else first

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def is_null(self, name: str) -> bool:
        """Whether ``name`` is there and null, for the few settings where that is not the same as absent."""
        return name in self._values and self._values[name] is None

    def require(self, *names: str) -> None:
        missing = [name for name in names if self._values.get(name) is None]
        if missing:
            raise self.error(f"lacks {', '.join(missing)}")

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31 - 1; without ``default`` it has to be there."""
        if default is None:
            self.require(name)
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
            raise self.error(f"{name} {short(value)} is not a whole number from 1 to {LARGEST_SIZE}")
        return value

    def number(self, name: str, default: float) -> float:
        return self.positive(name, self.get(name, default))

    def positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_NUMBER:
            raise self.error(f"{name} {short(value)} is not a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} {short(value)} is neither true nor false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, T]) -> T:
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(f"{name} {short(value)} is not supported; known: {', '.join(known)}")
        return known[value]

    def whole(self, name: str, value: int, parts_name: str, parts: int) -> int:
        """``value`` / ``parts``, which has to be whole."""
        if value % parts:
            raise self.error(f"{name} {value} is not a multiple of {parts_name} {parts}")
        return value // parts
