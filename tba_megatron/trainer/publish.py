"""Publishing: a snapshot at the step boundary (and the probe) is what training waits for; threads do the rest.

Rank 0 plans a publish when its last one has left, so a version that was never sent is replaced by a newer one without
a queue. Every rank of a replica that serves a cohort takes part in the snapshot; its stage leaders send it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.dist import Groups
from tba_megatron.errors import TransportError
from tba_megatron.models.architecture import Architecture, ModelShape
from tba_megatron.trainer.coordinator import Coordinator, VersionFiles
from tba_megatron.trainer.model import DTYPES, Policy
from tba_megatron.trainer.sender import Sender, SenderPlace
from tba_megatron.trainer.snapshot import Snapshotter
from tba_megatron.transport.cohorts import Cohorts
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.registry import Member
from tba_megatron.transport.round import host_store
from tba_megatron.types import PolicyVersion, PublishPlan

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5  # before a third try; each further one waits twice as long
_EVERYBODY = 1 << 30  # searchers that read files need no groups


class Publisher:
    """One rank's part in publishing."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        groups: Groups,
        architecture: Architecture,
        shape: ModelShape,
        files: VersionFiles,
    ) -> None:
        self._groups = groups
        self._snapshotter = Snapshotter(
            architecture=architecture,
            shape=shape,
            groups=groups,
            dtype=DTYPES[files.dtype],
            bucket_bytes=config.bucket_bytes,
        )
        place = SenderPlace(
            replica=groups.dp_rank,
            stage=groups.pp_rank,
            n_stages=groups.pp_size,
            backend=groups.backend,
            device=groups.device,
            weights=files.weights,
        )
        self._sender = Sender(config, place) if groups.tp_rank == 0 else None
        self._snapshot_s = 0.0

    @property
    def sending(self) -> bool:
        """Whether the last snapshot of this rank is still on its way."""
        return self._sender is not None and self._sender.busy

    def take_snapshot_s(self) -> float:
        """Seconds that snapshots have taken since the last call."""
        taken_s, self._snapshot_s = self._snapshot_s, 0.0
        return taken_s

    def publish(self, policy: Policy, version: PolicyVersion, plan: PublishPlan) -> None:
        """Cut the snapshot and hand it to the sender thread; a collective over each replica that serves a cohort."""
        cohorts = [cohort for cohort in plan.cohorts if cohort.replica == self._groups.dp_rank]
        if not cohorts:
            return
        if self._sender is not None:
            self._sender.wait()
        started_s = time.monotonic()
        snapshot = self._snapshotter.take(policy.chunks, version)
        self._snapshot_s += time.monotonic() - started_s
        if self._sender is not None and snapshot is not None:
            self._sender.begin(snapshot, plan, cohorts)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Strikes:
    """How often in a row a searcher kept a version from its cohort, or could not take one in; and the last time."""

    count: int
    since_s: float
    silent: bool
    round: int


