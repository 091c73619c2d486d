"""What a searcher does with new weights: it takes them between two steps, answers the probe, and says what it cost."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import test_searcher as searching
import torch
from test_searcher import S, Script, config_of, handlers, run_here, weights  # noqa: F401  (fixtures)

from tba_megatron.config_search import FakeEngineConfig
from tba_megatron.search.fake_engine import FakeEngine
from tba_megatron.transport.manifest import allocate, describe, encode_manifest, plan_layout
from tba_megatron.transport.messages import (
    Applied,
    FromSearcher,
    Goodbye,
    Heartbeat,
    Offer,
    Probed,
    ReceiveFailed,
    ToSearcher,
)
from tba_megatron.transport.weight_files import finish_version, partial_of, stage_file, version_folder, write_stage
from tba_megatron.types import PolicyVersion

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
PROBE = (2, 3, 4, 5)


def offered(folder: Path, *, probe: tuple[int, ...] = (), damaged: bool = False) -> Offer:
    """Version 0.1 of the one tensor that the fake engine's model has, as files."""
    layout = plan_layout([("w", torch.float32, (2,))], 1 << 20)
    buckets = allocate(layout, torch.device("cpu"))
    manifest = describe(V1, layout, buckets, owner=0)
    target = version_folder(folder, V1)
    partial = partial_of(folder, V1)
    partial.mkdir(parents=True)
    shutil.copyfile(searching.MODEL / "config.json", partial / "config.json")
    if damaged:
        buckets[0][1] ^= 1
    write_stage(partial, stage_file(0, 1), layout, buckets)
    finish_version(partial, target, manifest, 1)
    return Offer(version=str(V1), manifest=encode_manifest(manifest), round=0, folder=str(target), probe=probe)


class Slow(FakeEngine):
    """Applying takes no time in a fake engine: here it is said to take 3 seconds, and recomputing 2."""

    recompute_s = 0.0
    applied_with: list[int]  # requests that were in it

    def apply(self) -> None:
        super().apply()
        self.applied_with = [*getattr(self, "applied_with", []), self.n_unfinished]
        self._paused_s += 3.0
        self.recompute_s += 2.0


def run_with(model: Path, offer: Offer, in_flight: str = "recompute", prompts: int = 60):
    config = config_of(
        search={
            "engine": {"kind": "fake"},
            "completions_per_prompt": S,
            "max_new_tokens": 6,
            "prompts_in_engine": 4,
            "in_flight": in_flight,
        },
        transport={"heartbeat_s": 1e-9, "lease_s": 10.0},
    )
    engine = Slow(
        model,
        FakeEngineConfig(tokens_per_step=1),
        version=V0,
        seed=0,
        answer=searching.right_answer,
        in_flight=in_flight,
    )
    control = Script(_offer_once_at_work(searching.until(prompts * S, prompts=prompts), offer))
    engine.poll_receive = _until_decided(engine)  # type: ignore[method-assign]
    return run_here(config, engine, control), engine, control


def _offer_once_at_work(script: Script, offer: Offer):
    """What ``script`` answers, and ``offer`` to the first word of a searcher that has generated something."""
    waiting = [offer]

    def answer(message: FromSearcher) -> Iterable[ToSearcher]:
        yield from script._answer(message)
        if isinstance(message, Heartbeat) and message.generated and waiting:
            yield waiting.pop()

    return answer


def _until_decided(engine: FakeEngine):
    """``poll_receive`` that waits until the receive has ended: when a version comes is then no matter of luck."""
    poll = engine.poll_receive

    def decided():
        while engine._receiver._thread is not None and engine._receiver._thread.is_alive():
            engine._receiver._thread.join()
        return poll()

    return decided


def versions(ran) -> list[PolicyVersion]:
    return [rollout.version for group in ran.groups for rollout in group.rollouts]


