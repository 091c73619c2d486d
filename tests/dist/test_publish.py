"""Searchers receive the trainer's weights under Hugging Face's names, and a dead searcher harms one publish."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
import torch
from ranks import run_ranks

from tba_megatron.config_sections import FakeEngineConfig, WeightsConfig
from tba_megatron.search.engine import ReceiveState
from tba_megatron.search.fake_engine import FakeEngine
from tba_megatron.trainer.exchange import from_rank_0
from tba_megatron.trainer.publish import Publisher
from tba_megatron.transport.control import ControlClient, ControlServer
from tba_megatron.transport.messages import Applied, Heartbeat, Hello, Offer, Posted, ReceiveFailed, Stop
from tba_megatron.transport.registry import PromptLeases
from tba_megatron.types import PolicyVersion

TOKEN = "token"
LIMIT_S = 60.0
LEASE_S = 3.0
GROUPS = tiny.train_groups(4)


class KeepingEngine(FakeEngine):
    """Writes every version that it applies to ``folder``."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        super().__init__(model, FakeEngineConfig(), version=PolicyVersion(0, 0), seed=0)
        self._name, self._folder = name, folder

    def apply(self) -> None:
        _, tensors = self._receiver.take()
        torch.save({n: t.clone() for n, t in tensors}, self._folder / f"{self._name}-{self._receiving}.pt")
        self._version, self._receiving = self._receiving, None


def search(name: str, model: Path, folder: Path, dies_at: str | None) -> None:
    """The part of a searcher that takes weights; ends on Stop, or without a word when offered ``dies_at``."""
    engine, posted, stopped = KeepingEngine(name, model, folder), True, False
    deadline_s = time.monotonic() + LIMIT_S
    while not (folder / "address").exists():
        time.sleep(0.01)
    control = ControlClient((folder / "address").read_text())
    control.send(Hello(token=TOKEN, searcher=name, host="h", workers=1, version="0.0"))
    while not stopped and time.monotonic() < deadline_s:
        for message in control.poll(0.02):
            stopped = stopped or isinstance(message, Stop)
            if isinstance(message, Offer):
                if message.version == dies_at:
                    os._exit(0)
                engine.begin_receive(message, LIMIT_S)
                offered, posted = message.version, False
        status = engine.poll_receive()
        if status.state in (ReceiveState.POSTED, ReceiveState.STAGED) and not posted:
            control.send(Posted(version=offered))
            posted = True
        if status.state is ReceiveState.STAGED:
            engine.apply()
            control.send(Applied(version=str(engine.version), pause_s=0.0))
        elif status.state is ReceiveState.FAILED and not posted:
            control.send(ReceiveFailed(version=offered, reason=status.reason))
            posted = True
        beat = Heartbeat(
            generated=0, busy_s=0.0, idle_s=0.0, version=str(engine.version), wanted_prompts=0, received_prompts=0
        )
        control.send(beat)
    control.close()


