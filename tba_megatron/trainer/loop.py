"""The trainer's loop: receive, add, decide, publish, sample, pack, step. Rank 0 decides, every rank follows."""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter

from tba_megatron.buffer.sampler import Draw, Sampler, shard_rng
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.config import Config
from tba_megatron.config_sections import SearcherData
from tba_megatron.dist import Groups
from tba_megatron.loss.base import Loss
from tba_megatron.packing import Pack, pack
from tba_megatron.trainer.all_or_none import AllOrNone
from tba_megatron.trainer.checkpoint_writer import CheckpointWriter
from tba_megatron.trainer.chief import Chief
from tba_megatron.trainer.exchange import (
    exchange_groups,
    from_rank_0,
    gather_on_all,
    return_to_owners,
    share_packs,
)
from tba_megatron.trainer.head import HeadSettings
from tba_megatron.trainer.model import Policy, to_device
from tba_megatron.trainer.notes import DrawFacts, Note, draw_facts
from tba_megatron.trainer.publish import Publisher
from tba_megatron.trainer.recording import Recorder
from tba_megatron.trainer.reference import Reference
from tba_megatron.trainer.step import update
from tba_megatron.transport.rollouts import RolloutInbox
from tba_megatron.types import (
    Action,
    PolicyHistory,
    PolicyVersion,
    StepPlan,
)

_log = logging.getLogger(__name__)

POLL_S = 0.01  # how often an idle rank looks for work


class TrainLoop:
    """One rank's loop. ``chief`` is rank 0's; ``shard``, ``receiver``, ``recorder`` a DP leader's; None elsewhere."""

    def __init__(
        self,
        *,
        config: Config,
        groups: Groups,
        policy: Policy,
        reference: Reference,
        loss: Loss,
        head: HeadSettings,
        sampler: Sampler,
        shard: ReplayShard | None,
        receiver: RolloutInbox | None,
        publisher: Publisher,
        chief: Chief | None,
        recorder: Recorder | None,
        writer: CheckpointWriter,
        history: PolicyHistory,
        step: int,
    ) -> None:
        self._config, self._groups, self._policy, self._reference = config, groups, policy, reference
        self._loss, self._head, self._sampler = loss, head, sampler
        self._shard, self._receiver, self._publisher, self._chief = shard, receiver, publisher, chief
        self._recorder = recorder
        self._history = history
        self._step = step
        self._writer = writer
        self._signal = 0

    def run(self) -> int:
        """Loop until rank 0 says stop; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        while True:
            notes = gather_on_all(self._receive(), self._groups)
            plan = from_rank_0(self._chief.decide(notes, self._step) if self._chief else None, self._groups)
            if plan.finish_save:
                self._finish_save()
            if plan.publish is not None:
                self._publisher.publish(self._policy, self.version, plan.publish)
            if plan.action is Action.TRAIN:
                self._train(plan, notes)
            if plan.action is Action.SAVE or plan.save:
                self._save(wait=plan.action is not Action.TRAIN or not self._config.trainer.async_save)
            if plan.action is Action.STOP:
                self._finish()
                return plan.exit_code
            if plan.action is Action.WAIT:
                time.sleep(POLL_S)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self._history.attempt, self._step)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal = number

    def _receive(self) -> Note:
        """Move what has arrived into the shard."""
        if self._shard is None or self._receiver is None:
            return Note(signal=self._signal, save_written=self._save_written)
        arrived: Counter[int] = Counter()
        for group in self._receiver.drain():
            self._shard.add(group)
            arrived[group.lease] += 1
        return Note(
            signal=self._signal,
            save_written=self._save_written,
            report=self._sampler.report(self._shard, self._history, self._step),
            counts=self._shard.counts(),
            arrived=dict(arrived),
            refused=self._receiver.refused,
        )

    def _train(self, plan: StepPlan, notes: list[Note]) -> None:
        started = time.monotonic()
        packs, drawn = self._sample(plan, notes)
        if self._loss.needs_reference:
            packs, computed = self._reference.fill(packs)
            if self._shard is not None:
                self._shard.set_reference(return_to_owners(computed, self._groups))
        batches = [to_device(p.microbatch, self._groups.device) for p in packs]
        trainer = self._config.trainer
        normaliser = float(trainer.prompts_per_step * trainer.rollouts_per_prompt)
        done = update(self._policy, batches, self._loss, normaliser, self._head, self._groups)
        self._step = plan.step
        everyone = gather_on_all(drawn, self._groups)
        if self._chief is not None:
            facts = [d for d in everyone if d is not None]
            self._chief.report(self._step, done, facts, time.monotonic() - started)

    def _sample(self, plan: StepPlan, notes: list[Note]) -> tuple[list[Pack], DrawFacts | None]:
        """This replica's microbatches: drawn by the global plan, moved to the replicas that train them, packed."""
        trainer = self._config.trainer
        packs, facts = None, None
        draw = self._draw(self._shard, plan, notes) if self._shard is not None else None
        if isinstance(trainer.data, SearcherData) and trainer.data.record:
            with AllOrNone("", self._groups.world):
                if self._recorder is not None and draw is not None:
                    self._recorder.write(plan.step, draw.groups)
        if draw is not None:
            mine = exchange_groups(draw.groups, self._groups)
            multiple_of = self._groups.tp_size if trainer.sequence_parallel else 1
            packs = pack(mine, trainer.microbatch_tokens, multiple_of, reference_version=self._reference.version)
            facts = draw_facts(draw, self._history, self._step, sum(len(p.microbatch.tokens) for p in packs))
        if self._chief is not None:
            self._chief.note_drawn(trainer.prompts_per_step)
        return share_packs(packs, self._groups), facts

    def _draw(self, shard: ReplayShard, plan: StepPlan, notes: list[Note]) -> Draw:
        reports = [notes[rank].report for rank in self._groups.leader_ranks]
        trainer, me = self._config.trainer, self._groups.dp_rank
        counts = self._sampler.plan([r for r in reports if r is not None], trainer.prompts_per_step, plan.seed)
        draw = self._sampler.draw(
            shard,
            counts.n_recent[me],
            counts.n_replay[me],
            trainer.rollouts_per_prompt,
            shard_rng(plan.seed, me),
            self._history,
            self._step,
        )
        shard.mark_trained(r.rollout_id for group in draw.groups for r in group.rollouts)
        return draw

    @property
    def _save_written(self) -> bool:
        return self._writer.in_flight and self._writer.done

    def _save(self, *, wait: bool) -> None:
        """Save at this step boundary; without ``wait`` a thread writes while training goes on."""
        state = from_rank_0(self._chief.run_state(self._step) if self._chief else None, self._groups)
        self._writer.begin(self._policy, self._shard, state)
        if wait:
            self._finish_save()

    def _finish_save(self) -> None:
        path = self._writer.finish()
        if path is not None and self._groups.rank == 0:
            _log.info("saved %s", path)

    def _finish(self) -> None:
        """Let searchers go, take in what they still sent, and close the books."""
        self._finish_save()
        if self._chief is not None:
            self._chief.dismiss_searchers()
        while True:
            notes = gather_on_all(self._receive(), self._groups)
            if from_rank_0(self._chief.books_closed(notes) if self._chief else None, self._groups):
                return
            time.sleep(POLL_S)
