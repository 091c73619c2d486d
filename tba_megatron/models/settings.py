"""config.json of a Hugging Face folder, read key by key: what is missing, odd or not supported is one line."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, TypeVar

from tba_megatron.errors import ModelError

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


class Settings:
    """The values of a config.json. A value of null counts as absent, as in transformers.

    Dropouts are not read: a policy is trained without them, because the log-probs of a rollout have to be those of
    the policy that a searcher samples from.
    """

    def __init__(self, values: Mapping[str, Any], architecture: str) -> None:
        self._values, self.architecture = values, architecture
        for name in REFUSED:
            if values.get(name):
                raise self.error(f"{name} is not supported")
        kinds = self.get("layer_types", [])
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise self.error(f"layer_types {short(kinds)} is not supported; only full_attention is")

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.architecture}: {what}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

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
