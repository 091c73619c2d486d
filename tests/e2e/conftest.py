"""One child process with two engines for all tests of this folder that need vLLM."""

from collections.abc import Iterator

import pytest
from engine_child import EngineChild, hf_model, started_engines

MODELS = {"tied": True, "untied": False}


@pytest.fixture(scope="session")
def first_models() -> dict:
    """What each engine starts with."""
    return {name: hf_model(tied=tied, seed=0) for name, tied in MODELS.items()}


@pytest.fixture(scope="session")
def engines(first_models, tmp_path_factory) -> Iterator[EngineChild]:
    """``tied`` gives behaviour log-probs, ``untied`` does not. A test that gives them other weights takes its own."""
    yield from started_engines(first_models, tmp_path_factory, tied={"behaviour_logprobs": True})
