"""DistributedOptimizer checkpoints when Adam is torch.optim.AdamW.

Upstream symbol: megatron.core.optimizer.distrib_optimizer.DistributedOptimizer (sharded_state_dict, load_state_dict,
    _set_main_param_and_optimizer_states).
Versions: 0.16.1; only where neither Transformer Engine nor apex supplies FusedAdam.
Why: three faults. (1) The state of a fresh optimizer is asked for before it exists. (2) The ``fully_reshardable``
    format does not carry AdamW's per-parameter ``step``. (3) After a load all parameters share one 0-dim ``step``
    tensor, which AdamW advances once a parameter: the second step after a resume is silently wrong.
Effect: the state exists before it is described, ``step`` is carried over, and each parameter owns its own.
Test: tests/dist/test_checkpoint.py (a resume gives the same losses and the same parameters).
Delete when: upstream handles torch.optim.AdamW, or torch.optim.AdamW is no longer used.
"""

from __future__ import annotations

import importlib.util
from typing import Any


def apply() -> bool:
    """Patch the class once; False where FusedAdam is available and nothing needs a patch."""
    if any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex")):
        return False
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    base: Any = DistributedOptimizer
    if getattr(base, "_tba_torch_adamw", False):
        return True
    sharded_state_dict = base.sharded_state_dict
    load_state_dict = base.load_state_dict
    set_state = base._set_main_param_and_optimizer_states

    def patched_sharded_state_dict(self, *args, **kwargs):
        self.init_state_fn(self.optimizer, self.config)
        for state in self.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))
        return sharded_state_dict(self, *args, **kwargs)

    def patched_load_state_dict(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def patched_set_state(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        with torch.no_grad():
            set_state(self, model_param, {"step": state["step"], **tensors})

    base.sharded_state_dict = patched_sharded_state_dict
    base.load_state_dict = patched_load_state_dict
    base._set_main_param_and_optimizer_states = patched_set_state
    base._tba_torch_adamw = True
    return True
