"""config.json of a Hugging Face folder, read key by key: what is missing, odd or not supported is one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from tba_megatron.errors import ModelError

T = TypeVar("T")

# Settings that change the computation, whatever the architecture; refused unless they are absent, null, false or 0.
REFUSED = (
    "add_cross_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "pruned_heads",
    "quantization_config",
    "use_sliding_window",
)


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
        kinds = {kind for kind in values.get("layer_types") or () if kind != "full_attention"}
        if kinds:
            raise self.error(f"layer_types {', '.join(sorted(map(str, kinds)))} is not supported")

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
        """A whole number of at least 1; without ``default`` it has to be there."""
        if default is None:
            self.require(name)
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{name} {value!r} is not a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        return self.positive(name, self.get(name, default))

    def positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{name} {value!r} is not a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} {value!r} is neither true nor false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, T]) -> T:
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(f"{name} {value!r} is not supported; known: {', '.join(known)}")
        return known[value]

    def whole(self, name: str, value: int, parts_name: str, parts: int) -> int:
        """``value`` / ``parts``, which has to be whole."""
        if value % parts:
            raise self.error(f"{name} {value} is not a multiple of {parts_name} {parts}")
        return value // parts
