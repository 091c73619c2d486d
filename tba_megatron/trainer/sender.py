"""What sends weights: a thread of each stage leader, which touches only the snapshot, the store and its groups.

It serves the cohorts of its replica one after another, in the order in which rank 0 opens their groups: two
communicators are never in use at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.errors import WeightTransferError
from tba_megatron.trainer.snapshot import Snapshot
from tba_megatron.transport.manifest import Manifest, decode_manifest, describe, encode_manifest, merge_manifests
from tba_megatron.transport.round import Round, connect
from tba_megatron.transport.weight_files import partial_of, stage_file, write_stage
from tba_megatron.transport.weights import Group, join_group, send_version
from tba_megatron.types import CohortPlan, PublishPlan

_log = logging.getLogger(__name__)

_POLL_S = 0.002

_FINE, _STRANGE = b"+", b"-"


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderPlace:
    """Where a stage leader stands among the senders of its replica."""

    replica: int
    stage: int
    n_stages: int
    backend: str
    device: torch.device
    weights: Path  # where versions are written as files


def encode_part(manifest: Manifest) -> bytes:
    return _FINE + encode_manifest(manifest)


def encode_refusal(reason: str) -> bytes:
    return _STRANGE + reason.encode()


def decode_part(data: bytes) -> Manifest:
    """WeightTransferError with the sender's words where it has nothing fit to be sent."""
    if data[:1] != _FINE:
        raise NotFitError(data[1:].decode())
    return decode_manifest(data[1:])


class NotFitError(WeightTransferError):
    """The version itself is bad, for every cohort."""


class Sender:
    """One stage leader's thread, started for each version."""

    def __init__(self, config: WeightsConfig, place: SenderPlace) -> None:
        self._config, self._place = config, place
        self._thread: threading.Thread | None = None
        self._groups: dict[int, Group] = {}  # by epoch
        self._store: TCPStore | None = None  # kept: a dial can wait some seconds for a name server
        self._fault: BaseException | None = None

    @property
    def busy(self) -> bool:
        """RuntimeError when the thread has failed by a fault of its own."""
        if self._fault is not None:
            raise RuntimeError("the thread that sends weights has failed") from self._fault
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: Snapshot, plan: PublishPlan, cohorts: Sequence[CohortPlan]) -> None:
        """Send ``snapshot`` to ``cohorts``, in order. Its buckets must not be written to until ``busy`` is False."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, plan, cohorts), name="send-weights", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the thread is done. RuntimeError when it has failed by a fault of its own."""
        if self._thread is not None:
            self._thread.join()
        assert not self.busy

    def close(self) -> None:
        self.wait()
        for epoch in list(self._groups):
            self._leave(epoch)

    def _run(self, snapshot: Snapshot, plan: PublishPlan, cohorts: Sequence[CohortPlan]) -> None:
        try:
            if self._place.device.type == "cuda":
                torch.cuda.set_device(self._place.device)  # it is each thread's own
            self._send(snapshot, plan, cohorts)
        except WeightTransferError as error:
            self._store = None
            _log.warning("version %s: stage %d sends no more: %s", snapshot.version, self._place.stage, error)
        except BaseException as error:
            self._fault = error  # the main thread raises it: a fault here must not end in silence
            raise

    def _send(self, snapshot: Snapshot, plan: PublishPlan, cohorts: Sequence[CohortPlan]) -> None:
        stage, replica, timeout_s = self._place.stage, self._place.replica, self._config.timeout_s
        for epoch in set(self._groups).difference(plan.epochs):
            self._leave(epoch)
        store = self._store = self._store or connect(plan.host, plan.port, timeout_s)
        rounds = {cohort.epoch: Round(store, plan.round, cohort.epoch, timeout_s) for cohort in cohorts}
        waiting = {cohort.epoch: cohort for cohort in cohorts}
        try:
            manifest = describe(snapshot.version, snapshot.layout, snapshot.buckets, owner=stage)
        except WeightTransferError as error:
            rounds[cohorts[0].epoch].leave_part(replica, stage, encode_refusal(str(error)))
            return
        try:
            rounds[cohorts[0].epoch].leave_part(replica, stage, encode_part(manifest))
            # Rank 0 waits for parts and for searchers, each as long as ``timeout_s``; the last of both come later.
            deadline_s = time.monotonic() + 3 * timeout_s
            while waiting and time.monotonic() < deadline_s:
                for epoch, cohort in list(waiting.items()):
                    opened = rounds[epoch].opened()
                    if opened is not None:
                        error = self._serve(snapshot, rounds[epoch], plan, cohort) if opened else ""
                        rounds[epoch].leave_outcome(stage, error)
                        del waiting[epoch]
                        deadline_s = time.monotonic() + 3 * timeout_s
                        if error:
                            self._leave(epoch)
                time.sleep(_POLL_S)
        finally:
            for epoch in waiting:  # rank 0 is not to wait for a stage that sends no more
                rounds[epoch].leave_outcome(stage, f"stage {stage} of replica {replica} sends no more")

    def _serve(self, snapshot: Snapshot, round_: Round, plan: PublishPlan, cohort: CohortPlan) -> str:
        """What went wrong, empty when everything has left."""
        try:
            if self._config.transport == "files":
                self._write(snapshot)
            else:
                group = self._joined(plan, cohort)
                round_.wait_for_go()
                send_version(group, self._whole_manifest(round_), snapshot.buckets)
        except WeightTransferError as error:
            return str(error)
        return ""

    def _write(self, snapshot: Snapshot) -> None:
        name = stage_file(self._place.stage, self._place.n_stages)
        write_stage(partial_of(self._place.weights, snapshot.version), name, snapshot.layout, snapshot.buckets)

    def _whole_manifest(self, round_: Round) -> Manifest:
        parts = [round_.part(self._place.replica, stage) for stage in range(self._place.n_stages)]
        return merge_manifests([decode_part(part) for part in parts if part is not None])

    def _joined(self, plan: PublishPlan, cohort: CohortPlan) -> Group:
        if cohort.epoch not in self._groups:
            self._groups[cohort.epoch] = join_group(
                host=plan.host,
                port=plan.port,
                epoch=cohort.epoch,
                rank=self._place.stage,
                world_size=self._place.n_stages + sum(cohort.workers),
                backend=self._place.backend,
                timeout_s=self._config.timeout_s,
            )
        return self._groups[cohort.epoch]

    def _leave(self, epoch: int) -> None:
        group = self._groups.pop(epoch, None)
        if group is not None:
            group.close()