def _pause_s(failures: int, most_s: float) -> float:
    """How long to leave alone what has failed so often in a row: not at all at first, then twice as long each time."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 2, 16), most_s) if failures > 1 else 0.0


class PublishDesk:
    """Rank 0's view of all publishing: who needs which version, what is on its way, what has failed."""

    def __init__(
        self, *, config: WeightsConfig, host: str, replicas: int, control: ControlServer, coordinator: Coordinator
    ) -> None:
        self._config, self._host = config, host
        self._control, self._coordinator = control, coordinator
        files = config.transport == "files"
        self._cohorts = Cohorts(_EVERYBODY if files else config.cohort_size, 1 if files else replicas, config.timeout_s)
        self._store: TCPStore | None = None
        self._port = 0
        self._round = -1
        self.refused: PolicyVersion | None = None  # the last version that was not fit to be sent
        self._planned: PolicyVersion | None = None
        self._waiting: PolicyVersion | None = None  # due, but an older one is on its way
        self._failures = 0  # rounds in a row that brought nothing to anybody, through no searcher's fault
        self._not_before_s = -math.inf
        self._strikes: dict[str, _Strikes] = {}  # of searchers that fail again and again
        self._warned: set[tuple[str, PolicyVersion]] = set()  # searchers that were late, and what they run
        self._delivered: set[PolicyVersion] = set()
        self.published = 0  # versions that reached a cohort
        self.failed = 0  # rounds of a cohort
        self.replaced = 0  # versions that were due while an older one was on its way
        self.late_total = 0  # searchers that took longer than the deadline to apply a version
        self.last_sync_s = 0.0

    def plan(
        self, members: Sequence[Member], version: PolicyVersion, *, sending: bool, everybody: bool = False
    ) -> PublishPlan | None:
        """Who gets ``version``; None while the last version is on its way or nobody needs this one.

        ``sending``: some rank's last snapshot has not left. ``everybody``: also searchers that are meant to lag.
        """
        now_s = time.monotonic()
        self._absorb(members, now_s)
        members = [member for member in members if not self._is_left_out(member, now_s)]
        if not members or version == self.refused or now_s < self._not_before_s:
            return None
        if sending or self._coordinator.busy:
            if version != self._planned:
                self._note_due(version)
            return None
        cohorts = self._cohorts.plan(members, version, now_s, everybody=everybody)
        if not cohorts:
            return None
        self._note_due(version)
        self._waiting = None
        self._planned = version
        self._round += 1
        plan = PublishPlan(
            round=self._round,
            host=self._host,
            port=self._listen(),
            cohorts=cohorts,
            epochs=self._cohorts.epochs,
        )
        self._coordinator.begin(plan, version)
        return plan

    def settle(self) -> None:
        """Wait for what is on its way, and count it: nothing more will be planned."""
        self._coordinator.wait()
        self._absorb((), time.monotonic())

    def _strike(self, searcher: str, now_s: float, *, silent: bool = False, round_: int = -1) -> None:
        before = self._strikes.get(searcher)
        self._strikes[searcher] = _Strikes(
            count=before.count + 1 if before else 1,
            since_s=now_s,
            silent=silent,
            round=max(round_, before.round if before else -1),
        )

    def _is_left_out(self, member: Member, now_s: float) -> bool:
        """Whether it would only hold up others: it was late and has said nothing since, or fails again and again."""
        strikes = self._strikes.get(member.searcher)
        if strikes is None:
            return False
        pause_s = _pause_s(strikes.count, self._config.timeout_s)
        return (strikes.silent and member.heard_s <= strikes.since_s) or now_s < strikes.since_s + pause_s

    def _note_due(self, version: PolicyVersion) -> None:
        self.replaced += self._waiting not in (None, version)
        self._waiting = version

    def _listen(self) -> int:
        if self._store is None:
            try:
                self._store, self._port = host_store(self._host, self._config.timeout_s)
            except RuntimeError as error:
                raise TransportError(
                    f"transport.host: cannot listen on {self._host} ({error}); give an address of this machine"
                ) from None
        return self._port

    def _absorb(self, members: Sequence[Member], now_s: float) -> None:
        deliveries = self._coordinator.take_deliveries()
        if deliveries:
            # What fails once is tried again at once, without who was late; what fails for good is tried now and then.
            nobodys_fault = all(delivery.error and not delivery.culprits for delivery in deliveries)
            self._failures = self._failures + 1 if nobodys_fault else 0
            self._not_before_s = now_s + _pause_s(self._failures, self._config.timeout_s)
        for delivery in deliveries:
            if delivery.error:
                self.failed += 1
                for searcher in delivery.culprits:
                    self._strike(searcher, now_s, silent=True)
                self._cohorts.failed(delivery.epoch)
                if delivery.not_fit:
                    self.refused = delivery.version
            else:
                self.last_sync_s = delivery.seconds
                self.published += delivery.version not in self._delivered
                self._delivered = {delivery.version}
        for member in members:
            strikes = self._strikes.get(member.searcher)
            if member.failure is not None and (strikes is None or strikes.round < member.offered_round):
                self._strike(member.searcher, now_s, round_=member.offered_round)
            elif strikes is not None and member.failure is None and member.version in self._delivered:
                del self._strikes[member.searcher]
        for member in self._cohorts.late(members, now_s):
            case = (member.searcher, member.version)
            if case not in self._warned:
                self._warned.add(case)
                self.late_total += 1
                _log.warning(
                    "searcher %s still runs version %s %g s after a newer one was sent to it; others go on",
                    *case,
                    self._config.timeout_s,
                )

    def metrics(self) -> dict[str, float]:
        return {
            "time/weight_sync_s": self.last_sync_s,
            "weights/published_total": self.published,
            "weights/failed_total": self.failed,
            "weights/receive_failed_total": self._control.receive_failures(),
            "weights/replaced_total": self.replaced,
            "weights/late_total": self.late_total,
        }

    def close(self) -> None:
        self._coordinator.wait()
        self._store = None
