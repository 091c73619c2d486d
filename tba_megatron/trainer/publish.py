"""Publishing: a snapshot at the step boundary is the only pause, a sender thread does the rest.

Training collectives (joining tensor-parallel shards) run on the main thread; the thread touches only the snapshot and
the broadcast group. Rank 0 plans a publish when its last one has left, so a version that was never sent is replaced
by a newer one without a queue. The members of the group are the stage leaders of replica 0, in stage order, and the
workers of the cohort's searchers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.dist import Groups
from tba_megatron.errors import WeightTransferError
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.trainer.exchange import gather_on_all
from tba_megatron.trainer.model import DTYPES, Policy
from tba_megatron.trainer.stream_hf import is_finite, stream_buckets
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.manifest import Manifest, build_buckets, encode_manifest, merge_manifests
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.registry import Member
from tba_megatron.transport.weights import Group, host_store, join_group, send_version
from tba_megatron.types import CohortPlan, PolicyVersion

_log = logging.getLogger(__name__)

_GO, _NO_GO = "go", "no"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A version cut out of the policy: this stage's buckets, and on rank 0 the manifest of all stages."""

    version: PolicyVersion
    manifest: Manifest
    buckets: list[Tensor]


class Publisher:
    """One rank's part in publishing. ``control`` and ``host`` matter on rank 0 only."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        groups: Groups,
        architecture: Architecture,
        shape: ModelShape,
        dtype: str,
        host: str,
        control: ControlServer | None,
    ) -> None:
        self._config, self._groups = config, groups
        self._architecture, self._shape, self._dtype = architecture, shape, DTYPES[dtype]
        self._host, self._control = host, control
        self._thread: threading.Thread | None = None
        self._cohort: tuple[str, ...] = ()
        self._epoch = -1
        self._broken = True  # the group of this epoch, if any
        self._last_version: PolicyVersion | None = None  # that was sent in this epoch
        self._store: TCPStore | None = None  # of the living epoch, on rank 0
        self._port = 0
        self._group: Group | None = None
        self._group_epoch = -1
        self._refused: PolicyVersion | None = None  # the last version that was not finite
        self._fault: BaseException | None = None
        self.published = 0
        self.failed = 0
        self.last_sync_s = 0.0
        self.last_snapshot_s = 0.0

    # ---- rank 0 decides

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def plan(self, members: Sequence[Member], version: PolicyVersion) -> CohortPlan | None:
        """The cohort that gets ``version``; None while the last version is on its way, or nobody needs it."""
        if self.busy or not members or version == self._refused:
            return None
        wanted = tuple(sorted(m.searcher for m in members))
        # A worker whose receive failed after the last bucket has left the group, though the sender saw no error.
        whole = not self._broken and wanted == self._cohort and all(m.epoch == self._epoch for m in members)
        if whole and version == self._last_version:
            return None
        if not whole:
            self._epoch += 1
            self._store, self._port = host_store(self._host, self._config.timeout_s)
            self._cohort, self._broken = wanted, False
        self._last_version = version
        return CohortPlan(
            epoch=self._epoch,
            host=self._host,
            port=self._port,
            searchers=self._cohort,
            receivers=sum(m.workers for m in members),
        )

    # ---- every rank of replica 0, at the step boundary

    def publish(self, policy: Policy, version: PolicyVersion, cohort: CohortPlan) -> None:
        """Cut the snapshot and hand it to the sender thread; a collective over all ranks of the trainer.

        A policy that is not finite is not published, and counted.
        """
        started_s = time.monotonic()
        self._wait_for_thread()
        snapshot = self._snapshot(policy, version)
        self.last_snapshot_s = time.monotonic() - started_s
        if snapshot is None or not self._groups.is_stage_leader:
            return
        self._thread = threading.Thread(target=self._run, args=(snapshot, cohort), name="send-weights", daemon=True)
        self._thread.start()

    def _snapshot(self, policy: Policy, version: PolicyVersion) -> Snapshot | None:
        """Stage leaders keep this stage's buckets; other ranks pass their shards on and keep nothing."""
        groups, bucket_bytes = self._groups, self._config.bucket_bytes
        strange: list[str] = []  # tensors that are not finite

        def checked() -> Iterator[tuple[str, Tensor]]:
            for bucket in stream_buckets(
                policy.chunks, self._architecture, self._shape, groups, self._dtype, bucket_bytes
            ):
                strange.extend(name for name, tensor in bucket if not is_finite(tensor))
                yield from bucket
                del bucket  # before the next is gathered

        manifest, buckets = build_buckets(version, checked(), bucket_bytes, groups.pp_rank)
        mine = manifest if groups.is_stage_leader else None
        parts = gather_on_all((strange, mine), groups)
        if any(strange for strange, _ in parts):
            _log.error("version %s is not finite and is not published", version)
            self._refused = version
            self.failed += 1
            return None
        stages = sorted((m for _, m in parts if m is not None), key=lambda m: m.buckets[0].owner)
        return Snapshot(version=version, manifest=merge_manifests(stages), buckets=buckets)

    # ---- the thread of each stage leader

    def _run(self, snapshot: Snapshot, cohort: CohortPlan) -> None:
        try:
            self._send(snapshot, cohort)
        except BaseException as error:
            self._fault = error  # the main thread raises it: a fault here must not end in silence
            raise

    def _send(self, snapshot: Snapshot, cohort: CohortPlan) -> None:
        started_s = time.monotonic()
        try:
            if self._groups.rank == 0:
                self._offer(snapshot, cohort)
            group = self._joined(cohort)
            if self._groups.rank == 0:
                self._wait_for_receivers(snapshot, cohort, group)
            else:
                self._wait_for_go(snapshot, group)
            send_version(group, snapshot.manifest, snapshot.buckets)
        except WeightTransferError as error:
            _log.warning("version %s was not published: %s", snapshot.version, error)
            self._give_up(cohort)
            return
        self.published += 1
        self.last_sync_s = time.monotonic() - started_s

    def _offer(self, snapshot: Snapshot, cohort: CohortPlan) -> None:
        assert self._control is not None
        self._control.published(snapshot.version)
        self._control.set_epoch(cohort.searchers, cohort.epoch)
        manifest = encode_manifest(snapshot.manifest)
        senders, rank = self._groups.pp_size, self._groups.pp_size
        for searcher in cohort.searchers:
            member = self._control.member(searcher)
            if member is None:
                raise WeightTransferError(f"searcher {searcher} is unknown")
            self._control.send(
                searcher,
                Offer(
                    version=str(snapshot.version),
                    manifest=manifest,
                    epoch=cohort.epoch,
                    host=cohort.host,
                    port=cohort.port,
                    rank=rank,
                    world_size=senders + cohort.receivers,
                    backend=self._groups.backend,
                ),
            )
            rank += member.workers

    def _joined(self, cohort: CohortPlan) -> Group:
        if self._group is None or self._group_epoch != cohort.epoch:
            self._leave_group()
            self._group = join_group(
                host=cohort.host,
                port=cohort.port,
                epoch=cohort.epoch,
                rank=self._groups.pp_rank,
                world_size=self._groups.pp_size + cohort.receivers,
                backend=self._groups.backend,
                timeout_s=self._config.timeout_s,
                store=self._store if self._groups.rank == 0 else None,
            )
            self._group_epoch = cohort.epoch
        return self._group

    def _wait_for_receivers(self, snapshot: Snapshot, cohort: CohortPlan, group: Group) -> None:
        """A broadcast is enqueued only after every receiver has said that it posted."""
        assert self._control is not None
        wanted = set(cohort.searchers)

        def ready(members: list[Member]) -> bool:
            here = {m.searcher: m for m in members if m.searcher in wanted}
            gone = len(here) < len(wanted)
            failed = any(m.failure for m in here.values())
            return gone or failed or all(m.posted == snapshot.version for m in here.values())

        self._control.wait_until(ready, self._config.timeout_s)
        missing = []
        for searcher in cohort.searchers:
            member = self._control.member(searcher)
            if member is None or member.gone or member.failure or member.posted != snapshot.version:
                missing.append(f"{searcher} ({(member and (member.failure or member.gone)) or 'silent'})")
        group.store.set(str(snapshot.version), _NO_GO if missing else _GO)
        if missing:
            raise WeightTransferError(f"not ready to receive: {', '.join(missing)}")

    def _wait_for_go(self, snapshot: Snapshot, group: Group) -> None:
        key = str(snapshot.version)
        try:
            group.store.wait([key], timedelta(seconds=2 * self._config.timeout_s))
        except (RuntimeError, dist.DistError) as error:
            raise WeightTransferError(f"rank 0 did not start the broadcast: {error}") from None
        if group.store.get(key) != _GO.encode():
            raise WeightTransferError("rank 0 called the broadcast off")

    def _give_up(self, cohort: CohortPlan) -> None:
        """The group may be in any state: the next publish forms another."""
        self.failed += 1
        self._broken = True
        self._leave_group()
        if self._control is not None:
            self._control.set_epoch(cohort.searchers, -1)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._group_epoch = None, -1

    def _wait_for_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._fault is not None:
            raise RuntimeError("the thread that sends weights has failed") from self._fault

    def close(self) -> None:
        self._wait_for_thread()
        self._leave_group()
        self._store = None
