"""What the trainer thinks of a text is what vLLM thinks of it: from an exported folder, and after a publish."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
from engine_child import (
    EngineChild,
    EngineSpec,
    apply,
    begin,
    family_model,
    score,
    version_of,
    wait_for,
)
from publishing import TOKEN, PublishingRank
from ranks import run_ranks

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.packing import pack
from tba_megatron.search.engine import ReceiveState
from tba_megatron.trainer.export_hf import export_hf
from tba_megatron.trainer.model import to_device
from tba_megatron.trainer.step import token_logprobs
from tba_megatron.transport.control_client import ControlClient
from tba_megatron.transport.messages import Applied, Goodbye, Hello, Offer, ToSearcher
from tba_megatron.types import PolicyVersion, TrainGroup

TOLERANCE = 1e-3  # nats, float32
LIMIT_S = 60.0  # only against a hang
NEW = PolicyVersion(3, 1)
TEXTS = [np.random.default_rng(s).integers(2, tiny.VOCAB, n).astype(np.int32) for s, n in enumerate((4, 17, 50))]

# (kind, tied). A tied head lies elsewhere in each of vLLM's models: both ways wherever the code differs.
MODELS = {
    "qwen2_tied": ("qwen2", True),
    "qwen2": ("qwen2", False),
    "llama": ("llama", False),
    "qwen3_tied": ("qwen3", True),
    "gpt2_tied": ("gpt2", True),
    "gpt2": ("gpt2", False),
    "gpt_neox_tied": ("gpt_neox", True),
    "gpt_neox": ("gpt_neox", False),
}


LAYOUTS: list[dict[str, int]] = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2}]


def cases(*values):
    """Qwen2 always, all others with the slow tests: vLLM studies a new model for ten seconds, once a machine."""
    given = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*v, marks=() if v[0].startswith("qwen2") else pytest.mark.slow) for v in given]


# ---- on the trainer's ranks


def export_and_score(groups, folder: Path, target: Path) -> list[np.ndarray]:
    """Write the policy as a searcher starts from it; its own log-probs, on the last stage."""
    rank = tiny.Rank(groups, tiny.trainer_config(groups.tp_size, groups.pp_size), folder)
    export_hf(
        rank.policy.chunks, rank.architecture, rank.shape, groups, folder=target, template=folder, dtype="float32"
    )
    return [logprobs_of(rank, text) for text in TEXTS]


def publish_and_score(groups, folder: Path, meeting: Path) -> list[np.ndarray]:
    """Publish the policy to the one searcher that comes; the policy's own log-probs, on the last stage."""
    rank = tiny.Rank(groups, tiny.trainer_config(groups.tp_size, groups.pp_size, groups.dp_size), folder)
    config = WeightsConfig(bucket_bytes=4096, timeout_s=LIMIT_S)
    desk = PublishingRank(groups, rank, folder=meeting, n_searchers=1, config=config, lease_s=LIMIT_S)
    desk.publish(NEW)
    own = [logprobs_of(rank, text) for text in TEXTS]
    assert desk.counts() == (1, 0)
    if desk.control is not None:
        assert desk.control.wait_until(lambda members: not members, LIMIT_S)
    desk.close()
    return own


def logprobs_of(rank: tiny.Rank, text: np.ndarray) -> np.ndarray:
    """log p of all tokens but the first, which serves as the prompt."""
    group = TrainGroup(
        prompt_id="p", prompt_token_ids=text[:1], rollouts=(tiny.rollout(0, text[1:], 0.0),), copies=(2,)
    )
    (packed,) = pack([group], 1024, 1, reference_version=0)
    batch = to_device(packed.microbatch, rank.groups.device)
    found = token_logprobs(rank.policy.chunks, [batch], rank.head, rank.groups)
    return found[0].numpy() if rank.groups.is_last_stage else np.empty(0)


# ---- the searcher's side of the control channel, in front of the engine


def take_one_version(engines: EngineChild, name: str, meeting: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (meeting / "address").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    client = ControlClient((meeting / "address").read_text(), TOKEN)
    client.send(Hello(token=TOKEN, searcher="s", host="h", workers=1, version=str(engines.call(name, version_of))))
    offer = hear_offer(client)
    engines.call(name, begin, offer)
    assert engines.call(name, wait_for, ReceiveState.STAGED)[0] is ReceiveState.STAGED
    engines.call(name, apply)
    client.send(Applied(version=offer.version, pause_s=0.0))
    client.send(Goodbye(generated=0, busy_s=0.0, idle_s=0.0))
    client.close()


def hear_offer(client: ControlClient) -> Offer:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        messages: list[ToSearcher] = client.poll(0.1)
        for message in messages:
            if isinstance(message, Offer):
                return message
    raise AssertionError("nothing was offered")


# ---- the laws

FirstScores = Callable[[str], tuple[list[np.ndarray], list[np.ndarray]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the engines of this file find what they start from: a folder for each model."""
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def engines(folder) -> Iterator[EngineChild]:
    """Engines of this file's own: they end with the trainer's weights."""
    child = EngineChild({name: EngineSpec(folder=folder / name, behaviour_logprobs=False) for name in MODELS})
    yield child
    child.close()


@pytest.fixture(scope="module")
def first_scores(engines, folder, tmp_path_factory) -> FirstScores:
    """By name: what the trainer and a new engine think of a policy that two stages exported; made when asked for."""

    @functools.cache
    def export_and_start(name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        kind, tied = MODELS[name]
        policy = tmp_path_factory.mktemp(name)
        family_model(kind, tied=tied, seed=0).save_pretrained(policy)
        own = run_ranks(export_and_score, policy, folder / name, pp=2)[-1]
        return own, engines.call(name, score, TEXTS)

    return export_and_start


@pytest.mark.parametrize("name", cases(*MODELS))
def test_an_engine_that_starts_from_an_exported_folder_agrees_with_the_trainer_on_every_token(first_scores, name):
    for own, engine in zip(*first_scores(name), strict=True):
        np.testing.assert_allclose(own, engine, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "sizes"),
    cases(
        *[(name, sizes) for name in ("qwen2_tied", "qwen2") for sizes in LAYOUTS],
        ("llama", {"pp": 2}),
        ("qwen3_tied", {"pp": 2}),
        ("gpt2_tied", {"tp": 2}),
        ("gpt2", {"pp": 2}),
        ("gpt_neox_tied", {"pp": 2}),
        ("gpt_neox", {"tp": 2}),
    ),
    ids=str,
)
def test_after_a_publish_trainer_and_engine_agree_on_every_token(engines, first_scores, tmp_path, name, sizes):
    first_scores(name)  # the engine runs
    before = engines.call(name, score, TEXTS)
    kind, tied = MODELS[name]
    family_model(kind, tied=tied, seed=10 + LAYOUTS.index(sizes)).save_pretrained(tmp_path / "policy")
    meeting = tmp_path
    searcher = threading.Thread(target=take_one_version, args=(engines, name, meeting), daemon=True)
    searcher.start()
    trainers = run_ranks(publish_and_score, tmp_path / "policy", meeting, **sizes)[-1]
    searcher.join(LIMIT_S)
    assert engines.call(name, version_of) == NEW
    after = engines.call(name, score, TEXTS)
    for old, new, own in zip(before, after, trainers, strict=True):
        np.testing.assert_allclose(own, new, atol=TOLERANCE)
        assert np.abs(new - old).max() > 0.1
