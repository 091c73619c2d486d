"""What becomes of requests that are in a real engine when new weights come, and when something is scored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from engine_child import VOCAB, EngineChild, hf_logprobs, hf_model, load, named_tensors, score, started_engines

from tba_megatron.errors import EngineError
from tba_megatron.types import Completion, PolicyVersion, SamplingSettings

TOLERANCE = 1e-3  # nats, float32
MODES = ("recompute", "keep_kv", "drain")
SHORT, LONG = (np.random.default_rng(n).integers(2, VOCAB, n).astype(np.int32) for n in (40, 200))  # a block: 128
# vLLM on CPU cannot cut the prompt of a seeded request (0.32): where an engine is full, prompts are short or unseeded.
TINY = np.random.default_rng(6).integers(2, VOCAB, (2, 6)).astype(np.int32)
PROBE = np.random.default_rng(1).integers(2, VOCAB, 16).astype(np.int32)
ALL_PLACES = 64  # of the child's engines

_steps = itertools.count(1)


def settings(n: int, max_new_tokens: int = 30, seed: int | None = 3) -> SamplingSettings:
    return SamplingSettings(n=n, temperature=1.0, top_p=1.0, max_new_tokens=max_new_tokens, eos_ids=(), seed=seed)


@pytest.fixture(scope="module")
def policies() -> list:
    """Three that differ by nats; the first is what the engines start with."""
    return [hf_model(tied=True, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def engines(policies, tmp_path_factory) -> Iterator[EngineChild]:
    specs = {mode: {"behaviour_logprobs": True, "in_flight": mode} for mode in MODES}
    yield from started_engines(dict.fromkeys(MODES, policies[0]), tmp_path_factory, **specs)


def publish(engines: EngineChild, mode: str, policy) -> PolicyVersion:
    version = PolicyVersion(0, next(_steps))
    assert engines.call(mode, load, version, named_tensors(policy))
    return version


def assert_span_is(policy, prompt: np.ndarray, completion: Completion, start: int, end: int) -> None:
    assert completion.behaviour_logprobs is not None
    expected = hf_logprobs(policy, np.concatenate([prompt, completion.token_ids]))[len(prompt) - 1 :]
    np.testing.assert_allclose(completion.behaviour_logprobs[start:end], expected[start:end], atol=TOLERANCE)


# ---- called in the child


def start(engine, requests: dict[str, np.ndarray], sampling: SamplingSettings, steps: int = 0) -> None:
    for name, prompt in requests.items():
        engine.submit(name, prompt, sampling)
    go_on(engine, steps)


def go_on(engine, steps: int) -> None:
    for _ in range(steps):
        assert not engine.step()


def finish(engine) -> dict[str, tuple[Completion, ...]]:
    done = {}
    while engine.n_unfinished:
        done.update(engine.step())
    return done


def count_recomputed(engine) -> tuple[int, float]:
    """Tokens that the steps to the end compute again, and the seconds that it is said to take."""
    before_s, tokens = engine.recompute_s, 0
    while engine.n_unfinished:
        engine.step()
        tokens += engine._scheduler.n_recomputed
    return tokens, engine.recompute_s - before_s


def paused(engine) -> float:
    return engine.paused_s


def score_in_the_last_step(engine, prompt: np.ndarray, probe: np.ndarray) -> tuple[int, list[str], int]:
    """Unfinished after the score, what the next step gives, unfinished then."""
    start(engine, {"last": prompt}, settings(n=2, max_new_tokens=6), steps=5)
    engine.score([probe])
    unfinished = engine.n_unfinished
    return unfinished, [name for name, _ in engine.step()], engine.n_unfinished


def score_twice_then_finish(engine, probes: list[np.ndarray], first_steps: int) -> tuple[list, dict]:
    go_on(engine, first_steps)
    scores = [engine.score(probes), engine.score(probes)]
    return scores, finish(engine)


# ---- the laws


def test_each_span_of_a_completion_that_lived_through_two_updates_is_its_versions(engines, policies):
    versions = [publish(engines, "recompute", policies[0])]
    engines.call("recompute", start, {"r": LONG}, settings(n=3), 12)
    for policy in policies[1:]:
        versions.append(publish(engines, "recompute", policy))
        engines.call("recompute", go_on, 7)
    for completion in engines.call("recompute", finish)["r"]:
        assert [(s.version, s.start, s.end) for s in completion.spans] == [
            (versions[0], 0, 12),
            (versions[1], 12, 19),
            (versions[2], 19, 30),
        ]
        for policy, span in zip(policies, completion.spans, strict=True):
            assert_span_is(policy, LONG, completion, span.start, span.end)


def test_what_an_update_makes_compute_again_is_counted_to_the_token(engines, policies):
    publish(engines, "recompute", policies[1])
    engines.call("recompute", start, {"r": SHORT}, settings(n=3), 12)
    before_s = engines.call("recompute", paused)
    publish(engines, "recompute", policies[2])
    assert engines.call("recompute", paused) > before_s
    tokens, seconds = engines.call("recompute", count_recomputed)
    assert tokens == 3 * (len(SHORT) + 11)  # the newest token of each had not been computed yet
    assert seconds > 0.0


@pytest.mark.parametrize("mode", ["keep_kv", "drain"])
def test_where_nothing_is_thrown_away_nothing_is_computed_again(engines, policies, mode):
    publish(engines, mode, policies[1])
    engines.call(mode, start, {"r": SHORT}, settings(n=3), 12)
    if mode == "keep_kv":
        publish(engines, mode, policies[2])
    assert engines.call(mode, count_recomputed) == (0, 0.0)


def test_a_draining_engine_refuses_new_weights_until_it_is_empty(engines, policies):
    old = publish(engines, "drain", policies[0])
    engines.call("drain", start, {"r": LONG}, settings(n=2), 5)
    with pytest.raises(EngineError, match="1 requests are in the engine"):
        publish(engines, "drain", policies[1])
    first = engines.call("drain", finish)["r"]
    new = publish(engines, "drain", policies[1])
    engines.call("drain", start, {"r": LONG}, settings(n=2))
    second = engines.call("drain", finish)["r"]
    for version, policy, completions in ((old, policies[0], first), (new, policies[1], second)):
        for completion in completions:
            assert [(s.version, s.start, s.end) for s in completion.spans] == [(version, 0, 30)]
            assert_span_is(policy, LONG, completion, 0, 30)


def test_with_kept_keys_and_values_a_completion_goes_on_and_whatever_begins_later_is_exact(engines, policies):
    versions = [publish(engines, "keep_kv", policies[0])]
    engines.call("keep_kv", start, {"old": LONG}, settings(n=3, max_new_tokens=100), 12)
    for number, policy in enumerate(policies[1:]):
        versions.append(publish(engines, "keep_kv", policy))
        # Twice: the second finds what the first left in the cache.
        engines.call("keep_kv", start, {f"{number} a": LONG}, settings(n=2, max_new_tokens=10), 2)
        engines.call("keep_kv", start, {f"{number} b": LONG}, settings(n=2, max_new_tokens=10), 1)
    done = engines.call("keep_kv", finish)
    for completion in done["old"]:
        spans = completion.spans
        assert [span.version for span in spans] == versions
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])] and spans[-1].end == 100
        assert_span_is(policies[0], LONG, completion, 0, spans[0].end)
    for name in ("1 a", "1 b"):
        for completion in done[name]:
            assert {span.version for span in completion.spans} == {versions[-1]}
            assert_span_is(policies[-1], LONG, completion, 0, len(completion.token_ids))


def test_with_kept_keys_and_values_a_request_that_waited_for_a_place_is_the_new_policys(engines, policies):
    publish(engines, "keep_kv", policies[0])
    engines.call("keep_kv", start, {"runs": LONG}, settings(n=ALL_PLACES, max_new_tokens=40, seed=None), 9)
    engines.call("keep_kv", start, {"waits": LONG}, settings(n=2, max_new_tokens=6, seed=None), 2)
    version = publish(engines, "keep_kv", policies[1])
    for completion in engines.call("keep_kv", finish)["waits"]:
        assert [span.version for span in completion.spans] == [version]
        assert_span_is(policies[1], LONG, completion, 0, 6)


@pytest.mark.parametrize("mode", MODES)
def test_a_score_in_a_full_engine_is_exact_and_disturbs_no_request(engines, policies, mode):
    publish(engines, mode, policies[1])
    # Twice as many as there are places. The long text is scored twice: the cache then holds its first block.
    requests = dict(zip("ab", TINY, strict=True))
    engines.call(mode, start, requests, settings(n=ALL_PLACES))
    undisturbed = engines.call(mode, finish)
    engines.call(mode, start, requests, settings(n=ALL_PLACES))
    scores, done = engines.call(mode, score_twice_then_finish, [PROBE, LONG], 4)
    for once in scores:
        for sequence, logprobs in zip((PROBE, LONG), once, strict=True):
            np.testing.assert_allclose(logprobs, hf_logprobs(policies[1], sequence), atol=TOLERANCE)
    for name, prompt in requests.items():
        assert [c.token_ids.tolist() for c in done[name]] == [c.token_ids.tolist() for c in undisturbed[name]]
        assert_span_is(policies[1], prompt, done[name][-1], 0, 30)


def test_what_finishes_while_something_is_scored_comes_out_of_the_next_step(engines):
    assert engines.call("recompute", score_in_the_last_step, SHORT, PROBE) == (1, ["last"], 0)


def test_a_score_right_after_an_update_is_the_new_policys(engines, policies):
    for mode in ("recompute", "keep_kv"):
        publish(engines, mode, policies[0])
        engines.call(mode, start, {"r": LONG}, settings(n=ALL_PLACES, seed=None), 9)
        publish(engines, mode, policies[2])
        (logprobs,) = engines.call(mode, score, [LONG])
        np.testing.assert_allclose(logprobs, hf_logprobs(policies[2], LONG), atol=TOLERANCE)
        engines.call(mode, finish)
