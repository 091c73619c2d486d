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
from publishing import LIMIT_S, TOKEN, PublishingRank
from ranks import run_ranks

from tba_megatron.config_search import FakeEngineConfig
from tba_megatron.config_sections import WeightsConfig
from tba_megatron.search.engine import ReceiveState
from tba_megatron.search.fake_engine import FakeEngine
from tba_megatron.transport.control_client import ControlClient
from tba_megatron.transport.messages import Applied, Heartbeat, Hello, Offer, ReceiveFailed, Stop
from tba_megatron.transport.weight_files import newest
from tba_megatron.types import PolicyVersion

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
    engine, receiving, stopped = KeepingEngine(name, model, folder), False, False
    deadline_s = time.monotonic() + LIMIT_S
    while not (folder / "address").exists():
        time.sleep(0.01)
    control = ControlClient((folder / "address").read_text(), TOKEN)
    control.send(
        Hello(
            token=TOKEN,
            searcher=name,
            host="h",
            workers=1,
            version="0.0",
            takes_every={"fixed": 0, "old": 2}.get(name, 1),
        )
    )
    while not stopped and time.monotonic() < deadline_s:
        for message in control.poll(0.02):
            stopped = stopped or isinstance(message, Stop)
            if isinstance(message, Offer):
                if message.version == dies_at:
                    os._exit(0)
                engine.begin_receive(message, LIMIT_S)
                offered, number, receiving = message.version, message.round, True
        status = engine.poll_receive()
        if receiving and status.state is ReceiveState.STAGED:
            engine.apply()
            control.send(Applied(version=str(engine.version), pause_s=0.0))
            receiving = False
        elif receiving and status.state is ReceiveState.NONE:
            receiving = False
        elif receiving and status.state is ReceiveState.FAILED:
            control.send(ReceiveFailed(version=offered, round=number, reason=status.reason))
            receiving = False
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


class Desk(PublishingRank):
    """A rank of the tiny model that makes steps and publishes."""

    def __init__(self, groups, sizes, model: Path, folder: Path, n_searchers: int, **weights) -> None:
        config = WeightsConfig(**({"timeout_s": LIMIT_S, "bucket_bytes": 4096} | weights))
        rank = tiny.Rank(groups, tiny.trainer_config(**sizes), model)
        super().__init__(groups, rank, folder=folder, n_searchers=n_searchers, config=config)

    def step_and_publish(self, step: int) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        """(the groups that were used; this rank's part of the weights), after all have applied it."""
        self.rank.step(GROUPS)
        version, failed = PolicyVersion(0, step), self.counts()[1]
        plan = self.publish(version)
        if self.counts()[1] == failed:
            self.wait_until_applied(version)
        return tuple(cohort.epoch for cohort in plan.cohorts) if plan else (), self.rank.weights()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def received(folder: Path, name: str) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem.removeprefix(f"{name}-"): torch.load(path) for path in folder.glob(f"{name}-*.pt")}


