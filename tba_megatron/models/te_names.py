"""Megatron's names of norms, plain and fused: Transformer Engine's layers hold the norm in front of them.

The FP8 bookkeeping of those layers (``_extra_state``) is no parameter, so it needs no name here.
"""

from __future__ import annotations

from collections.abc import Iterable

# (plain, fused) within a layer; ``weight`` or ``bias`` follows. The norms of queries and keys, and the last norm of the
# model, have no linear layer behind them and keep their names (TransformerLayer's sharded_state_dict_keys_map, 0.16.1).
_FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


def to_plain(name: str) -> str:
    """The name that a parameter has without Transformer Engine, which is the one that rules use."""
    return _renamed(name, [(fused, plain) for plain, fused in _FUSED])


def to_fused(name: str) -> str:
    """The name of the same parameter in Transformer Engine's layers."""
    return _renamed(name, _FUSED)


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for before, after in pairs:
        head, found, tail = name.rpartition("." + before)
        if found and tail in ("weight", "bias"):
            return f"{head}.{after}{tail}"
    return name