@contextmanager
def searchers(model: Path, folder: Path, **dies_at: str | None) -> Iterator[None]:
    """A forked process for each name; all ended by the end."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=search, args=(name, model, folder, at)) for name, at in dies_at.items()]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


class Desk:
    """A rank with its publisher, and on rank 0 the control server."""

    def __init__(self, groups, sizes, model: Path, folder: Path, n_searchers: int, bucket_bytes: int) -> None:
        self.groups, self.control = groups, None
        self.rank = tiny.Rank(groups, tiny.trainer_config(**sizes), model)
        if groups.rank == 0:
            self.control = ControlServer(
                host="127.0.0.1",
                port=0,
                token=TOKEN,
                lease_s=LEASE_S,
                max_ahead_groups=1,
                shards=(),
                newest=PolicyVersion(0, 0),
                leases=PromptLeases(),
            )
            partial = folder / ".address"
            partial.write_text(self.control.address)
            partial.rename(folder / "address")
            assert self.control.wait_until(lambda members: len(members) == n_searchers, LIMIT_S)
        self.publisher = Publisher(
            config=WeightsConfig(timeout_s=LIMIT_S, bucket_bytes=bucket_bytes),
            groups=groups,
            architecture=self.rank.architecture,
            shape=self.rank.shape,
            dtype="float32",
            host="127.0.0.1",
            control=self.control,
        )

    def publish(self, step: int) -> tuple[int | None, dict[str, torch.Tensor]]:
        """(epoch, or None when nothing was sent; this rank's part of the weights), after all have applied it."""
        version = PolicyVersion(0, step)
        plan = (self.publisher.plan(self.control.members(), version),) if self.control else None
        (cohort,) = from_rank_0(plan, self.groups)
        if cohort is not None:
            before = self.publisher.failed
            self.publisher.publish(self.rank.policy, version, cohort)
            self.publisher._wait_for_thread()
            if self.control and self.publisher.failed == before:
                assert self.control.wait_until(lambda members: all(m.version == version for m in members), LIMIT_S)
        torch.distributed.barrier(group=self.groups.world)
        return None if cohort is None else cohort.epoch, self.rank.weights()

    def close(self) -> tuple[int, int]:
        if self.control:
            self.control.stop_searchers("the test is over")
            self.control.wait_until(lambda members: True, 1.0)
            self.control.close()
        self.publisher.close()
        return self.publisher.published, self.publisher.failed


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def received(folder: Path, name: str) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem.removeprefix(f"{name}-"): torch.load(path) for path in folder.glob(f"{name}-*.pt")}


def assert_equal_weights(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes"),
    [({}, 1 << 20), ({"tp": 2}, 4096), ({"pp": 2}, 4096), pytest.param({"dp": 2}, 64, marks=pytest.mark.slow)],
    ids=str,
)
def test_searchers_receive_the_trainers_weights_and_nothing_is_sent_twice(sizes, bucket_bytes, model, tmp_path):
    def body(groups):
        desk = Desk(groups, sizes, model, tmp_path, 2, bucket_bytes)
        sent = []
        for step in (1, 2):
            desk.rank.step(GROUPS)
            sent.append(desk.publish(step))
        again = desk.publish(2)[0]
        return sent, again, desk.close()

    with searchers(model, tmp_path, a=None, b=None):
        ranks = run_ranks(body, **sizes)
    first, second = (tiny.whole([sent[i][1] for sent, _, _ in ranks]) for i in range(2))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for name in ("a", "b"):
        found = received(tmp_path, name)
        assert sorted(found) == ["0.1", "0.2"]
        assert_equal_weights(found["0.1"], first)
        assert_equal_weights(found["0.2"], second)
    for sent, again, _ in ranks:
        assert [epoch for epoch, _ in sent] == [0, 0]  # one group for both
        assert again is None
    leaders = {1: 1, 2: sizes.get("pp", 1)}[len(ranks)]
    assert [counts for _, _, counts in ranks] == [(2, 0)] * leaders + [(0, 0)] * (len(ranks) - leaders)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=str)
def test_a_searcher_that_dies_breaks_one_publish_and_the_next_reaches_the_others(sizes, model, tmp_path):
    def body(groups):
        desk = Desk(groups, sizes, model, tmp_path, 2, 4096)
        sent = []
        for step in (1, 2, 3):
            desk.rank.step(GROUPS)
            sent.append(desk.publish(step))
        return sent, desk.close()

    with searchers(model, tmp_path, a=None, b="0.2"):
        ranks = run_ranks(body, **sizes)
    assert [epoch for epoch, _ in ranks[0][0]] == [0, 0, 1]
    assert [counts for _, counts in ranks] == [(2, 1)] * len(ranks)
    assert sorted(received(tmp_path, "b")) == ["0.1"]
    found = received(tmp_path, "a")
    assert sorted(found) == ["0.1", "0.3"]
    assert_equal_weights(found["0.3"], tiny.whole([sent[-1][1] for sent, _ in ranks]))