def assert_equal_weights(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ({}, {"bucket_bytes": 1 << 20}),
        ({"tp": 2}, {}),
        ({"pp": 2}, {}),
        ({"dp": 2}, {"cohort_size": 1}),  # a replica each
        ({"pp": 2}, {"transport": "files"}),
        ({"tp": 2, "pp": 2}, {}),
        pytest.param({}, {"cohort_size": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, {"bucket_bytes": 64}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {"transport": "files"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, {"cohort_size": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_searchers_receive_the_trainers_weights_and_nothing_is_sent_twice(sizes, weights, model, tmp_path):
    def body(groups):
        desk = Desk(groups, sizes, model, tmp_path, 2, **weights)
        sent = [desk.step_and_publish(step) for step in (1, 2)]
        again, counts = desk.publish(PolicyVersion(0, 2)), desk.counts()
        desk.close()
        return sent, again, counts

    with searchers(model, tmp_path, a=None, b=None):
        ranks = run_ranks(body, **sizes)
    replica = [sent for sent, _, _ in ranks[: len(ranks)]]
    first, second = (tiny.whole([sent[i][1] for sent in replica]) for i in range(2))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for name in ("a", "b"):
        found = received(tmp_path, name)
        assert sorted(found) == ["0.1", "0.2"]
        assert_equal_weights(found["0.1"], first)
        assert_equal_weights(found["0.2"], second)
    groups_used = (0, 1) if weights.get("cohort_size") == 1 else (0,)
    for sent, again, counts in ranks:
        assert [epochs for epochs, _ in sent] == [groups_used, groups_used]  # the same groups for both
        assert again is None
        assert counts == (2, 0)
    if weights.get("transport") == "files":
        found = newest(tmp_path / "weights")
        assert found is not None and found[0] == PolicyVersion(0, 2)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=str)
def test_a_searcher_that_dies_breaks_one_publish_and_the_next_reaches_the_others(sizes, model, tmp_path, caplog):
    def body(groups):
        desk = Desk(groups, sizes, model, tmp_path, 2)
        sent = [desk.step_and_publish(step) for step in (1, 2, 3)]
        counts = desk.counts()
        desk.close()
        return sent, counts

    with searchers(model, tmp_path, a=None, b="0.2"):
        ranks = run_ranks(body, **sizes)
    assert [epochs for epochs, _ in ranks[0][0]] == [(0,), (0,), (1,)]
    assert [counts for _, counts in ranks] == [(2, 1)] * len(ranks)
    assert sorted(received(tmp_path, "b")) == ["0.1"]
    found = received(tmp_path, "a")
    assert sorted(found) == ["0.1", "0.3"]
    assert_equal_weights(found["0.3"], tiny.whole([sent[-1][1] for sent, _ in ranks]))


def test_a_searcher_that_dies_does_not_keep_a_version_from_another_cohort(model, tmp_path):
    def body(groups):
        desk = Desk(groups, {}, model, tmp_path, 2, cohort_size=1)
        sent = [desk.step_and_publish(step) for step in (1, 2)]
        counts = desk.counts()
        desk.close()
        return sent, counts

    with searchers(model, tmp_path, a="0.2", b=None):
        ((sent, counts),) = run_ranks(body)
    assert counts == (2, 1)  # the version reached one cohort, and one round failed
    assert sorted(received(tmp_path, "a")) == ["0.1"]
    assert_equal_weights(received(tmp_path, "b")["0.2"], sent[1][1])


@pytest.mark.parametrize("transport", ["broadcast", "files"])
def test_a_lagging_searcher_gets_every_other_version_and_a_fixed_one_none(transport, model, tmp_path):
    def body(groups):
        desk = Desk(groups, {}, model, tmp_path, 3, transport=transport)
        for step in (1, 2, 3):
            version, lags = PolicyVersion(0, step), {"fixed"} | ({"old"} if step == 2 else set())
            desk.publish(version)
            taken = desk.control.wait_until(
                lambda members, v=version, lags=lags: all(m.version == v for m in members if m.searcher not in lags),
                LIMIT_S,
            )
            assert taken
        counts = desk.counts()
        desk.close()
        return counts

    with searchers(model, tmp_path, a=None, old=None, fixed=None):
        ((published, failed),) = run_ranks(body)
    assert (published, failed) == (3, 0)
    assert sorted(received(tmp_path, "a")) == ["0.1", "0.2", "0.3"]
    assert sorted(received(tmp_path, "old")) == ["0.1", "0.3"]
    assert received(tmp_path, "fixed") == {}


@pytest.mark.parametrize(
    ("sizes", "transport"), [({"tp": 2}, "broadcast"), ({"pp": 2}, "broadcast"), ({}, "files")], ids=str
)
def test_a_policy_that_is_not_finite_is_never_published_and_the_next_one_is(sizes, transport, model, tmp_path, caplog):
    def body(groups):
        desk = Desk(groups, sizes, model, tmp_path, 1, transport=transport)
        parameter = desk.rank.policy.chunks[0].decoder.layers[-1].mlp.linear_fc2.weight
        kept = parameter.detach().clone()
        if groups.rank == groups.info.world_size - 1:  # the damage of one rank has to stop all
            parameter.data[-1, -1] = float("nan")
        first = desk.publish(PolicyVersion(0, 1)) is not None
        again = desk.publish(PolicyVersion(0, 1)) is not None
        parameter.data.copy_(kept)
        second = desk.publish(PolicyVersion(0, 2)) is not None
        desk.wait_until_applied(PolicyVersion(0, 2))
        counts = desk.counts()
        desk.close()
        return first, again, second, counts

    with searchers(model, tmp_path, a=None):
        ranks = run_ranks(body, **sizes)
    assert ranks == [(True, False, True, (1, 1))] * len(ranks)
    assert sorted(received(tmp_path, "a")) == ["0.2"]
