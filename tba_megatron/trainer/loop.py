"""The trainer's loop: receive, add, decide, publish, sample, pack, step. Rank 0 decides, every rank follows."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tba_megatron.buffer.choice import Shards
from tba_megatron.buffer.draws import Draw
from tba_megatron.buffer.sampler import Sampler
from tba_megatron.buffer.stored_shard import REPLAY, StoredShard, remove_generations
from tba_megatron.config import Config
from tba_megatron.config_sections import SearcherData
from tba_megatron.dist import Groups
from tba_megatron.errors import CheckpointError, TbaError
from tba_megatron.heap import FreedMemory
from tba_megatron.loss.base import LossAt
from tba_megatron.packing import Pack, pack
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.checkpoint_folder import checkpoints
from tba_megatron.trainer.checkpoint_writer import CheckpointWriter
from tba_megatron.trainer.chief import Chief
from tba_megatron.trainer.exchange import (
    exchange_groups,
    from_rank_0,
    gather_on_all,
    gather_on_leaders,
    return_to_owners,
    share_packs,
)
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.model import Policy, to_device
from tba_megatron.trainer.notes import DrawFacts, MessageCounts, Note, SourceCounts, draw_facts, received_by_source
from tba_megatron.trainer.probe import Prober
from tba_megatron.trainer.publish import Publisher
from tba_megatron.trainer.recording import Recorder
from tba_megatron.trainer.reference import Reference
from tba_megatron.trainer.step import update
from tba_megatron.transport.rollouts import RolloutInbox
from tba_megatron.types import (
    Action,
    PolicyHistory,
    PolicyVersion,
    RolloutId,
    StepPlan,
)

_log = logging.getLogger(__name__)

POLL_S = 0.01  # how often an idle rank looks for work
# Of a step's time that may go into taking rollouts in before the next, once as many prompts as a step uses are in: of a
# flood the rest waits, and what searchers send in step with the trainer never does.
INTAKE_SHARE = 0.02


class TrainLoop:
    """One rank's loop. ``chief`` is rank 0's; ``shard``, ``receiver``, ``recorder`` a DP leader's; None elsewhere."""

    def __init__(
        self,
        *,
        config: Config,
        groups: Groups,
        policy: Policy,
        reference: Reference | None,
        loss_at: LossAt,
        head: HeadSettings,
        sampler: Sampler,
        shard: StoredShard | None,
        receiver: RolloutInbox | None,
        publisher: Publisher,
        prober: Prober,
        chief: Chief | None,
        recorder: Recorder | None,
        writer: CheckpointWriter,
        history: PolicyHistory,
        step: int,
    ) -> None:
        self._config, self._groups, self._policy, self._reference = config, groups, policy, reference
        self._loss_at, self._head, self._sampler = loss_at, head, sampler
        self._shard, self._receiver, self._chief = shard, receiver, chief
        self._publisher, self._prober = publisher, prober
        self._probed: tuple[str, tuple[float, ...]] | None = None  # for the next note
        self._probe_s = 0.0
        self._recorder = recorder
        self._history = history
        self._step = step
        self._writer = writer
        self._signal = 0
        self._freed = FreedMemory()
        self.complete = False  # the run is at its end
        self._intake_s: float | None = None  # the most that the next intake may take; None: as long as it takes
        self._reclaimed_at = 0  # the segment that was current when old ones were last looked for

    def run(self) -> int:
        """Loop until rank 0 says stop; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        while True:
            self._freed.tend()
            notes = self._exchange_notes()
            plan = from_rank_0(self._chief.decide(notes, self._step) if self._chief else None, self._groups)
            if plan.finish_save:
                self._finish_save()
            if plan.publish is not None:
                self._publisher.publish(self._policy, self.version, plan.publish)
                self._probe()
            if plan.action is Action.TRAIN:
                self._train(plan)
            if plan.action is Action.SAVE or plan.save:
                self._save(wait=plan.action is not Action.TRAIN or not self._config.trainer.async_save)
            if plan.action is Action.STOP:
                self.complete = plan.complete
                self._finish()
                return plan.exit_code
            if plan.action is Action.WAIT:
                self._intake_s = None
                time.sleep(POLL_S)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self._history.attempt, self._step)

    def _probe(self) -> None:
        """What searchers will be asked about this version, while its weights are here."""
        started_s = time.monotonic()
        logprobs = self._prober.score(self._policy)
        self._probe_s = time.monotonic() - started_s
        if logprobs:
            self._probed = (str(self.version), logprobs)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = number

    def _exchange_notes(self) -> list[Note]:
        """Every rank's note. CheckpointError on all of them when one cannot go on."""
        note = replace(
            self._receive(),
            signal=self._signal,
            save_written=self._save_written,
            sending=self._publisher.sending,
            snapshot_s=self._publisher.take_snapshot_s(),
            probe_s=self._probe_s,
            probe=self._probed,
        )
        self._probed, self._probe_s = None, 0.0
        notes = gather_on_all(note, self._groups)
        failures = dict.fromkeys(note.failure for note in notes if note.failure)
        if failures:
            raise CheckpointError("; ".join(failures))
        return notes

    def _receive(self) -> Note:
        """Move what has arrived into the shard."""
        stored, receiver = self._shard, self._receiver
        if stored is None or receiver is None:
            return Note()
        arrived: Counter[int] = Counter()
        by_source: dict[str, SourceCounts] = {}
        failure = ""
        try:
            a_step = math.ceil(self._config.trainer.prompts_per_step / self._groups.dp_size)
            for arrival in receiver.drain(self._intake_s, a_step):
                stored.take(arrival.batch, arrival.sender, arrival.sequence, arrival.end)
                arrived.update(arrival.batch.lease_G.tolist())
                for source, counts in received_by_source(arrival.batch).items():
                    by_source[source] = by_source.get(source, SourceCounts()) + counts
            if stored.segment > self._reclaimed_at:
                self._reclaim(stored)
        except TbaError as error:
            failure = str(error)
        return Note(
            report=self._sampler.report(stored.shard, self._history, self._step),
            counts=stored.shard.counts(),
            arrived=dict(arrived),
            received_by_source=by_source,
            messages=MessageCounts(
                refused=receiver.refused,
                corrupt=receiver.corrupt,
                duplicates=receiver.duplicates,
                gaps=receiver.gaps,
                forgotten=receiver.forgotten,
                waiting_bytes=receiver.waiting_bytes,
            ),
            failure=failure,
        )

    def _reclaim(self, stored: StoredShard) -> None:
        self._reclaimed_at = stored.segment
        stored.reclaim([path for _, path in checkpoints(self._writer.folder)])

    def _train(self, plan: StepPlan) -> None:
        started = time.monotonic()
        packs, draw, drawn = self._sample(plan)
        loss, by_token = self._loss_at(plan.step), ()
        if self._reference is not None:
            read = self._reference.read(packs, loss.needs.reference)
            packs, by_token = read.packs, read.by_token
            if self._shard is not None and draw is not None:
                _store_reference(self._shard, draw, return_to_owners(read.computed, self._groups))
        batches = [to_device(p.microbatch, self._groups.device) for p in packs]
        trainer = self._config.trainer
        normaliser = float(trainer.prompts_per_step * trainer.rollouts_per_prompt)
        done = update(self._policy, batches, loss, normaliser, self._head, self._groups, reference_logprobs=by_token)
        self._step = plan.step
        if self._reference is not None:
            self._reference.step_made(self._step)
        self._intake_s = INTAKE_SHARE * (time.monotonic() - started)
        everyone = gather_on_all(drawn, self._groups)
        if self._chief is not None:
            facts = [d for d in everyone if d is not None]
            self._chief.report(self._step, done, facts, time.monotonic() - started)

    def _sample(self, plan: StepPlan) -> tuple[list[Pack], Draw | None, DrawFacts | None]:
        """This replica's microbatches: chosen over all shards, moved to the replicas that train them, packed."""
        trainer = self._config.trainer
        packs, facts = None, None
        draw = self._draw(self._shard, plan) if self._shard is not None else None
        if isinstance(trainer.data, SearcherData) and trainer.data.record:
            with AllOrNone("", self._groups.world):
                if self._recorder is not None and draw is not None:
                    self._recorder.write(plan.step, draw.batch)
        if draw is not None and self._shard is not None:
            mine = exchange_groups(draw.batch, self._groups)
            multiple_of = self._groups.tp_size if trainer.sequence_parallel else 1
            version = self._reference.version if self._reference is not None else None
            packs = pack(mine, trainer.microbatch_tokens, multiple_of, reference_version=version)
            tokens = sum(len(p.microbatch.tokens) for p in packs)
            facts = draw_facts(draw, self._shard.shard.rows, self._history, self._step, tokens)
        if self._chief is not None:
            self._chief.note_drawn(trainer.prompts_per_step)
        return share_packs(packs, self._groups), draw, facts

    def _draw(self, stored: StoredShard, plan: StepPlan) -> Draw:
        trainer = self._config.trainer
        draw = self._sampler.draw(
            stored.shard,
            Shards(index=self._groups.dp_rank, gather=lambda value: gather_on_leaders(value, self._groups)),
            trainer.prompts_per_step,
            trainer.rollouts_per_prompt,
            plan.seed,
            self._history,
            self._step,
        )
        stored.shard.mark_trained(draw.rows)
        return draw

    @property
    def _save_written(self) -> bool:
        return self._writer.in_flight and self._writer.done

    def _save(self, *, wait: bool) -> None:
        """Save at this step boundary; without ``wait`` a thread writes while training goes on."""
        state = from_rank_0(self._chief.run_state(self._step) if self._chief else None, self._groups)
        if self._reference is not None:
            self._reference.keep(self._step)
        self._writer.begin(self._policy, self._shard, state)
        if wait:
            self._finish_save()

    def _finish_save(self) -> None:
        path = self._writer.finish()
        if path is None:
            return
        with AllOrNone("", self._groups.world):
            if self._shard is not None:
                self._reclaim(self._shard)
            if self._groups.rank == 0:
                _log.info("saved %s", path)
                kept = checkpoints(path.parent)
                remove_generations(self._config.run.folder / REPLAY, [path for _, path in kept])
                if self._reference is not None:
                    self._reference.forget([step for step, _ in kept])

    def _finish(self) -> None:
        """Let searchers go, take in what they still sent, and close the books."""
        self._finish_save()
        if self._chief is not None:
            self._chief.dismiss_searchers(self._step)
        while True:
            notes = self._exchange_notes()
            if from_rank_0(self._chief.books_closed(notes) if self._chief else None, self._groups):
                break
            time.sleep(POLL_S)
        if self._config.buffer.segments.kind == "none":
            self._save(wait=True)  # no log has what came after the last one


def _store_reference(stored: StoredShard, draw: Draw, computed: Mapping[RolloutId, tuple[float, int]]) -> None:
    """The reference's log-probs of what was drawn from this shard."""
    values = [computed.get(rollout_id) for rollout_id in draw.batch.rollout_ids()]
    known = [(row, *value) for row, value in zip(draw.rows.tolist(), values, strict=True) if value is not None]
    if known:
        rows, logprobs, versions = zip(*known, strict=True)
        stored.shard.set_reference(np.array(rows), np.array(logprobs), versions[0])
