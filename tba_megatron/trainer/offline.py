"""A loop over steps whose data is simply there: demonstrations, or a recorded stream of train groups.

No searcher sends and nobody publishes; checkpoints, resume and signals are those of the main job.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from tba_megatron.dist import Groups
from tba_megatron.loss.base import LossAt
from tba_megatron.packing import Pack
from tba_megatron.trainer import checkpoint
from tba_megatron.trainer.checkpoint_writer import CheckpointWriter
from tba_megatron.trainer.exchange import gather_on_all
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.model import Policy, to_device
from tba_megatron.trainer.reference import Reference
from tba_megatron.trainer.run_state import RunState
from tba_megatron.trainer.step import Update, update

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepData:
    """One step's data: this replica's microbatches, and what the loss of the whole step is divided by."""

    packs: Sequence[Pack]
    normaliser: float


class Source(Protocol):
    """Where steps come from, and who hears of them. All ranks call it together and in order."""

    def data(self, step: int) -> StepData:
        """A pure function of ``step``, so that a resumed run goes on with the same data."""
        ...

    def done(self, step: int, update: Update, seconds: float) -> None:
        """Step ``step`` was made."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """How often checkpoints are made; ``every_steps`` 0: only on a signal, and at the end where that is asked for.

    ``beside``: periodic ones are written by a thread while training goes on.
    """

    writer: CheckpointWriter
    every_steps: int
    at_end: bool
    beside: bool


class OfflineLoop:
    """One rank's loop. ``reference`` is None where the loss needs none."""

    def __init__(
        self,
        *,
        groups: Groups,
        policy: Policy,
        reference: Reference | None,
        loss_at: LossAt,
        head: HeadSettings,
        source: Source,
        saving: Saving,
        state: RunState,
    ) -> None:
        self._groups, self._policy, self._reference = groups, policy, reference
        self._loss_at, self._head, self._source, self._saving = loss_at, head, source, saving
        self._state = state
        self._signal = 0

    @property
    def state(self) -> RunState:
        """The run as it is after the last step."""
        return self._state

    def run(self, steps: int) -> int:
        """Until ``steps`` are made, or a signal arrived at any rank: that signal, or 0."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        saved = self._state.step
        stopped_by = 0
        while self._state.step < steps and not stopped_by:
            self._step(self._state.step + 1)
            stopped_by = self._agree()
            every = self._saving.every_steps
            if every and self._state.step % every == 0:
                self._begin_save()
                saved = self._state.step
                if not self._saving.beside:
                    self._finish_save()
        self._finish_save()
        if saved != self._state.step and (stopped_by or self._saving.at_end):
            self._begin_save()
            self._finish_save()
        return stopped_by

    def _begin_save(self) -> None:
        if self._reference is not None:
            self._reference.keep(self._state.step)
        self._saving.writer.begin(self._policy, None, self._state)

    def _agree(self) -> int:
        """The signal that arrived at any rank, or 0. A save that every rank has written is made to count."""
        writer = self._saving.writer
        everyone = gather_on_all((self._signal, writer.done), self._groups)
        if writer.in_flight and all(done for _, done in everyone):
            self._finish_save()
        return next((number for number, _ in everyone if number), 0)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = number

    def _step(self, step: int) -> None:
        started_s = time.monotonic()
        data = self._source.data(step)
        loss, packs, by_token = self._loss_at(step), data.packs, ()
        if self._reference is not None:
            read = self._reference.read(data.packs, loss.needs.reference)
            packs, by_token = read.packs, read.by_token
        batches = [to_device(pack.microbatch, self._groups.device) for pack in packs]
        done = update(
            self._policy, batches, loss, data.normaliser, self._head, self._groups, reference_logprobs=by_token
        )
        skipped = self._state.skipped_steps + done.skipped
        self._state = msgspec.structs.replace(self._state, step=step, skipped_steps=skipped)
        if self._reference is not None:
            self._reference.step_made(step)
        self._source.done(step, done, time.monotonic() - started_s)

    def _finish_save(self) -> None:
        path = self._saving.writer.finish()
        if path is not None and self._groups.rank == 0:
            _log.info("saved %s", path)
            if self._reference is not None:
                self._reference.forget([step for step, _ in checkpoint.checkpoints(path.parent)])


def restore(folder: Path, policy: Policy, groups: Groups) -> RunState:
    """``checkpoint.load_newest`` of a run without a replay shard."""
    state, path = checkpoint.load_newest(folder, policy, None, groups)
    if path is not None and groups.rank == 0:
        _log.info("resumed at step %d from %s", state.step, path)
    return state
