"""The reference in vLLM: a second engine beside the one that generates, with log-probs as the objective has them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from engine_child import (
    MAX_LENGTH,
    VOCAB,
    EngineChild,
    EngineSpec,
    family_model,
    hf_logprobs,
    hf_model,
    score,
    version_of,
)

from tba_megatron.config_search import VllmEngineConfig
from tba_megatron.models.registry import ARCHITECTURES
from tba_megatron.types import TokenIds

pytestmark = pytest.mark.slow

KINDS = [architecture.model_type for architecture in ARCHITECTURES.values()]
TOLERANCE = 1e-5  # nats a token, float32
# Longer than a step of the scorer, all in all, and than its cache; the longest has no room for another token.
LENGTHS = (2, 5, 17, 130, 257, MAX_LENGTH - 1, *(MAX_LENGTH for _ in range(6)))
Group = tuple[TokenIds, list[TokenIds]]


def sequences() -> list[TokenIds]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB, length).astype(np.int32) for length in LENGTHS]


def groups() -> list[Group]:
    """One that has all lengths, one of a single token, one with an empty completion and one of an unknown token."""
    prompt, *_ = sequences()
    whole = [sequence[len(prompt) :] for sequence in sequences()]
    odd = [np.zeros(0, np.int32), np.int32([3, 1]), np.int32([VOCAB + 99]), np.int32([1])]
    return [(prompt, whole[1:]), (prompt[:1], [prompt[1:]]), (prompt, odd), (prompt, [np.zeros(0, np.int32)])]


# ---- called in the child, which has an engine that generates

_alive: list[object] = []


def reference_of(engine, folder: Path, temperature: float, asked: list[Group], workers: int) -> list[tuple[float, ...]]:
    """It lives on, as a searcher closes none of its engines before the other: they share vLLM's groups."""
    from tba_megatron.search.vllm_reference import VllmReference

    config = VllmEngineConfig(tensor_parallel=workers)
    made = VllmReference(folder, config, temperature=temperature, max_length=MAX_LENGTH, seed=0)
    _alive.append(made)
    for number, (prompt, completions) in enumerate(asked):
        made.submit(f"{number} of them", prompt, completions)
    assert made.n_unfinished == len(asked)
    answers, steps = {}, 0
    while made.n_unfinished:
        answers.update(made.step())
        steps += 1
    assert steps >= sum(LENGTHS) / 1024  # none takes long, so that the searcher hears and is heard
    assert made.step() == []
    return [answers[f"{number} of them"] for number in range(len(asked))]


def check(answers: list[tuple[float, ...]], model, temperature: float) -> None:
    for (prompt, completions), sums in zip(groups(), answers, strict=True):
        for completion, found in zip(completions, sums, strict=True):
            if (completion >= VOCAB).any():
                assert math.isnan(found)
                continue
            logprobs = hf_logprobs(model, np.concatenate([prompt, completion]), temperature)[len(prompt) - 1 :]
            assert len(logprobs) == len(completion)
            assert found == pytest.approx(logprobs.sum(dtype=np.float64), abs=TOLERANCE * (1 + len(completion)))


@pytest.fixture(scope="module", params=[*KINDS, "tensor parallel"])
def started(request, tmp_path_factory):
    """A child with an engine of seed 1, a model of seed 0 in a folder, and how many workers both have."""
    folder = tmp_path_factory.mktemp("models")
    parallel = request.param == "tensor parallel"
    make = (lambda seed: hf_model(tied=False, seed=seed)) if parallel else None
    make = make or (lambda seed: family_model(request.param, tied=request.param == "gpt2", seed=seed))
    for seed in (0, 1):
        make(seed).save_pretrained(folder / str(seed))
    workers = 2 if parallel else 1
    child = EngineChild({"policy": EngineSpec(folder=folder / "1", tensor_parallel=workers)})
    child.call("policy", version_of)  # the time to build it is none of the reference's
    yield child, folder, make, workers
    child.close()


def test_sums_are_those_of_hugging_face_at_the_objectives_temperature(started):
    child, folder, make, workers = started
    for temperature in (1.0, 0.7) if workers == 1 else (0.7,):
        check(child.call("policy", reference_of, folder / "0", temperature, groups(), workers), make(0), temperature)
    (logprobs,) = child.call("policy", score, sequences()[3:4])
    np.testing.assert_allclose(logprobs, hf_logprobs(make(1), sequences()[3]), atol=1e-3)  # it is as it was
