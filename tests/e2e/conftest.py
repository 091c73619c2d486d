"""One child process with two engines for all tests of this folder that need vLLM."""

from collections.abc import Iterator

import pytest
from engine_child import EngineChild, EngineSpec, hf_model

MODELS = {"tied": True, "untied": False}


@pytest.fixture(scope="session")
def first_models() -> dict:
    """What each engine starts with."""
    return {name: hf_model(tied=tied, seed=0) for name, tied in MODELS.items()}


@pytest.fixture(scope="session")
def engines(first_models, tmp_path_factory) -> Iterator[EngineChild]:
    """``tied`` gives behaviour log-probs, ``untied`` does not."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in first_models.items():
        model.save_pretrained(folder / name)
    child = EngineChild(
        {name: EngineSpec(folder=folder / name, behaviour_logprobs=name == "tied") for name in first_models}
    )
    yield child
    child.close()
