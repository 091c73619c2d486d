"""One vLLM engine of two tensor-parallel workers: each a process, each a member of the broadcast group."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_child import (
    VOCAB,
    EngineChild,
    EngineSpec,
    Sender,
    hf_logprobs,
    hf_model,
    named_tensors,
    score,
    version_of,
)

from tba_megatron.errors import EngineError
from tba_megatron.types import Completion, PolicyVersion, SamplingSettings

TOLERANCE = 1e-3  # nats, float32
SMALL = 2048  # bytes: every large tensor has a bucket of its own
SOON_S = 30.0  # only against a hang: it takes a second or two on idle cores
PROBES = [np.random.default_rng(s).integers(2, VOCAB, n).astype(np.int32) for s, n in enumerate((5, 40, 200))]

_steps = itertools.count(1)


def next_version() -> PolicyVersion:
    return PolicyVersion(0, next(_steps))


def child_of(folder: Path, *names: str) -> EngineChild:
    for name in names:
        hf_model(tied=name == "tied", seed=0).save_pretrained(folder / name)
    specs = {n: EngineSpec(folder=folder / n, tensor_parallel=2, behaviour_logprobs=True) for n in names}
    return EngineChild(specs)


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[EngineChild]:
    child = child_of(tmp_path_factory.mktemp("parallel"), "untied", "tied")
    yield child
    child.close()


@pytest.fixture
def child(tmp_path) -> Iterator[EngineChild]:
    """One with an engine of its own, for a test that ends it."""
    made = child_of(tmp_path, "untied")
    yield made
    made.close()


def left_behind(before: set[str], prefix: str = "") -> set[str]:
    """Files in /dev/shm that were not there before, once they had time to go.

    After a death, what Python itself names there is unlinked by its resource tracker: here that of the process of the
    tests, which lives on. What vLLM's workers make has another ``prefix``.
    """
    deadline_s = time.monotonic() + SOON_S
    while (
        left := {n for n in os.listdir("/dev/shm") if n.startswith(prefix)} - before
    ) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def alive(pids: list[int]) -> list[int]:
    """Those that have not ended after some time."""
    deadline_s = time.monotonic() + SOON_S
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


# ---- called in the child


def straddle(engine, prompt: np.ndarray, steps: int) -> None:
    sampling = SamplingSettings(n=3, temperature=1.0, top_p=1.0, max_new_tokens=30, eos_ids=(), seed=3)
    engine.submit("straddles", prompt, sampling)
    for _ in range(steps):
        assert not engine.step()


def finish(engine) -> tuple[Completion, ...]:
    while True:
        for _, completions in engine.step():
            return completions


def family(engine) -> tuple[list[int], int]:
    """(Every process that the child has started, the pid of one worker)."""
    (*_, worker) = engine._engine.model_executor.workers
    return [process.pid for process in psutil.Process().children(recursive=True)], worker.proc.pid


def step_to_the_end(engine) -> None:
    while engine.n_unfinished:
        engine.step()


def poll(engine) -> None:
    engine.poll_receive()


def close(engine) -> list[int]:
    engine.close()
    workers = [worker.proc for worker in engine._engine.model_executor.workers]
    return [worker.pid for worker in workers if worker.is_alive()]


# ---- the laws


@pytest.mark.parametrize("name", ["untied", pytest.param("tied", marks=pytest.mark.slow)])
def test_two_workers_have_the_trainers_logprobs_after_each_update(engines, name):
    policies = [hf_model(tied=name == "tied", seed=seed) for seed in (1, 2, 2)]  # the last changes nothing
    sender = Sender(engines, name, workers=2)
    sender.new_epoch()
    prompt, versions, scores = PROBES[1], [], []
    for policy, steps in zip(policies, (0, 12, 7), strict=True):
        if steps == 12:
            engines.call(name, straddle, prompt, steps)
        versions.append(next_version())
        sender.publish(versions[-1], named_tensors(policy), SMALL)
        assert engines.call(name, version_of) == versions[-1]
        scores.append(engines.call(name, score, PROBES))
        for sequence, logprobs in zip(PROBES, scores[-1], strict=True):
            np.testing.assert_allclose(logprobs, hf_logprobs(policy, sequence), atol=TOLERANCE)
    for once, again in zip(*scores[1:], strict=True):
        np.testing.assert_array_equal(once, again)
    for completion in engines.call(name, finish):
        assert [span.version for span in completion.spans] == versions
        sequence = np.concatenate([prompt, completion.token_ids])
        for policy, span in zip(policies, completion.spans, strict=True):
            expected = hf_logprobs(policy, sequence)[len(prompt) - 1 :][span.start : span.end]
            np.testing.assert_allclose(completion.behaviour_logprobs[span.start : span.end], expected, atol=TOLERANCE)
    sender.close()


@pytest.mark.slow
def test_an_engine_that_is_closed_leaves_no_process_and_no_shared_memory(child):
    before = set(os.listdir("/dev/shm"))
    pids, _ = child.call("untied", family)
    assert len(pids) >= 2
    assert child.call("untied", close) == []
    child.close()
    assert alive(pids) == [] and left_behind(before) == set()


@pytest.mark.slow
def test_a_worker_that_dies_is_an_engine_error_and_leaves_nothing(child):
    before = set(os.listdir("/dev/shm"))
    child.call("untied", straddle, PROBES[0], 3)
    pids, worker = child.call("untied", family)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(EngineError, match="a worker of the engine died or hangs"):
        child.call("untied", step_to_the_end)
    with pytest.raises(EngineError, match="a worker of the engine died or hangs"):
        child.call("untied", poll)
    assert child.call("untied", close) == []
    child.close()
    assert alive(pids) == [] and left_behind(before, "vllm") == set()


@pytest.mark.slow
def test_workers_outlive_a_signal_to_their_group_and_end_with_a_searcher_that_is_killed(child):
    before = set(os.listdir("/dev/shm"))
    child.call("untied", straddle, PROBES[0], 3)
    pids, worker = child.call("untied", family)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
    assert len(child.call("untied", finish)) == 3
    child.call("untied", straddle, PROBES[0], 3)
    child.close()  # by SIGKILL, with requests under way
    assert alive(pids) == [] and left_behind(before, "vllm") == set()
