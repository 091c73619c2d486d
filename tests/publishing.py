"""A trainer's ranks that publish what they hold, for tests of what arrives."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from tba_megatron.config_sections import WeightsConfig
from tba_megatron.dist import Groups
from tba_megatron.trainer.coordinator import Coordinator, VersionFiles
from tba_megatron.trainer.exchange import from_rank_0, gather_on_all
from tba_megatron.trainer.publish import PublishDesk, Publisher
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.fleet import FleetSettings
from tba_megatron.transport.registry import PromptLeases
from tba_megatron.transport.sockets import Listen
from tba_megatron.types import PolicyVersion, PublishPlan

TOKEN = "of-this-run"
LIMIT_S = 60.0  # only against a hang
LEASE_S = 3.0


class PublishingRank:
    """A ``tiny.Rank`` with its publisher, and on rank 0 the desk and the control server.

    Searchers find the server by the file ``address`` in ``folder``; rank 0 waits until ``n_searchers`` have come.
    """

    def __init__(
        self,
        groups: Groups,
        rank,
        *,
        folder: Path,
        n_searchers: int,
        config: WeightsConfig,
        lease_s: float = LEASE_S,
        probe: tuple[int, ...] = (),
    ) -> None:
        self.groups, self.rank, self.control, self.desk = groups, rank, None, None
        files = VersionFiles(weights=folder / "weights", template=rank.folder, dtype="float32")
        self.publisher = Publisher(
            config=config, groups=groups, architecture=rank.architecture, shape=rank.shape, files=files
        )
        if groups.rank == 0:
            self.control = open_control(folder / "address", n_searchers, lease_s)
            coordinator = Coordinator(
                config=config,
                control=self.control,
                n_stages=groups.pp_size,
                backend=groups.backend,
                probe=probe,
                files=files,
            )
            self.desk = PublishDesk(
                config=config,
                host="127.0.0.1",
                replicas=groups.dp_size,
                control=self.control,
                coordinator=coordinator,
            )

    def publish(self, version: PolicyVersion) -> PublishPlan | None:
        """The plan, or None when nobody needed the version; returns when everything has left or failed."""
        plan = None
        if self.desk and self.control:
            plan = self.desk.plan(self.control.members(), version, sending=False)
        plan = from_rank_0((plan,), self.groups)[0]
        if plan is not None:
            self.publisher.publish(self.rank.policy, version, plan)
            if self.publisher._sender is not None:
                self.publisher._sender.wait()
            if self.desk:
                self.desk._coordinator.wait()
                self.desk._absorb(self.control.members(), time.monotonic())
        torch.distributed.barrier(group=self.groups.world)
        return plan

    def wait_until_applied(self, version: PolicyVersion) -> None:
        if self.control:
            assert self.control.wait_until(lambda members: all(m.version == version for m in members), LIMIT_S)
        torch.distributed.barrier(group=self.groups.world)

    def counts(self) -> tuple[int, int]:
        """(versions published, rounds failed), as rank 0 counts them."""
        counts = gather_on_all((self.desk.published, self.desk.failed) if self.desk else None, self.groups)
        return next(c for c in counts if c is not None)

    def close(self) -> None:
        if self.control and self.desk:
            self.control.stop_searchers("the test is over", final=True)
            self.desk.close()
        self.publisher.close()
        torch.distributed.barrier(group=self.groups.world)
        if self.control:
            self.control.close()


def open_control(address: Path, n_searchers: int, lease_s: float) -> ControlServer:
    control = ControlServer(
        Listen(sockets="tcp", host="127.0.0.1", folder=address.parent / "unused"),
        TOKEN,
        FleetSettings(lease_s=lease_s, silent_s=lease_s, max_ahead_groups=1, shards=()),
        newest=PolicyVersion(0, 0),
        leases=PromptLeases(),
    )
    partial = address.with_suffix(".partial")
    partial.write_text(control.address)
    partial.rename(address)
    assert control.wait_until(lambda members: len(members) == n_searchers, LIMIT_S)
    return control
