"""Takes a version of the weights into staging in a thread of its own, while the engine generates."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from tba_megatron.errors import WeightTransferError, shown
from tba_megatron.search.engine import ReceiveState, ReceiveStatus
from tba_megatron.transport.manifest import Layout, Manifest, allocate, check_layout, decode_manifest, layout_of, unpack
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.round import CalledOffError, Round, connect, first_line
from tba_megatron.transport.weight_files import read_version
from tba_megatron.transport.weights import Group, join_group, receive_version

_NAMED = 4  # of the tensors that do not fit


class Receiver:
    """One engine worker's member of the broadcast group.

    ``expected``: the (shape, dtype as ``float32``) of every tensor that the engine needs, by name. The memory for a
    version is allocated once and written to by each. After ``take`` the engine copies what it was given; only then may
    ``begin`` be called again.
    """

    def __init__(self, device: torch.device, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self._device, self._expected = device, dict(expected)
        self._group: Group | None = None
        self._store: tuple[tuple[str, int], TCPStore] | None = None  # and where it is
        self._place: tuple[str, int, int] | None = None  # where the group met: a new store may count epochs anew
        self._thread: threading.Thread | None = None  # of the newest offer
        self._lock = threading.Lock()
        self._ticket = 0  # of the newest offer: what ends for an older one is of no interest
        self._status = ReceiveStatus(state=ReceiveState.NONE)
        self._layout: Layout | None = None
        self._staging: list[Tensor] = []
        self._staged: Manifest | None = None

    def begin(self, offer: Offer, worker: int, timeout_s: float) -> None:
        """Start to receive ``offer``, at once; what was staged before and not taken is replaced.

        A receive that runs ends first, within its deadlines, since two would share a group and the staging memory.
        """
        with self._lock:
            self._ticket += 1
            self._staged = None
            self._status = ReceiveStatus(state=ReceiveState.JOINING)
        arguments = (self._ticket, self._thread, offer, worker, timeout_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name="receive-weights", daemon=True)
        self._thread.start()

    def poll(self) -> ReceiveStatus:
        """RuntimeError when the thread has ended by a fault of its own, which it has printed."""
        alive = self._thread is not None and self._thread.is_alive()
        status = self._status
        if status.state in (ReceiveState.JOINING, ReceiveState.POSTED) and not alive:
            raise RuntimeError("the thread that receives weights has failed")
        return status

    def take(self) -> tuple[Manifest, list[tuple[str, Tensor]]]:
        """The staged version, as views of memory that the next ``begin`` writes to: copy them before."""
        manifest = self._staged
        if manifest is None:
            raise WeightTransferError("no version is staged")
        self._staged = None
        self._status = ReceiveStatus(state=ReceiveState.NONE)
        return manifest, unpack(manifest.entries, self._staging)

    def close(self) -> None:
        """Leave the group; waits for a receive that runs, within its deadlines."""
        if self._thread is not None:
            self._thread.join()
        self._leave_group()

    # ---- the thread

    def _run(self, ticket: int, before: threading.Thread | None, offer: Offer, worker: int, timeout_s: float) -> None:
        if before is not None:
            before.join()
        if ticket != self._ticket:
            return  # a newer one has come, which the trainer sends only when this round is over
        try:
            manifest = self._receive(ticket, offer, worker, timeout_s)
        except CalledOffError:
            self._leave_group()
            self._tell(ticket, ReceiveStatus(state=ReceiveState.NONE))
        except (WeightTransferError, msgspec.DecodeError, RuntimeError, ValueError, TypeError, OverflowError) as error:
            self._leave_group()  # whatever torch says of a manifest that no trainer of ours would send
            self._tell(ticket, ReceiveStatus(state=ReceiveState.FAILED, reason=str(error)))
        else:
            self._tell(ticket, ReceiveStatus(state=ReceiveState.STAGED), manifest)

    def _tell(self, ticket: int, status: ReceiveStatus, staged: Manifest | None = None) -> None:
        with self._lock:
            if ticket == self._ticket:
                self._status, self._staged = status, staged

    def _receive(self, ticket: int, offer: Offer, worker: int, timeout_s: float) -> Manifest:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # it is each thread's own
        manifest = decode_manifest(offer.manifest)
        check_layout(manifest)
        self._check_fit(manifest)
        self._make_room(manifest)
        if offer.folder:
            self._tell(ticket, ReceiveStatus(state=ReceiveState.POSTED))
            read_version(manifest, Path(offer.folder), self._staging)
            return manifest
        # Rank 0 waits for the slowest member for as long as this: who is ready sooner waits longer.
        round_ = Round(self._connected(offer, timeout_s), offer.round, offer.epoch, 2 * timeout_s)
        round_.say_ready(offer.rank + worker)
        round_.wait_for_opening()
        group = self._joined(offer, worker, timeout_s)
        round_.post(group.rank)
        self._tell(ticket, ReceiveStatus(state=ReceiveState.POSTED))
        receive_version(group, manifest, self._staging, lambda bucket: round_.reach(group.rank, bucket))
        return manifest

    def _make_room(self, manifest: Manifest) -> None:
        layout = layout_of(manifest)
        if layout == self._layout:
            return
        self._layout, self._staging = None, []  # freed before the next are allocated
        try:
            self._staging = allocate(layout, self._device)
        except RuntimeError as error:
            raise WeightTransferError(
                f"version {manifest.version}: no memory for {manifest.nbytes} bytes of staging on {self._device}: "
                f"{first_line(error)}"
            ) from None
        self._layout = layout

    def _connected(self, offer: Offer, timeout_s: float) -> TCPStore:
        """The connection of the last round where it can be used: a new one may ask a name server."""
        if self._store is None or self._store[0] != (offer.host, offer.port):
            self._store = ((offer.host, offer.port), connect(offer.host, offer.port, timeout_s))
        return self._store[1]

    def _joined(self, offer: Offer, worker: int, timeout_s: float) -> Group:
        place = (offer.host, offer.port, offer.epoch)
        if self._place != place:
            if self._group is not None:
                self._group.close()
            self._group = None
            self._group = join_group(
                host=offer.host,
                port=offer.port,
                epoch=offer.epoch,
                rank=offer.rank + worker,
                world_size=offer.world_size,
                backend=offer.backend,
                timeout_s=timeout_s,
            )
            self._place = place
        if self._group is None:
            # The others still are in it and would not join again: waiting for them would only pass the time.
            raise WeightTransferError(f"version {offer.version}: this worker has left broadcast group {offer.epoch}")
        return self._group

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._store = None

    def _check_fit(self, manifest: Manifest) -> None:
        """A part of a fused layer alone would be loaded without an error and give garbage: all or nothing."""
        sent = {entry.name: (entry.shape, entry.dtype) for entry in manifest.entries}
        missing, unexpected = sorted(self._expected.keys() - sent.keys()), sorted(sent.keys() - self._expected.keys())
        if missing or unexpected:
            raise WeightTransferError(
                f"version {manifest.version} does not fit the engine: missing {_some(missing)}, unexpected "
                f"{_some(unexpected)} ({len(missing)} and {len(unexpected)} in all)"
            )
        other = [name for name in sorted(sent) if sent[name] != self._expected[name]]
        if other:
            told = "; ".join(
                f"{shown(name)} is {_text(sent[name])}, not {_text(self._expected[name])}" for name in other[:_NAMED]
            )
            raise WeightTransferError(
                f"version {manifest.version} does not fit the engine: {told} ({len(other)} such tensors in all)"
            )


def _some(names: list[str]) -> list[str]:
    return [shown(name) for name in names[:_NAMED]]


def _text(tensor: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = tensor
    return f"{dtype} {list(shape)}"