def test_a_version_is_applied_between_two_steps_and_the_probe_is_answered_with_it(weights, handlers, tmp_path):  # noqa: F811
    ran, engine, control = run_with(weights, offered(tmp_path / "published", probe=PROBE))
    assert ran.code == 0 and set(versions(ran)) <= {V0, V1} and V1 in versions(ran)
    words = [message for message in control.heard if isinstance(message, Applied | Probed)]
    assert [type(word) for word in words] == [Applied, Probed]
    applied, probed = words
    assert (applied.version, applied.pause_s) == ("0.1", pytest.approx(3.0, abs=0.5))
    assert (probed.version, len(probed.logprobs_nats)) == ("0.1", len(PROBE) - 1)
    (expected,) = engine.score([np.array(PROBE, np.int32)])
    assert probed.logprobs_nats == tuple(expected.tolist())


def test_pausing_and_recomputing_count_as_idle(weights, handlers, tmp_path):  # noqa: F811
    _, _, control = run_with(weights, offered(tmp_path / "published"))
    goodbye = control.heard[-1]
    assert isinstance(goodbye, Goodbye)
    assert goodbye.paused_s == pytest.approx(5.0, abs=0.5)
    assert goodbye.idle_s >= goodbye.paused_s
    beats = [message for message in control.heard if isinstance(message, Heartbeat)]
    assert any(beat.paused_s >= 5.0 for beat in beats)


def test_without_a_probe_nothing_is_scored(weights, handlers, tmp_path):  # noqa: F811
    _, _, control = run_with(weights, offered(tmp_path / "published"))
    assert control.heard_of(Applied) and not control.heard_of(Probed)


def test_drain_finishes_what_is_in_the_engine_and_begins_nothing_before_the_new_weights(weights, handlers, tmp_path):  # noqa: F811
    ran, engine, control = run_with(weights, offered(tmp_path / "published"), in_flight="drain")
    assert engine.applied_with == [0]
    assert len(control.heard_of(Applied)) == 1
    found = versions(ran)
    assert found == sorted(found) and V1 in found


def test_recompute_and_keep_kv_apply_with_completions_in_flight(weights, handlers, tmp_path):  # noqa: F811
    for in_flight in ("recompute", "keep_kv"):
        _, engine, _ = run_with(weights, offered(tmp_path / in_flight), in_flight=in_flight)
        assert engine.applied_with[0] > 0


def test_a_version_that_is_damaged_is_told_and_the_old_one_goes_on(weights, handlers, tmp_path):  # noqa: F811
    ran, engine, control = run_with(weights, offered(tmp_path / "published", damaged=True))
    (failed,) = control.heard_of(ReceiveFailed)
    assert failed.version == "0.1" and "checksum" in failed.reason
    assert set(versions(ran)) == {V0} and engine.version == V0
    assert not control.heard_of(Applied)


def test_drain_goes_on_draining_when_a_newer_version_is_offered_before_the_engine_is_empty(weights, handlers, tmp_path):  # noqa: F811
    first = offered(tmp_path / "published")

    config = config_of(
        search={
            "engine": {"kind": "fake"},
            "completions_per_prompt": S,
            "max_new_tokens": 6,
            "prompts_in_engine": 4,
            "in_flight": "drain",
        },
        transport={"heartbeat_s": 1e-9, "lease_s": 10.0},
    )
    engine = Slow(
        weights,
        FakeEngineConfig(tokens_per_step=1),
        version=V0,
        seed=0,
        answer=searching.right_answer,
        in_flight="drain",
    )
    script = searching.until(60 * S, prompts=60)
    offers = 0

    def answer(message: FromSearcher) -> Iterable[ToSearcher]:
        nonlocal offers
        yield from script._answer(message)
        # The same version again and again, each before the last can be applied.
        if isinstance(message, Heartbeat) and message.generated and offers < 40 and engine.version == V0:
            offers += 1
            yield first

    engine.poll_receive = _until_decided(engine)  # type: ignore[method-assign]
    ran = run_here(config, engine, Script(answer))
    assert engine.applied_with[0] == 0 and engine.version == V1
    assert offers < 40  # it was applied long before the offers ended
    assert V1 in versions(ran)
