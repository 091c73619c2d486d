"""One attempt to bring a version to its receivers: the few words that senders, receivers and rank 0 exchange about it.

They go through a store that rank 0 hosts. Every sender leaves a ``part`` (what it is going to send); every receiver
says that it is ready (what is offered fits); rank 0 opens the group, and all join it; every receiver posts (it waits in
the group for the first bucket); rank 0 gives the ``go``; receivers say how far they have come, and every sender leaves
an ``outcome``. Until the opening rank 0 can call a round off at once: nobody is in the group yet. Each end has a
connection of its own, since a store's client serves one call at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tba_megatron.errors import WeightTransferError

_GO, _NO_GO = b"go", b"no"


def host_store(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on a free port of ``host``, and the port: nobody can take it in between."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, store.port


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A connection of one's own to a hosted store; WeightTransferError when nobody listens."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError) as error:
        raise WeightTransferError(
            f"no store answers at {host}:{port} within {timeout_s:g} s: {first_line(error)}"
        ) from None


class CalledOffError(WeightTransferError):
    """It is about another member: whoever hears it has done nothing wrong, and will be offered a version again."""


class Round:
    """Round ``number``, seen from one end. Receivers and progress are those of the group of ``epoch``.

    Every method that waits raises WeightTransferError after ``timeout_s``, and every one when the store is gone.
    """

    def __init__(self, store: TCPStore, number: int, epoch: int, timeout_s: float) -> None:
        self._of_round = PrefixStore(f"round-{number}", store)
        self._of_group = PrefixStore(f"group-{epoch}", self._of_round)
        self._timeout_s = timeout_s

    # ---- senders

    def leave_part(self, replica: int, stage: int, part: bytes) -> None:
        self._set(self._of_round, f"part-{replica}-{stage}", part)

    def opened(self) -> bool | None:
        """None before rank 0 has opened the group, False when it has called the round off."""
        word = self._get(self._of_group, "opening")
        return None if word is None else word == _GO

    def wait_for_opening(self) -> None:
        """Until all may join the group. WeightTransferError when rank 0 calls it off."""
        self._wait("opening", "rank 0 did not open the group")

    def wait_for_go(self) -> None:
        """Until every receiver has posted. WeightTransferError when rank 0 calls it off."""
        self._wait("go", "rank 0 did not give the go")

    def leave_outcome(self, stage: int, error: str) -> None:
        """``error`` is empty when everything of this stage has left."""
        self._set(self._of_group, f"outcome-{stage}", error.encode())

    # ---- receivers

    def say_ready(self, rank: int) -> None:
        self._set(self._of_group, f"ready-{rank}", b"")

    def post(self, rank: int) -> None:
        self._set(self._of_group, f"posted-{rank}", b"")

    def reach(self, rank: int, bucket: int) -> None:
        """Bucket ``bucket`` has arrived at ``rank``."""
        self._set(self._of_group, f"reached-{rank}", str(bucket).encode())

    # ---- rank 0

    def part(self, replica: int, stage: int) -> bytes | None:
        """None while it has not been left."""
        return self._get(self._of_round, f"part-{replica}-{stage}")

    def is_ready(self, rank: int) -> bool:
        return self._get(self._of_group, f"ready-{rank}") is not None

    def has_posted(self, rank: int) -> bool:
        return self._get(self._of_group, f"posted-{rank}") is not None

    def reached(self, rank: int) -> int:
        """Buckets that have arrived at ``rank``."""
        found = self._get(self._of_group, f"reached-{rank}")
        return 0 if found is None else int(found) + 1

    def open(self) -> None:
        self._set(self._of_group, "opening", _GO)

    def give_go(self) -> None:
        self._set(self._of_group, "go", _GO)

    def call_off(self) -> None:
        """Whoever waits for the opening or for the go waits no more."""
        self._set(self._of_group, "opening", _NO_GO)
        self._set(self._of_group, "go", _NO_GO)

    def outcome(self, stage: int) -> str | None:
        """None while the stage is sending."""
        found = self._get(self._of_group, f"outcome-{stage}")
        return None if found is None else found.decode()

    def forget(self, replica: int, stages: int, ranks: Iterable[int]) -> None:
        """Drop all that was said; once every sender and receiver of the round is done."""
        keys = ["opening", "go", *(f"outcome-{stage}" for stage in range(stages))]
        keys += [f"{word}-{rank}" for rank in ranks for word in ("ready", "posted", "reached")]
        for key in keys:
            self._delete(self._of_group, key)
        for stage in range(stages):
            self._delete(self._of_round, f"part-{replica}-{stage}")

    # ---- the store

    def _set(self, store: PrefixStore, key: str, value: bytes) -> None:
        try:
            store.set(key, value)  # type: ignore[arg-type]
        except (RuntimeError, dist.DistError) as error:
            raise WeightTransferError(f"the store of rank 0 is gone: {first_line(error)}") from None

    def _get(self, store: PrefixStore, key: str) -> bytes | None:
        try:
            return store.get(key) if store.check([key]) else None
        except (RuntimeError, dist.DistError) as error:
            raise WeightTransferError(f"the store of rank 0 is gone: {first_line(error)}") from None

    def _wait(self, key: str, complaint: str) -> None:
        try:
            self._of_group.wait([key], timedelta(seconds=self._timeout_s))
            word = self._of_group.get(key)
        except (RuntimeError, dist.DistError) as error:
            raise WeightTransferError(f"{complaint} within {self._timeout_s:g} s: {first_line(error)}") from None
        if word != _GO:
            raise CalledOffError("rank 0 called it off")

    def _delete(self, store: PrefixStore, key: str) -> None:
        try:
            store.delete_key(key)
        except (RuntimeError, dist.DistError) as error:
            raise WeightTransferError(f"the store of rank 0 is gone: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of what torch says, which may be followed by a C++ stack trace."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
