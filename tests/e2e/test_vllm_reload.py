"""Weights into a vLLM model by a plan: the same as vLLM's own way, for every family."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_child import (
    VOCAB,
    EngineChild,
    EngineSpec,
    family_model,
    hf_logprobs,
    load,
    named_tensors,
    score,
)
from safetensors.torch import load_file

from tba_megatron.types import PolicyVersion

TOLERANCE = 1e-3  # nats, float32
VERSION = PolicyVersion(1, 0)
TEXTS = [np.random.default_rng(s).integers(2, VOCAB, n).astype(np.int32) for s, n in enumerate((4, 50))]
FAMILIES = {
    f"{kind}{'_tied' if tied else ''}": (kind, tied)
    for kind in ("qwen2", "qwen3", "llama", "gpt2", "gpt_neox")
    for tied in (True, False)
}
# The others with the slow tests: vLLM studies a new model for ten seconds, once a machine.
NAMES = [pytest.param(n, marks=() if n.startswith("qwen2") else pytest.mark.slow) for n in FAMILIES]


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[EngineChild]:
    folder = tmp_path_factory.mktemp("families")
    for name, (kind, tied) in FAMILIES.items():
        family_model(kind, tied=tied, seed=0).save_pretrained(folder / name)
    specs = {name: EngineSpec(folder=folder / name) for name in FAMILIES}
    # A layerwise reload leaves loaders behind that wait for whole layers: a plan is made before the first.
    child = EngineChild({**specs, "never reloaded by layers": specs["qwen2_tied"]})
    yield child
    child.close()


def stored(policy, folder) -> list:
    """What a trainer sends of any family: the tensors under the names of its folder."""
    policy.save_pretrained(folder)
    return list(load_file(folder / "model.safetensors").items())


def load_both_ways(engine, first, second) -> tuple[bool, list[list[np.ndarray]]]:
    """Scores after each load: by the plan, the other policy, layer by layer, the other one, by the plan again."""
    worker = engine._engine.model_executor.driver_worker.worker.weight_transfer_engine
    plan, found = worker.plan, []
    for tensors, used in ((first, plan), (second, plan), (first, None), (second, None), (first, plan)):
        worker.plan = used
        load(engine, VERSION, tensors)
        found.append(engine.score(TEXTS))
    return plan is not None, found


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_load_is_vllms_own_to_the_bit_and_hugging_faces_within_rounding(engines, tmp_path, name):
    kind, tied = FAMILIES[name]
    policies = [family_model(kind, tied=tied, seed=seed) for seed in (1, 2)]
    planned, found = engines.call(name, load_both_ways, *(stored(policy, tmp_path) for policy in policies))
    assert planned
    for text, by_plan, other, by_layer, other_by_layer, again in zip(TEXTS, *found, strict=True):
        np.testing.assert_allclose(by_plan, hf_logprobs(policies[0], text), atol=TOLERANCE)
        np.testing.assert_allclose(other, hf_logprobs(policies[1], text), atol=TOLERANCE)
        assert np.abs(by_plan - other).max() > 0.1
        np.testing.assert_array_equal(by_plan, by_layer)
        np.testing.assert_array_equal(other, other_by_layer)
        np.testing.assert_array_equal(by_plan, again)


def test_what_was_staged_is_read_no_more_once_it_is_applied(engines):
    for name in ("qwen2", "qwen2_tied"):
        policy = family_model("qwen2", tied=FAMILIES[name][1], seed=3)
        assert engines.call(name, load, VERSION, named_tensors(policy))  # it leaves NaN in what was staged
        for text, logprobs in zip(TEXTS, engines.call(name, score, TEXTS), strict=True):
            np.testing.assert_allclose(logprobs, hf_logprobs(policy, text), atol=TOLERANCE)


def refusal(engine, arriving: list[tuple[str, tuple[int, ...]]]) -> tuple[str, list[np.ndarray]]:
    from tba_megatron.search.vllm_reload import Unplannable, plan_reload

    model = engine._engine.model_executor.driver_worker.worker.model_runner.get_model()
    try:
        plan_reload(model, {name: torch.empty(shape, device="meta") for name, shape in arriving})
    except Unplannable as refused:
        return str(refused), engine.score(TEXTS)
    return "", []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda shapes: [s for s in shapes if "k_proj.weight" not in s[0]], "is not filled by what arrives"),
        (lambda shapes: [(n, (7, 7)) if "o_proj" in n else (n, s) for n, s in shapes], "does not work without data"),
    ],
    ids=["a part of a fused layer", "another shape"],
)
def test_a_plan_that_would_not_fill_the_model_is_refused_and_leaves_it_as_it_was(engines, change, complaint):
    policy = family_model("qwen2", tied=True, seed=0)
    engines.call("never reloaded by layers", load, VERSION, named_tensors(policy))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in named_tensors(policy)]
    reason, scores = engines.call("never reloaded by layers", refusal, change(shapes))
    assert complaint in reason
    for text, logprobs in zip(TEXTS, scores, strict=True):
        np.testing.assert_allclose(logprobs, hf_logprobs(policy, text), atol=TOLERANCE)
