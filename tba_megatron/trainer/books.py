"""Rank 0's books: the ledger, ages, waiting times, and the metrics of each step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from tba_megatron.buffer.ledger import ShardCounts, combine
from tba_megatron.config import Config
from tba_megatron.metrics import MetricLog
from tba_megatron.trainer.buffer_metrics import age_histogram, draw_metrics, ledger_metrics, quantile, shard_metrics
from tba_megatron.trainer.notes import DrawFacts, MessageCounts, Note
from tba_megatron.trainer.publish import PublishDesk
from tba_megatron.trainer.result import RunResult
from tba_megatron.trainer.run_state import RunState
from tba_megatron.trainer.source_metrics import SourceMetrics
from tba_megatron.trainer.step import Update
from tba_megatron.trainer.step_metrics import update_histograms, update_metrics
from tba_megatron.transport.control import ControlServer
from tba_megatron.transport.registry import LIVING
from tba_megatron.types import LedgerCounts, ShardReport


class Books:
    """``state`` is the run as it was restored or begun; what is counted here goes on from it."""

    def __init__(
        self,
        *,
        config: Config,
        control: ControlServer,
        desk: PublishDesk,
        log: MetricLog,
        state: RunState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._control, self._desk, self._log, self._restored = config, control, desk, log, state
        self._clock = clock
        self._started_s = clock()
        self._first_train_s: float | None = None
        self._waiting_since_s: float | None = None
        self._train_s, self._wait_s = state.train_s, state.wait_s
        self._wait_before_step_s = 0.0
        self._ages: Counter[int] = Counter(state.ages)
        self._drawn, self._drawn_first = state.drawn, state.drawn_first
        self._skipped = state.skipped_steps
        self._versions_before = state.versions
        self._counts: list[ShardCounts] = []
        self._messages: list[MessageCounts] = []
        self._sources = SourceMetrics()
        self.reports: list[ShardReport] = []
        self.fresh_prompts = 0  # as reported
        self.visits = 0  # groups that arrived
        self._received_rollouts, self._received_tokens = 0, 0  # since the last step was reported
        self._snapshot_s = self._probe_s = 0.0

    # ---- what comes in

    def absorb(self, notes: Sequence[Note]) -> Counter[int]:
        """Every rank's note; the groups that have arrived, by lease."""
        self.reports = [note.report for note in notes if note.report is not None]
        self._counts = [note.counts for note in notes if note.counts is not None]
        self._messages = [note.messages for note in notes]
        self.fresh_prompts = sum(report.n_fresh for report in self.reports)
        arrived: Counter[int] = Counter()
        for note in notes:
            arrived.update(note.arrived)
        self.visits += arrived.total()
        for counts in (counts for note in notes for counts in note.received_by_source.values()):
            self._received_rollouts += counts.rollouts
            self._received_tokens += counts.completion_tokens
        self._snapshot_s += max(note.snapshot_s for note in notes)
        self._probe_s += max(note.probe_s for note in notes)
        self._sources.absorb(notes)
        return arrived

    def begin_waiting(self) -> float:
        """How long the trainer has had nothing to train on, in seconds."""
        if self._waiting_since_s is None:
            self._waiting_since_s = self._clock()
        return self._clock() - self._waiting_since_s

    def stop_waiting(self) -> None:
        now_s = self._clock()
        self._wait_before_step_s = 0.0
        if self._waiting_since_s is not None and self._first_train_s is not None:
            self._wait_before_step_s = now_s - self._waiting_since_s
            self._wait_s += self._wait_before_step_s
        self._waiting_since_s = None
        if self._first_train_s is None:
            self._first_train_s = now_s

    def invalid_reasons(self) -> Counter[str]:
        return sum((Counter(counts.invalid_reasons) for counts in self._counts), Counter())

    def ledger(self) -> LedgerCounts:
        generated, gone = self._control.generated()
        # Of the searchers of before, those that have not joined this attempt are gone.
        absent = set(self._restored.generated) - set(generated)
        return combine({**self._restored.generated, **generated}, absent | gone, self._counts)

    # ---- what goes out

    def run_state(self, step: int, accuracy_before: float | None) -> RunState:
        """What a checkpoint of ``step`` keeps."""
        position, unfinished = self._control.unfinished_prompts()
        busy_s, idle_s = self._control.times()
        generated, _ = self._control.generated()
        return RunState(
            step=step,
            base_steps=self._restored.history.base_steps,
            data_parallel=self._config.trainer.data_parallel,
            next_position=position,
            unfinished_prompts=unfinished,
            generated={**self._restored.generated, **generated},
            skipped_steps=self._skipped,
            accuracy_before=accuracy_before,
            busy_s=self._restored.busy_s + busy_s,
            idle_s=self._restored.idle_s + idle_s,
            train_s=self._train_s,
            wait_s=self._wait_s,
            versions=self._versions_before + self._desk.published,
            ages=dict(self._ages),
            drawn=self._drawn,
            drawn_first=self._drawn_first,
        )

    def report(
        self, step: int, done: Update, drawn: Sequence[DrawFacts], seconds: float, probes: dict[str, float]
    ) -> None:
        """Metrics of one step; ``probes`` are those of the probe desk."""
        self._train_s += seconds
        self._skipped += done.skipped
        ages: Counter[int] = Counter()
        for facts in drawn:
            ages.update(facts.ages)
        self._ages.update(ages)
        self._drawn += ages.total() + sum(facts.off_branch for facts in drawn)
        self._drawn_first += sum(facts.first_time for facts in drawn)
        metrics: dict[str, float] = {
            **update_metrics(done, self._skipped),
            **draw_metrics(drawn, ages, seconds),
            **shard_metrics(self.reports, self._messages),
            **self._sources.metrics(drawn),
            "buffer/fresh_prompts": self.fresh_prompts,
            "time/step_s": seconds,
            "time/wait_rollout_s": self._wait_before_step_s,
            "time/weight_snapshot_s": self._snapshot_s,
            "time/weight_probe_s": self._probe_s,
            **self._desk.metrics(),
            **probes,
            **self._fleet_metrics(),
            **ledger_metrics(self.ledger(), self.invalid_reasons()),
        }
        if self._received_rollouts:
            metrics["rollout/len_received"] = self._received_tokens / self._received_rollouts
        self._received_rollouts, self._received_tokens = 0, 0
        self._log.log(step, metrics)
        self._log.histograms(step, {**update_histograms(done), "age/steps": age_histogram(ages)})
        self._snapshot_s = self._probe_s = 0.0
        every = self._config.metrics.sample_rollouts_every_steps
        if every and step % every == 0:
            self._log_samples(step)

    def _fleet_metrics(self) -> dict[str, float]:
        busy_s, idle_s = self._control.times()
        all_s = busy_s + idle_s
        states = self._control.states()
        return {
            "fleet/searchers_live": len(self._control.members()),
            **{f"fleet/{state}": states[state] for state in LIVING},
            **{f"fleet/{what}_total": n for what, n in self._control.totals().items()},
            "fleet/refused_total": self._control.refused,
            "fleet/repeated_total": self._control.repeated,
            "fleet/idle_frac": idle_s / all_s if all_s else 0.0,
            "fleet/busy_s": busy_s,
            "fleet/idle_s": idle_s,
            "fleet/paused_frac": self._control.paused_s() / all_s if all_s else 0.0,
            "data/epoch": self._control.epoch(),
        }

    def _log_samples(self, step: int) -> None:
        samples = self._control.take_samples()[-self._config.metrics.sample_rollouts :]
        rows = [(s.prompt, s.completion, s.reward, s.version) for s in samples]
        if rows:
            self._log.table("rollouts/sample", step, ("prompt", "completion", "reward", "version"), rows)

    def result(self, step: int, *, stopped_by: int, data_ended: bool, **measured: float | int | None) -> RunResult:
        """The run in numbers; ``measured``: what others than these books know of ``RunResult``."""
        ledger, totals = self.ledger(), self._control.totals()
        busy_s, idle_s = self._control.times()
        busy_s, idle_s = busy_s + self._restored.busy_s, idle_s + self._restored.idle_s
        loop_s = self._train_s + self._wait_s
        first = self._first_train_s
        return RunResult(
            complete=step >= self._config.trainer.steps or data_ended,
            data_ended=data_ended,
            stopped_by_signal=stopped_by,
            attempt=self._restored.history.attempt,
            steps=step,
            skipped_steps=self._skipped,
            weight_versions=self._versions_before + self._desk.published,
            trainer_wait_fraction=self._wait_s / loop_s if loop_s else 0.0,
            searcher_idle_fraction=idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0,
            searchers_joined=totals["joined"],
            searchers_lost=totals["lost"],
            age_steps_p50=quantile(self._ages, 0.5),
            age_steps_max=max(self._ages, default=0),
            first_time_share=self._drawn_first / self._drawn if self._drawn else 0.0,
            startup_s=(first if first is not None else self._clock()) - self._started_s,
            rollouts_generated=ledger.generated,
            rollouts_in_flight=ledger.in_flight,
            rollouts_held_untrained=ledger.held_untrained,
            rollouts_trained=ledger.trained,
            rollouts_discarded=ledger.discarded,
            rollouts_discarded_duplicate=ledger.duplicate,
            rollouts_discarded_evicted_untrained=ledger.evicted_untrained,
            rollouts_discarded_invalid=ledger.invalid,
            rollouts_lost=ledger.lost,
            **measured,  # type: ignore[arg-type]
        )
