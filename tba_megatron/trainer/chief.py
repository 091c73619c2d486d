"""Rank 0's head: what happens next. ``decide`` alone chooses between train, wait, save and stop.

What is counted is in ``books``, who measures the policy in ``evaluations``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tba_megatron.buffer.sampler import Sampler
from tba_megatron.config import Config
from tba_megatron.metrics import MetricLog
from tba_megatron.trainer.books import Books
from tba_megatron.trainer.evaluations import Evaluations
from tba_megatron.trainer.lockstep import LockStep
from tba_megatron.trainer.notes import DrawFacts, Note
from tba_megatron.trainer.probe import ProbeDesk
from tba_megatron.trainer.publish import PublishDesk
from tba_megatron.trainer.result import RunResult
from tba_megatron.trainer.run_state import RunState
from tba_megatron.trainer.step import Update
from tba_megatron.transport.control import ControlServer
from tba_megatron.types import Action, LedgerCounts, PolicyVersion, PublishPlan, ShardReport, StepPlan

_log = logging.getLogger(__name__)

GOODBYE_S = 20.0  # how long searchers may take to leave
FINAL_TRIES = 3  # of sending the final version to searchers, before the run ends without measuring it
STARTING_S = 60.0  # what a searcher may need to start and join; a run at its end waits for one this long, or a lease
QUIET_S = 30.0  # a warning after this long without anything to train on
NO_SEARCHER = 69  # exit code (EX_UNAVAILABLE): saved, and nobody to go on with


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._control, self._desk, self._probes = config, control, desk, probes
        self._sampler, self._log, self._clock = sampler, log, clock
        self._restored_step, self._history = state.step, state.history
        self._books = Books(config=config, control=control, desk=desk, log=log, state=state, clock=clock)
        self._evaluations = Evaluations(control, config.evaluation.problems, state.accuracy_before)
        self._lockstep = LockStep(config, control) if config.weights.mode == "sync" else None
        self._sending = False
        self._warned_s = clock()
        self._warned_absent_s = 0.0
        self._data_ended = False
        self._finished_s: float | None = None  # when the last step was made
        self._failed_before_end = 0
        self._saved_step = state.step if state.step else -1
        self._visits_before_step = 0  # up to the decision for the last step
        # Groups that came faster than steps took prompts. Those of an old or another policy are never fresh, and would
        # otherwise hold back nobody.
        self._surplus = 0
        self._stopped_by = 0
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
        if step >= self._config.trainer.steps or self._data_ended:
            return self._finishing(step)
        if self._nobody_comes(step):
            return self._plan(Action.STOP, step, save=self._saved_step != step, exit_code=NO_SEARCHER)
        unmeasured = self._evaluations.lacks_first(step) and self._can_be_measured()
        if unmeasured:
            self._evaluations.ask_first(self._version(0), self._control.reachable())
        if self._lockstep and not self._has_turn(self._lockstep, step):
            return self._wait(step)
        enough = self._enough(reports, step)
        if not enough and not unmeasured and self._control.data_ended():
            self._data_ended = True
            return self._finishing(step)
        if self._lockstep and not enough:
            self._lockstep.extend(self._books.visits)
        if not enough or unmeasured:  # once searchers run a later version, nobody can measure the first
            return self._wait(step)
        self._books.stop_waiting()
        self._visits_before_step = self._books.visits
        return self._plan(
            Action.TRAIN, step + 1, save=self._saves(step + 1), publish=self._publish_plan(step, due=self._due(step))
        )

    def _plan(
        self,
        action: Action,
        step: int,
        *,
        save: bool = False,
        publish: PublishPlan | None = None,
        exit_code: int = 0,
        complete: bool = False,
    ) -> StepPlan:
        if save:
            self._saved_step = step
        return StepPlan(
            action=action,
            step=step,
            seed=self._config.run.seed * 1_000_003 + step,
            save=save,
            finish_save=self._save_written,
            publish=publish,
            exit_code=exit_code,
            complete=complete,
        )

    def _can_be_measured(self) -> bool:
        """A log may hold enough to train on before the first searcher has come, and only one that takes weights can."""
        members = self._control.members()
        return not members or any(member.takes_every for member in members)

    def _has_turn(self, lockstep: LockStep, step: int) -> bool:
        members, visits = self._control.reachable(), self._books.visits
        # The last turn of data that ends may bring less than a step's prompts.
        return self._control.data_ended() or lockstep.may_train(self._version(step), members, visits)

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
        visits = self._books.visits - (self._visits_before_step if used_up else 0)
        no_more = visits >= 2 * self._needed(step) or self._control.data_ended()
        return available >= self._needed(step) or (self._sampler.repeats and available > 0 and no_more)

    def _needed(self, step: int) -> int:
        """Prompts that have to be held before a step."""
        first = step == self._restored_step
        return max(self._config.trainer.prompts_per_step, self._config.buffer.initial_groups if first else 0)

    def _wait(self, step: int) -> StepPlan:
        self._surplus = 0  # what came is not what a step needs
        waited_s, now_s = self._books.begin_waiting(), self._clock()
        if min(waited_s, now_s - self._warned_s) > QUIET_S:
            self._warned_s = now_s
            self._warn_of_quiet(step, waited_s)
        # Whatever is due: rollouts of older weights may not count as recent, and then nothing would ever be.
        return self._plan(Action.WAIT, step, publish=self._publish_plan(step, due=True))

    def _warn_of_quiet(self, step: int, waited_s: float) -> None:
        states, ledger, books = self._control.states(), self._books.ledger(), self._books
        _say(
            f"nothing to train on for {waited_s:.0f} s: searchers "
            f"{', '.join(f'{n} {state}' for state, n in sorted(states.items())) or 'none'}; "
            f"{self._sampler.available(books.reports)} of the {self._needed(step)} prompts that a step needs, "
            f"{books.fresh_prompts} fresh ones, {self._control.outstanding_prompts()} leased, "
            f"{ledger.evicted_untrained} of {ledger.generated} rollouts evicted, {ledger.invalid} invalid "
            f"({', '.join(f'{n} {reason}' for reason, n in books.invalid_reasons().items()) or 'none'})"
        )

    def _nobody_comes(self, step: int) -> bool:
        """Whether there was no searcher for too long; said now and then before."""
        search, absent_s = self._config.search, self._control.absent_s()
        if absent_s >= search.absent_limit_s:
            _say(
                f"no searcher for {absent_s:.0f} s (search.absent_limit_s); saving step {step} and ending with exit "
                f"code {NO_SEARCHER}; start searchers and the run again to go on"
            )
            return True
        if absent_s < search.absent_warning_s:
            self._warned_absent_s = 0.0
        elif absent_s - self._warned_absent_s >= search.absent_warning_s:
            self._warned_absent_s = absent_s
            _say(f"no searcher for {absent_s:.0f} s; the run ends at {search.absent_limit_s:g} s without one")
        return False

    def _due(self, step: int) -> bool:
        return step % self._config.weights.publish_every_steps == 0

    def _publish_plan(self, step: int, *, due: bool, final: bool = False) -> PublishPlan | None:
        """Who gets the policy of now: everybody when it is due, and at once when a searcher has joined or failed.

        None while the last version is still on its way: the next one will be newer. ``final``: also those that lag.
        """
        members = self._control.reachable()
        if due or any(m.awaits_group for m in members):
            return self._desk.plan(members, self._version(step), sending=self._sending, everybody=final)
        return None

    def _version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self._history.attempt, step)

    # ---- the end

    def _finishing(self, step: int) -> StepPlan:
        """All steps are made: let one searcher measure the final policy, then stop."""
        self._books.stop_waiting()
        self._control.stop_granting()
        final, members = self._version(step), self._control.members()
        save = self._saved_step != step
        if self._finished_s is None:
            self._finished_s, self._failed_before_end = self._clock(), self._failures
        tries = self._failures - self._failed_before_end
        undeliverable = tries >= FINAL_TRIES or self._desk.refused == final
        undeliverable &= not any(m.version == final for m in members)  # who has it can measure it
        # A resumed run can be at its end before the first searcher has joined.
        patience_s = max(self._config.transport.lease_s, STARTING_S)
        alone = not any(m.takes_every for m in members) and self._clock() - self._finished_s > patience_s
        if self._evaluations.measured or alone or undeliverable:
            if undeliverable and not self._evaluations.measured:
                _log.warning("the final version could not be sent in %d tries; it is not measured", FINAL_TRIES)
            return self._plan(Action.STOP, step, save=save, complete=True)
        self._evaluations.ask_final(final, self._control.reachable())
        return self._plan(Action.WAIT, step, publish=self._publish_plan(step, due=True, final=True))

    @property
    def _failures(self) -> int:
        return self._desk.failed + self._control.receive_failures()

    def dismiss_searchers(self, step: int) -> None:
        """Say stop to all; they finish the sample they score, say how many they generated, and leave.

        Where the run goes on in another attempt they wait for it.
        """
        self._goodbye_until_s = self._clock() + GOODBYE_S
        final = step >= self._config.trainer.steps or self._data_ended
        self._control.stop_searchers("the run has ended" if final else "the trainer stops", final=final)

    def books_closed(self, notes: Sequence[Note]) -> bool:
        """True when every searcher is gone and everything sent has arrived, or time is up."""
        self._absorb(notes, self._saved_step)
        if self._clock() > self._goodbye_until_s:
            _log.warning("searchers did not leave in %g s; what they hold counts as in flight", GOODBYE_S)
            return True
        ledger = self._books.ledger()
        return not self._control.members() and ledger.in_flight == 0 and self._nothing_lost_yet(ledger)

    def _nothing_lost_yet(self, ledger: LedgerCounts) -> bool:
        # A searcher that said goodbye has handed everything to the network; it may take a moment to arrive.
        return ledger.lost == 0 or self._clock() > self._goodbye_until_s - GOODBYE_S + 2.0

    # ---- bookkeeping

    def _absorb(self, notes: Sequence[Note], step: int) -> list[ShardReport]:
        arrived = self._books.absorb(notes)
        self._surplus += arrived.total()
        self._control.note(arrived=dict(arrived), fresh_prompts=max(self._books.fresh_prompts, self._surplus))
        self._sending = any(note.sending for note in notes)
        for version, logprobs in (note.probe for note in notes if note.probe is not None):
            self._probes.know(PolicyVersion.parse(version), logprobs)
        self._probes.compare()
        for answer in self._evaluations.take():
            self._log.log(max(step, 0), {"eval/accuracy": answer.accuracy, "eval/problems": answer.problems})
        return self._books.reports

    def note_drawn(self, prompts: int) -> None:
        """A step has taken its prompts: searchers may go on while it trains."""
        self._surplus = max(0, self._surplus - prompts)
        fresh = max(0, self._books.fresh_prompts - prompts) if self._sampler.fresh_first else self._books.fresh_prompts
        self._control.note(arrived={}, fresh_prompts=max(fresh, self._surplus))

    def ledger(self) -> LedgerCounts:
        return self._books.ledger()

    def run_state(self, step: int) -> RunState:
        """What a checkpoint of ``step`` keeps."""
        return self._books.run_state(step, self._evaluations.before)

    def report(self, step: int, done: Update, drawn: Sequence[DrawFacts], seconds: float) -> None:
        """Metrics of one step."""
        self._books.report(step, done, drawn, seconds, self._probes.metrics())

    def result(self, step: int) -> RunResult:
        """The run in numbers at its end, for ``result.json`` and the summary."""
        self._desk.settle()  # a searcher may have measured the last version before its delivery was counted
        return self._books.result(
            step,
            stopped_by=self._stopped_by,
            data_ended=self._data_ended,
            accuracy_before=self._evaluations.before,
            accuracy_after=self._evaluations.after,
            weight_transfers_failed=self._failures,
            probes_answered=self._probes.answered,
            probe_alerts=self._probes.alerts,
        )


def _say(line: str) -> None:
    """To the log, and to who watches the console and would see a run that stands still."""
    _log.warning(line)
    print(line, flush=True)
