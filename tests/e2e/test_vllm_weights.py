"""Weights into a living vLLM engine over a real gloo group: all of a version, or nothing of it.

``tied`` and ``untied`` engines live as long as the session, so each test publishes what it starts from.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from engine_child import (
    VOCAB,
    Sender,
    apply,
    begin,
    hf_logprobs,
    hf_model,
    named_tensors,
    score,
    version_of,
    wait_for,
)

from tba_megatron.search.engine import ReceiveState
from tba_megatron.transport.manifest import build_buckets, checksum, unpack
from tba_megatron.transport.weights import join_group, send_version
from tba_megatron.types import Completion, PolicyVersion, SamplingSettings

TOLERANCE = 1e-3  # nats, float32
SMALL = 2048  # bytes: every large tensor has a bucket of its own
BOTH = pytest.mark.parametrize("name", ["tied", "untied"])
ENDLESS = {"temperature": 1.0, "top_p": 1.0, "eos_ids": (), "seed": 3}
PROBES = [np.random.default_rng(s).integers(2, VOCAB, n).astype(np.int32) for s, n in enumerate((5, 40, 200))]

_steps = itertools.count(1)


def next_version() -> PolicyVersion:
    return PolicyVersion(0, next(_steps))


@pytest.fixture(scope="module")
def policies() -> dict:
    """Two policies a kind, which differ by nats."""
    return {name: [hf_model(tied=name == "tied", seed=seed) for seed in (1, 2)] for name in ("tied", "untied")}


@pytest.fixture
def senders(engines) -> Iterator[dict[str, Sender]]:
    made = {name: Sender(engines, name) for name in ("tied", "untied")}
    for sender in made.values():
        sender.new_epoch()
    yield made
    for sender in made.values():
        sender.close()


def assert_engine_is(engines, name: str, model) -> None:
    for sequence, logprobs in zip(PROBES, engines.call(name, score, PROBES), strict=True):
        np.testing.assert_allclose(logprobs, hf_logprobs(model, sequence), atol=TOLERANCE)


# ---- called in the child


def generate(engine, prompt, sampling: SamplingSettings) -> tuple[Completion, ...]:
    engine.submit("r", prompt, sampling)
    while engine.n_unfinished:
        for _, completions in engine.step():
            return completions
    raise AssertionError("the request was lost")


def start_and_step(engine, prompt, sampling: SamplingSettings, steps: int) -> None:
    engine.submit("straddles", prompt, sampling)
    for _ in range(steps):
        assert not engine.step()


def finish(engine) -> tuple[Completion, ...]:
    while True:
        for _, completions in engine.step():
            return completions


def generate_while_receiving(engine, prompt, sampling: SamplingSettings) -> tuple[tuple[Completion, ...], str]:
    completions = generate(engine, prompt, sampling)
    return completions, engine.poll_receive().state.value


# ---- the laws


@BOTH
@pytest.mark.parametrize("bucket_bytes", [SMALL, 64 << 20])
def test_after_an_update_the_engine_has_the_trainers_logprobs(engines, senders, policies, name, bucket_bytes):
    for policy in policies[name]:
        version = next_version()
        senders[name].publish(version, named_tensors(policy), bucket_bytes)
        assert engines.call(name, version_of) == version
        assert_engine_is(engines, name, policy)


def test_the_two_policies_differ_by_more_than_any_tolerance(policies):
    for first, second in policies.values():
        assert np.abs(hf_logprobs(first, PROBES[1]) - hf_logprobs(second, PROBES[1])).max() > 1.0


@BOTH
def test_an_update_with_the_same_weights_changes_nothing(engines, senders, policies, name):
    policy = policies[name][0]
    senders[name].publish(next_version(), named_tensors(policy), SMALL)
    before = engines.call(name, score, PROBES)
    for _ in range(2):
        senders[name].publish(next_version(), named_tensors(policy), SMALL)
        for old, new in zip(before, engines.call(name, score, PROBES), strict=True):
            np.testing.assert_array_equal(old, new)


def test_a_prompt_of_the_old_policy_is_not_served_from_the_cache(engines, senders, policies):
    # Longer than a block of the cache, and asked twice: the second answer reads the block that the first one wrote.
    prompt, greedy = PROBES[2], SamplingSettings(n=1, max_new_tokens=4, **{**ENDLESS, "temperature": 0.0})
    for policy in policies["tied"]:
        senders["tied"].publish(next_version(), named_tensors(policy))
        for _ in range(2):
            (completion,) = engines.call("tied", generate, prompt, greedy)
            sequence = np.concatenate([prompt, completion.token_ids])
            expected = hf_logprobs(policy, sequence)[len(prompt) - 1 :]
            np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=TOLERANCE)


def test_the_spans_of_a_request_that_straddles_an_update_tile_it_and_each_is_its_versions(engines, senders, policies):
    old, new = policies["tied"]
    versions = [next_version(), next_version()]
    senders["tied"].publish(versions[0], named_tensors(old))
    prompt = PROBES[1]
    engines.call("tied", start_and_step, prompt, SamplingSettings(n=3, max_new_tokens=30, **ENDLESS), 12)
    senders["tied"].publish(versions[1], named_tensors(new))
    for completion in engines.call("tied", finish):
        first, second = completion.spans
        assert [first.version, second.version] == versions
        assert first.start == 0 < first.end == second.start < second.end == len(completion.token_ids) == 30
        sequence = np.concatenate([prompt, completion.token_ids])
        for policy, span in ((old, first), (new, second)):
            expected = hf_logprobs(policy, sequence)[len(prompt) - 1 :]
            found = completion.behaviour_logprobs
            np.testing.assert_allclose(found[span.start : span.end], expected[span.start : span.end], atol=TOLERANCE)


def test_the_engine_generates_while_weights_arrive(engines, senders, policies):
    old, new = policies["untied"]
    sender, version = senders["untied"], next_version()
    sender.publish(version, named_tensors(old))
    manifest, buckets = build_buckets(next_version(), named_tensors(new), SMALL, owner=0)
    group = sender.post(manifest)
    group.broadcast(buckets[0], 0)
    sampling = SamplingSettings(n=4, max_new_tokens=10, **ENDLESS)
    completions, state = engines.call("untied", generate_while_receiving, PROBES[0], sampling)
    assert state == ReceiveState.POSTED
    assert {span.version for c in completions for span in c.spans} == {version}
    for bucket in buckets[1:]:
        group.broadcast(bucket, 0)
    assert engines.call("untied", wait_for, ReceiveState.STAGED)[0] is ReceiveState.STAGED
    assert_engine_is(engines, "untied", old)
    engines.call("untied", apply)
    assert_engine_is(engines, "untied", new)


@BOTH
def test_a_damaged_bucket_leaves_the_engine_on_its_old_weights(engines, senders, policies, name):
    old, new = policies[name]
    sender, version = senders[name], next_version()
    sender.publish(version, named_tensors(old))
    manifest, buckets = build_buckets(next_version(), named_tensors(new), SMALL, owner=0)
    buckets[3][5] ^= 1
    send_version(sender.post(manifest), manifest, buckets)
    state, reason = engines.call(name, wait_for, ReceiveState.STAGED)
    assert state is ReceiveState.FAILED
    assert f"version {manifest.version}: bucket 3 of {len(buckets)} from rank 0 has another checksum" in reason
    assert engines.call(name, version_of) == version
    assert_engine_is(engines, name, old)
    sender.new_epoch()
    sender.publish(next_version(), named_tensors(new), SMALL)
    assert_engine_is(engines, name, new)


def die_after(bucket: int, fields: dict, manifest, buckets) -> None:
    """A sender in a process of its own that is killed with ``bucket`` buckets on the wire."""
    group = join_group(**fields)
    for index in range(bucket):
        group.broadcast(buckets[index], 0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sender_that_dies_in_the_middle_leaves_the_engine_on_its_old_weights(engines, senders, policies):
    old, new = policies["untied"]
    sender, version = senders["untied"], next_version()
    sender.publish(version, named_tensors(old))
    sender.new_epoch()
    manifest, buckets = build_buckets(next_version(), named_tensors(new), SMALL, owner=0)
    offer = sender.offer(manifest)
    engines.call("untied", begin, offer)
    fields = {"host": offer.host, "port": offer.port, "epoch": offer.epoch, "rank": 0, "world_size": 2}
    pid = os.fork()
    if pid == 0:
        die_after(4, {**fields, "backend": "gloo", "timeout_s": 20.0}, manifest, buckets)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    state, reason = engines.call("untied", wait_for, ReceiveState.STAGED)
    assert state is ReceiveState.FAILED
    assert f"version {manifest.version}: bucket 4 of {len(buckets)} from rank 0 did not arrive" in reason
    assert engines.call("untied", version_of) == version
    assert_engine_is(engines, "untied", old)
    sender.new_epoch()
    sender.publish(next_version(), named_tensors(new))
    assert_engine_is(engines, "untied", new)


def without(name: str):
    return lambda tensors: [pair for pair in tensors if pair[0] != name]


def with_extra(name: str):
    return lambda tensors: [*tensors, (name, torch.zeros(VOCAB, 64))]


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        (
            "untied",
            without("model.layers.1.self_attn.k_proj.weight"),
            "missing ['model.layers.1.self_attn.k_proj.weight']",
        ),
        ("untied", without("lm_head.weight"), "missing ['lm_head.weight']"),
        ("tied", with_extra("lm_head.weight"), "unexpected ['lm_head.weight']"),
        ("tied", with_extra("model.layers.2.norm"), "unexpected ['model.layers.2.norm']"),
    ],
    ids=["part of a fused layer", "untied head", "tied head", "unknown"],
)
def test_a_version_that_does_not_fit_is_refused_before_anything_is_touched(
    engines, senders, policies, name, change, complaint
):
    old, new = policies[name]
    sender, version = senders[name], next_version()
    sender.publish(version, named_tensors(old))
    manifest, _ = build_buckets(next_version(), change(named_tensors(new)), SMALL, owner=0)
    engines.call(name, begin, sender.offer(manifest))
    state, reason = engines.call(name, wait_for, ReceiveState.STAGED)
    assert state is ReceiveState.FAILED and complaint in reason
    assert engines.call(name, version_of) == version
    assert_engine_is(engines, name, old)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(engines, senders, policies, poison):
    old, new = policies["tied"]
    sender, version = senders["tied"], next_version()
    sender.publish(version, named_tensors(old))
    manifest, buckets = build_buckets(next_version(), named_tensors(new), SMALL, owner=0)
    entry = manifest.entries[4]
    unpack(manifest.entries, buckets)[4][1].view(-1)[7] = poison
    sums = list(manifest.buckets)
    sums[entry.bucket] = msgspec.structs.replace(sums[entry.bucket], checksum=checksum(buckets[entry.bucket]))
    manifest = msgspec.structs.replace(manifest, buckets=tuple(sums))
    send_version(sender.post(manifest), manifest, buckets)
    state, reason = engines.call("tied", wait_for, ReceiveState.STAGED)
    assert state is ReceiveState.FAILED and f"{entry.name} is not finite" in reason
    assert engines.call("tied", version_of) == version
    assert_engine_is(engines, "tied", old)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensor: tensor.t().contiguous(), "v_proj.weight is float32 [64, 32], not float32 [32, 64]"),
        (lambda tensor: tensor.bfloat16(), "v_proj.weight is bfloat16 [32, 64], not float32 [32, 64]"),
    ],
    ids=["shape", "dtype"],
)
def test_a_version_of_another_shape_or_dtype_is_refused_before_anything_is_touched(
    engines, senders, policies, change, complaint
):
    old, new = policies["untied"]
    sender, version = senders["untied"], next_version()
    sender.publish(version, named_tensors(old))
    tensors = [
        (name, change(tensor) if "1.self_attn.v_proj.weight" in name else tensor) for name, tensor in named_tensors(new)
    ]
    manifest, _ = build_buckets(next_version(), tensors, SMALL, owner=0)
    engines.call("untied", begin, sender.offer(manifest))
    state, reason = engines.call("untied", wait_for, ReceiveState.STAGED)
    assert state is ReceiveState.FAILED and complaint in reason
    assert engines.call("untied", version_of) == version
    assert_engine_is(engines, "untied", old)
