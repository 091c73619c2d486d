"""Takes a version of the weights into staging in a thread of its own, while the engine generates."""

from __future__ import annotations

import threading

import msgspec
import torch
from torch import Tensor

from tba_megatron.errors import WeightTransferError
from tba_megatron.search.engine import ReceiveState, ReceiveStatus
from tba_megatron.transport.manifest import Manifest, decode_manifest, unpack
from tba_megatron.transport.messages import Offer
from tba_megatron.transport.weights import Group, join_group, receive_version


class Receiver:
    """One engine worker's member of the broadcast group. ``expected`` are the tensor names that the engine needs."""

    def __init__(self, device: torch.device, expected: frozenset[str]) -> None:
        self._device, self._expected = device, expected
        self._group: Group | None = None
        self._place: tuple[str, int, int] | None = None  # where the group met: a new store may count epochs anew
        self._thread: threading.Thread | None = None
        self._status = ReceiveStatus(state=ReceiveState.NONE)
        self._staged: tuple[Manifest, list[Tensor]] | None = None

    def begin(self, offer: Offer, worker: int, timeout_s: float) -> None:
        """Start to receive ``offer``; what was staged before and not taken is replaced."""
        if self._thread is not None:
            self._thread.join()
        self._staged = None
        self._status = ReceiveStatus(state=ReceiveState.JOINING)
        self._thread = threading.Thread(
            target=self._receive, args=(offer, worker, timeout_s), name="receive-weights", daemon=True
        )
        self._thread.start()

    def poll(self) -> ReceiveStatus:
        return self._status

    def take(self) -> tuple[Manifest, list[tuple[str, Tensor]]]:
        """The staged version; the staging buffers are no longer kept here."""
        if self._staged is None:
            raise WeightTransferError("no version is staged")
        manifest, buckets = self._staged
        self._staged = None
        self._status = ReceiveStatus(state=ReceiveState.NONE)
        return manifest, unpack(manifest, buckets)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _receive(self, offer: Offer, worker: int, timeout_s: float) -> None:
        try:
            manifest = decode_manifest(offer.manifest)
            self._check_names(manifest)
            group = self._joined(offer, worker, timeout_s)
            self._status = ReceiveStatus(state=ReceiveState.POSTED)
            buckets = receive_version(group, manifest, self._device)
            self._check_finite(manifest, buckets)
        except (WeightTransferError, msgspec.DecodeError) as error:
            self._leave_group()
            self._status = ReceiveStatus(state=ReceiveState.FAILED, reason=str(error))
            return
        self._staged = (manifest, buckets)
        self._status = ReceiveStatus(state=ReceiveState.STAGED)

    def _joined(self, offer: Offer, worker: int, timeout_s: float) -> Group:
        place = (offer.host, offer.port, offer.epoch)
        if self._place != place:
            self._leave_group()
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
        self._group = None

    def _check_names(self, manifest: Manifest) -> None:
        """A part of a fused layer alone would be loaded without an error and give garbage: all or nothing."""
        names = {entry.name for entry in manifest.entries}
        missing, unexpected = sorted(self._expected - names), sorted(names - self._expected)
        if missing or unexpected:
            raise WeightTransferError(
                f"version {manifest.version} does not fit the engine: missing {missing[:4]}, unexpected "
                f"{unexpected[:4]} ({len(missing)} and {len(unexpected)} in all)"
            )

    def _check_finite(self, manifest: Manifest, buckets: list[Tensor]) -> None:
        for name, tensor in unpack(manifest, buckets):
            if not torch.isfinite(tensor).all():
                raise WeightTransferError(f"version {manifest.version}: {name} is not finite")
