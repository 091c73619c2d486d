"""What goes wrong between trainer and searchers: training goes on, a line names who, the next version is right."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import tiny
import torch
from publishing import LIMIT_S
from ranks import run_ranks
from test_publish import GROUPS, Desk, assert_equal_weights, received, search, searchers

from tba_megatron.search import receiver as receiver_module
from tba_megatron.trainer import sender as sender_module
from tba_megatron.types import PolicyVersion

SHORT_S = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


class Lines(logging.Handler):
    """What was logged in this process, one string a line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listening() -> list[str]:
    handler = Lines()
    logging.getLogger("tba_megatron").addHandler(handler)
    return handler.lines


def stopping_search(model: Path, folder: Path, version: str) -> None:
    """A searcher that stands still once the second bucket of ``version`` has arrived."""
    receive = receiver_module.receive_version

    def stops(group, manifest, staging, on_bucket):
        def reach(bucket: int) -> None:
            on_bucket(bucket)
            if manifest.version == version and bucket == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait()  # the signal may stop another thread first, and this one some buckets later

        receive(group, manifest, staging, reach)

    receiver_module.receive_version = stops
    search("stopped", model, folder, None)


def test_a_searcher_that_stands_still_in_mid_version_is_named_with_how_far_it_came_and_the_others_get_the_next(
    model, tmp_path
):
    def body(groups):
        lines = listening()
        desk = Desk(groups, {}, model, tmp_path, 2, timeout_s=SHORT_S, bucket_bytes=4096)
        desk.step_and_publish(1)
        desk.step_and_publish(2)
        failed = desk.counts()
        # Silent for longer than its lease, it is lost.
        assert desk.control.wait_until(lambda members: [m.searcher for m in members] == ["a"], LIMIT_S)
        _, weights = desk.step_and_publish(3)
        counts = desk.counts()
        desk.close()
        return lines, failed, counts, weights

    fork = multiprocessing.get_context("fork")
    stopped = fork.Process(target=stopping_search, args=(model, tmp_path, "0.2"))
    stopped.start()
    try:
        with searchers(model, tmp_path, a=None):
            ((lines, failed, counts, weights),) = run_ranks(body)
    finally:
        stopped.kill()
        stopped.join()
    assert (failed, counts) == ((1, 1), (2, 1))
    (line,) = [line for line in lines if "was not published" in line]
    assert "version 0.2" in line and "did not leave rank 0" in line
    assert "searcher stopped (" in line and "has 2 of" in line and "last heard" in line
    assert_equal_weights(received(tmp_path, "a")["0.3"], weights)


def test_a_flipped_byte_is_found_told_and_mended_by_another_round(model, tmp_path):
    def body(groups):
        lines = listening()
        desk = Desk(groups, {}, model, tmp_path, 1)
        desk.step_and_publish(1)
        describe = sender_module.describe

        def flips(version, layout, buckets, owner):
            manifest = describe(version, layout, buckets, owner)
            buckets[1][9] ^= 1
            return manifest

        sender_module.describe = flips
        desk.rank.step(GROUPS)
        desk.publish(PolicyVersion(0, 2))
        assert desk.control.wait_until(lambda members: all(m.failure for m in members), LIMIT_S)
        sender_module.describe = describe
        plan = desk.publish(PolicyVersion(0, 2))  # the same version, through another group
        desk.wait_until_applied(PolicyVersion(0, 2))
        weights, failures = desk.rank.weights(), desk.control.receive_failures()
        desk.close()
        return lines, [cohort.epoch for cohort in plan.cohorts], failures, weights

    with searchers(model, tmp_path, a=None):
        ((lines, epochs, failures, weights),) = run_ranks(body)
    assert (epochs, failures) == ([1], 1)
    (line,) = [line for line in lines if "keeps its old weights" in line]
    assert "searcher a " in line and "bucket 1 of" in line and "from rank 0 has another checksum" in line
    assert_equal_weights(received(tmp_path, "a")["0.2"], weights)


@pytest.mark.parametrize("sizes", [{"pp": 2}], ids=str)
def test_a_stage_that_dies_while_it_sends_is_an_outcome_of_the_others_too(sizes, model, tmp_path):
    def body(groups):
        desk = Desk(groups, sizes, model, tmp_path, 1, timeout_s=SHORT_S, bucket_bytes=4096)
        desk.step_and_publish(1)
        send = sender_module.send_version
        if groups.is_last_stage:

            def fails(group, manifest, buckets):
                group.close()
                raise sender_module.WeightTransferError("this stage's link is down")

            sender_module.send_version = fails
        desk.rank.step(GROUPS)
        desk.publish(PolicyVersion(0, 2))
        sender_module.send_version = send
        failed = desk.counts()
        desk.step_and_publish(3)
        counts, weights = desk.counts(), desk.rank.weights()
        desk.close()
        return failed, counts, weights

    with searchers(model, tmp_path, a=None):
        ranks = run_ranks(body, **sizes)
    assert [counts for _, counts, _ in ranks] == [(2, 1)] * 2
    found = received(tmp_path, "a")
    assert sorted(found) == ["0.1", "0.3"]
    assert_equal_weights(found["0.3"], tiny.whole([weights for _, _, weights in ranks]))
    assert all(torch.isfinite(tensor).all() for tensor in found["0.3"].values())


def misfit_search(model: Path, folder: Path) -> None:
    """A searcher whose engine needs a tensor that nobody sends."""

    def refuses(self, manifest) -> None:
        raise receiver_module.WeightTransferError(f"version {manifest.version} does not fit the engine")

    receiver_module.Receiver._check_fit = refuses
    search("misfit", model, folder, None)


def test_a_searcher_that_can_never_take_a_version_is_named_and_starves_nobody(model, tmp_path):
    def body(groups):
        lines = listening()
        desk = Desk(groups, {}, model, tmp_path, 2)
        versions = []
        for step in range(1, 30):
            version = PolicyVersion(0, step)
            if desk.publish(version) is not None:
                desk.control.wait_until(lambda members: any(m.version.step for m in members), 1.0)
            versions.append({m.searcher: m.version.step for m in desk.control.members()})
            time.sleep(0.05)
        counts = desk.counts()
        desk.close()
        return lines, versions[-1], counts

    fork = multiprocessing.get_context("fork")
    misfit = fork.Process(target=misfit_search, args=(model, tmp_path))
    misfit.start()
    try:
        with searchers(model, tmp_path, a=None):
            ((lines, last, (published, failed)),) = run_ranks(body)
    finally:
        misfit.kill()
        misfit.join()
    assert last["misfit"] == 0 and last["a"] > 10
    assert published > 10 and 2 <= failed < 10
    assert any("searcher misfit" in line and "does not fit the engine" in line for line in lines)
    assert not any("not ready to receive: searcher a" in line for line in lines)
