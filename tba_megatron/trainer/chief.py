"""Rank 0's head: what happens next, what is known about the run, and what is reported.

``decide`` alone chooses between train, wait, save and stop. The rest is bookkeeping: ledger, waiting, ages, metrics.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from tba_megatron.buffer.ledger import ShardCounts, combine
from tba_megatron.buffer.sampler import Sampler
from tba_megatron.config import Config
from tba_megatron.metrics import MetricLog
from tba_megatron.trainer.buffer_metrics import draw_metrics, ledger_metrics, quantile, shard_metrics
from tba_megatron.trainer.lockstep import LockStep
from tba_megatron.trainer.notes import DrawFacts, MessageCounts, Note
from tba_megatron.trainer.probe import ProbeDesk
from tba_megatron.trainer.publish import PublishDesk
from tba_megatron.trainer.result import RunResult
from tba_megatron.trainer.run_state import RunState
from tba_megatron.trainer.step import Update
from tba_megatron.trainer.step_metrics import update_metrics
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.messages import Evaluate
from tba_megatron.types import (
    Action,
    LedgerCounts,
    PolicyVersion,
    PublishPlan,
    ShardReport,
    StepPlan,
)

_log = logging.getLogger(__name__)

GOODBYE_S = 20.0  # how long searchers may take to leave
FINAL_TRIES = 3  # of sending the final version to searchers, before the run ends without measuring it
STARTING_S = 60.0  # what a searcher may need to start and join; a run at its end waits for one this long, or a lease
QUIET_S = 30.0  # a warning after this long without anything to train on


class Chief:
    """Owned by rank 0's loop. ``state`` is the run as it was restored or begun."""

    def __init__(
        self,
        *,
        config: Config,
        control: ControlServer,
        desk: PublishDesk,
        probes: ProbeDesk,
        sampler: Sampler,
        log: MetricLog,
        state: RunState,
    ) -> None:
        self._config, self._control, self._desk, self._probes = config, control, desk, probes
        self._lockstep = LockStep(config, control) if config.weights.mode == "sync" else None
        self._sending, self._snapshot_s, self._probe_s = False, 0.0, 0.0
        self._sampler, self._log, self._restored = sampler, log, state
        self._history = state.history
        self._started_s = time.monotonic()
        self._first_train_s: float | None = None
        self._waiting_since_s: float | None = None
        self._warned_s = time.monotonic()
        self._train_s, self._wait_s = state.train_s, state.wait_s
        self._wait_before_step_s = 0.0
        self._ages: Counter[int] = Counter(state.ages)
        self._drawn, self._drawn_first = state.drawn, state.drawn_first
        self._skipped = state.skipped_steps
        self._versions_before = state.versions
        self._accuracy_before = state.accuracy_before
        self._accuracy_after: float | None = None
        self._asked: dict[str, str] = {}  # version -> searcher that was asked to evaluate it
        self._finished_s: float | None = None  # when the last step was made
        self._failed_before_end = 0
        self._saved_step = state.step if state.step else -1
        self._counts: list[ShardCounts] = []
        self._reports: list[ShardReport] = []
        self._messages: list[MessageCounts] = []
        self._fresh_prompts = 0  # as reported
        self._visits = 0  # groups that arrived
        self._visits_before_step = 0  # up to the decision for the last step
        self._received_rollouts, self._received_tokens = 0, 0  # since the last step was reported
        self._stopped_by: int = 0
        self._save_written = False
        self._goodbye_until_s = 0.0

    # ---- deciding

    def decide(self, notes: Sequence[Note], step: int) -> StepPlan:
        """The plan of one iteration, from every rank's note."""
        reports = self._absorb(notes, step)
        self._save_written = all(note.save_written for note in notes)
        self._stopped_by = next((note.signal for note in notes if note.signal), 0)
        if self._stopped_by:
            return self._plan(Action.STOP, step, save=self._saved_step != step)
        if step >= self._config.trainer.steps:
            return self._finishing(step)
        self._ask_for_first_evaluation(step)
        if self._lockstep and not self._lockstep.may_train(self._version(step), self._control.members(), self._visits):
            return self._wait(step)
        # A log may hold enough before the first searcher has come, and only it can measure where the run begins.
        enough = self._enough(reports, step)
        if self._lockstep and not enough:
            self._lockstep.extend(self._visits)
        if not enough or (self._unmeasured(step) and not self._asked):
            return self._wait(step)
        self._stop_waiting()
        self._visits_before_step = self._visits
        return self._plan(
            Action.TRAIN, step + 1, save=self._saves(step + 1), publish=self._publish_plan(step, due=self._due(step))
        )

    def _plan(self, action: Action, step: int, *, save: bool = False, publish: PublishPlan | None = None) -> StepPlan:
        if save:
            self._saved_step = step
        seed = self._config.run.seed * 1_000_003 + step
        return StepPlan(action=action, step=step, seed=seed, save=save, finish_save=self._save_written, publish=publish)

    def _saves(self, step: int) -> bool:
        every = self._config.trainer.save_every_steps
        return bool(every) and step % every == 0

    def _enough(self, reports: Sequence[ShardReport], step: int) -> bool:
        """Whether the shards hold what a step needs."""
        fresh, available = sum(report.n_fresh for report in reports), self._sampler.available(reports)
        if fresh < self._config.buffer.fresh_prompts_per_step:
            return False
        # Searchers that have made twice as many visits as prompts are needed came back to the same ones: there are
        # fewer, and a step repeats some. Where prompts are used up, only visits after the last step can tell.
        used_up = any(report.n_exhausted for report in reports)
        visits = self._visits - (self._visits_before_step if used_up else 0)
        few = self._sampler.repeats and available > 0 and visits >= 2 * self._needed(step)
        return available >= self._needed(step) or few

    def _needed(self, step: int) -> int:
        """Prompts that have to be held before a step."""
        first = step == self._restored.step
        return max(self._config.trainer.prompts_per_step, self._config.buffer.initial_groups if first else 0)

    def _wait(self, step: int) -> StepPlan:
        now_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if now_s - max(self._waiting_since_s, self._warned_s) > QUIET_S:
            self._warned_s = now_s
            living = self._control.members()
            ledger = self.ledger()
            message = (
                f"nothing to train on for {now_s - self._waiting_since_s:.0f} s: {len(living)} searchers alive, "
                f"{self._sampler.available(self._reports)} of the {self._needed(step)} prompts that a step needs, "
                f"{self._fresh_prompts} fresh ones, {self._control.outstanding_prompts()} leased, "
                f"{ledger.evicted_untrained} of {ledger.generated} rollouts evicted, {ledger.invalid} invalid "
                f"({', '.join(f'{n} {reason}' for reason, n in self._invalid_reasons().items()) or 'none'})"
            )
            _log.warning(message)
            print(message, flush=True)  # who watches the console would see a run that stands still
        # Whatever is due: rollouts of older weights may not count as recent, and then nothing would ever be.
        return self._plan(Action.WAIT, step, publish=self._publish_plan(step, due=True))

    def _invalid_reasons(self) -> Counter[str]:
        return sum((Counter(counts.invalid_reasons) for counts in self._counts), Counter())

    def _stop_waiting(self) -> None:
        now_s = time.monotonic()
        self._wait_before_step_s = 0.0
        if self._waiting_since_s is not None and self._first_train_s is not None:
            self._wait_before_step_s = now_s - self._waiting_since_s
            self._wait_s += self._wait_before_step_s
        self._waiting_since_s = None
        if self._first_train_s is None:
            self._first_train_s = now_s

    def _due(self, step: int) -> bool:
        return step % self._config.weights.publish_every_steps == 0

    def _publish_plan(self, step: int, *, due: bool) -> PublishPlan | None:
        """Who gets the policy of now: everybody when it is due, and at once when a searcher has joined or failed.

        None while the last version is still on its way: the next one will be newer.
        """
        members = self._control.members()
        if due or any(m.epoch < 0 for m in members):
            return self._desk.plan(members, self._version(step), sending=self._sending)
        return None

    def _version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self._history.attempt, step)

    # ---- evaluation and the end

    def _ask_for_first_evaluation(self, step: int) -> None:
        if self._unmeasured(step):
            self._ask_for_evaluation(self._version(0))

    def _unmeasured(self, step: int) -> bool:
        return self._accuracy_before is None and step == 0 and self._config.evaluation.problems > 0

    def _ask_for_evaluation(self, version: PolicyVersion) -> None:
        """Once for each version, of the first searcher that runs it; again when that searcher is gone."""
        members = self._control.members()
        if self._asked.get(str(version)) in {member.searcher for member in members}:
            return
        for member in members:
            if member.version == version and not member.evaluating:
                self._asked[str(version)] = member.searcher
                self._control.send(member.searcher, Evaluate(version=str(version)))
                return

    def _finishing(self, step: int) -> StepPlan:
        """All steps are made: let one searcher measure the final policy, then stop."""
        self._stop_waiting()
        self._control.stop_granting()
        final, members = self._version(step), self._control.members()
        save = self._saved_step != step
        measured = self._accuracy_after is not None or not self._config.evaluation.problems
        if self._finished_s is None:
            self._finished_s, self._failed_before_end = time.monotonic(), self._failures
        tries = self._failures - self._failed_before_end
        undeliverable = tries >= FINAL_TRIES or self._desk.refused == final
        if undeliverable:
            _log.warning("the final version could not be sent in %d tries; it is not measured", FINAL_TRIES)
        # A resumed run can be at its end before the first searcher has joined.
        patience_s = max(self._config.transport.lease_s, STARTING_S)
        alone = not members and time.monotonic() - self._finished_s > patience_s
        if measured or alone or undeliverable:
            return self._plan(Action.STOP, step, save=save)
        self._ask_for_evaluation(final)
        return self._plan(Action.WAIT, step, publish=self._publish_plan(step, due=True))

    @property
    def _failures(self) -> int:
        return self._desk.failed + self._control.receive_failures()

    def dismiss_searchers(self) -> None:
        """Say stop to all; they finish the sample they score, say how many they generated, and leave."""
        self._goodbye_until_s = time.monotonic() + GOODBYE_S
        self._control.stop_searchers("the trainer stops")

    def books_closed(self, notes: Sequence[Note]) -> bool:
        """True when every searcher is gone and everything sent has arrived, or time is up."""
        self._absorb(notes, self._saved_step)
        if time.monotonic() > self._goodbye_until_s:
            _log.warning("searchers did not leave in %g s; what they hold counts as in flight", GOODBYE_S)
            return True
        ledger = self.ledger()
        return not self._control.members() and ledger.in_flight == 0 and self._nothing_lost_yet(ledger)

    def _nothing_lost_yet(self, ledger: LedgerCounts) -> bool:
        # A searcher that said goodbye has handed everything to the network; it may take a moment to arrive.
        return ledger.lost == 0 or time.monotonic() > self._goodbye_until_s - GOODBYE_S + 2.0

    # ---- bookkeeping

    def _absorb(self, notes: Sequence[Note], step: int) -> list[ShardReport]:
        reports = [note.report for note in notes if note.report is not None]
        self._counts = [note.counts for note in notes if note.counts is not None]
        self._reports, self._messages = reports, [note.messages for note in notes]
        self._fresh_prompts = sum(report.n_fresh for report in reports)
        arrived = Counter()
        for note in notes:
            arrived.update(note.arrived)
        self._visits += arrived.total()
        self._received_rollouts += sum(note.received_rollouts for note in notes)
        self._received_tokens += sum(note.received_tokens for note in notes)
        self._control.note(arrived=dict(arrived), fresh_prompts=self._fresh_prompts)
        self._sending = any(note.sending for note in notes)
        self._snapshot_s += max(note.snapshot_s for note in notes)
        self._probe_s += max(note.probe_s for note in notes)
        for version, logprobs in (note.probe for note in notes if note.probe is not None):
            self._probes.know(PolicyVersion.parse(version), logprobs)
        self._probes.compare()
        for evaluated in self._control.take_evaluations():
            measured_step = PolicyVersion.parse(evaluated.version).step
            if measured_step == 0:
                self._accuracy_before = evaluated.accuracy
            if measured_step >= self._config.trainer.steps:
                self._accuracy_after = evaluated.accuracy
            self._log.log(max(step, 0), {"eval/accuracy": evaluated.accuracy, "eval/problems": evaluated.problems})
        return reports

    def note_drawn(self, prompts: int) -> None:
        """A step has taken its prompts: searchers may go on while it trains."""
        if self._sampler.fresh_first:
            self._control.note(arrived={}, fresh_prompts=max(0, self._fresh_prompts - prompts))

    def ledger(self) -> LedgerCounts:
        generated, gone = self._control.generated()
        return combine({**self._restored.generated, **generated}, set(self._restored.generated) | gone, self._counts)

    def run_state(self, step: int) -> RunState:
        """What a checkpoint of ``step`` keeps."""
        position, unfinished = self._control.unfinished_prompts()
        busy_s, idle_s = self._control.times()
        generated, _ = self._control.generated()
        return RunState(
            step=step,
            base_steps=self._history.base_steps,
            data_parallel=self._config.trainer.data_parallel,
            next_position=position,
            unfinished_prompts=unfinished,
            generated={**self._restored.generated, **generated},
            skipped_steps=self._skipped,
            accuracy_before=self._accuracy_before,
            busy_s=self._restored.busy_s + busy_s,
            idle_s=self._restored.idle_s + idle_s,
            train_s=self._train_s,
            wait_s=self._wait_s,
            versions=self._versions_before + self._desk.published,
            ages=dict(self._ages),
            drawn=self._drawn,
            drawn_first=self._drawn_first,
        )

    def report(self, step: int, done: Update, drawn: Sequence[DrawFacts], seconds: float) -> None:
        """Metrics of one step."""
        self._train_s += seconds
        self._skipped += done.skipped
        ages: Counter[int] = Counter()
        for facts in drawn:
            ages.update(facts.ages)
        self._ages.update(ages)
        self._drawn += ages.total() + sum(facts.off_branch for facts in drawn)
        self._drawn_first += sum(facts.first_time for facts in drawn)
        joined, lost = self._control.totals()
        busy_s, idle_s = self._control.times()
        metrics: dict[str, float] = {
            **update_metrics(done, self._skipped),
            **draw_metrics(drawn, ages, seconds),
            **shard_metrics(self._reports, self._messages),
            "buffer/fresh_prompts": self._fresh_prompts,
            "fleet/refused_total": self._control.refused,
            "time/step_s": seconds,
            "time/wait_rollout_s": self._wait_before_step_s,
            "time/weight_snapshot_s": self._snapshot_s,
            "time/weight_probe_s": self._probe_s,
            **self._desk.metrics(),
            **self._probes.metrics(),
            "fleet/searchers_live": len(self._control.members()),
            "fleet/joined_total": joined,
            "fleet/lost_total": lost,
            "fleet/idle_frac": idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0,
            "fleet/busy_s": busy_s,
            "fleet/idle_s": idle_s,
            "fleet/paused_frac": self._control.paused_s() / (busy_s + idle_s) if busy_s + idle_s else 0.0,
            **ledger_metrics(self.ledger(), self._invalid_reasons()),
        }
        if self._received_rollouts:
            metrics["rollout/len_received"] = self._received_tokens / self._received_rollouts
        self._received_rollouts, self._received_tokens = 0, 0
        self._log.log(step, metrics)
        self._snapshot_s = self._probe_s = 0.0
        every = self._config.metrics.sample_rollouts_every_steps
        if every and step % every == 0:
            self._log_samples(step)

    def _log_samples(self, step: int) -> None:
        samples = self._control.take_samples()[-self._config.metrics.sample_rollouts :]
        rows = [(s.prompt, s.completion, s.reward, s.version) for s in samples]
        if rows:
            self._log.table("rollouts/sample", step, ("prompt", "completion", "reward", "version"), rows)

    def result(self, step: int) -> RunResult:
        """The run in numbers, for ``result.json`` and the summary."""
        ledger = self.ledger()
        busy_s, idle_s = self._control.times()
        busy_s, idle_s = busy_s + self._restored.busy_s, idle_s + self._restored.idle_s
        loop_s = self._train_s + self._wait_s
        first = self._first_train_s
        return RunResult(
            complete=step >= self._config.trainer.steps,
            stopped_by_signal=self._stopped_by,
            attempt=self._history.attempt,
            steps=step,
            skipped_steps=self._skipped,
            accuracy_before=self._accuracy_before,
            accuracy_after=self._accuracy_after,
            weight_versions=self._versions_before + self._desk.published,
            weight_transfers_failed=self._failures,
            probes_answered=self._probes.answered,
            probe_alerts=self._probes.alerts,
            trainer_wait_fraction=self._wait_s / loop_s if loop_s else 0.0,
            searcher_idle_fraction=idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0,
            age_steps_p50=quantile(self._ages, 0.5),
            age_steps_max=max(self._ages, default=0),
            first_time_share=self._drawn_first / self._drawn if self._drawn else 0.0,
            startup_s=(first if first is not None else time.monotonic()) - self._started_s,
            rollouts_generated=ledger.generated,
            rollouts_in_flight=ledger.in_flight,
            rollouts_held_untrained=ledger.held_untrained,
            rollouts_trained=ledger.trained,
            rollouts_discarded=ledger.discarded,
            rollouts_discarded_duplicate=ledger.duplicate,
            rollouts_discarded_evicted_untrained=ledger.evicted_untrained,
            rollouts_discarded_invalid=ledger.invalid,
            rollouts_lost=ledger.lost,
        )
