"""Rank 0's decisions: what happens next, from every rank's note and what the searchers say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tba_megatron.buffer.ledger import ShardCounts
from tba_megatron.buffer.sampler import make_sampler
from tba_megatron.config_load import load_config
from tba_megatron.trainer import chief as chief_module
from tba_megatron.trainer.buffer_metrics import quantile
from tba_megatron.trainer.checkpoint import RunState
from tba_megatron.trainer.chief import Chief
from tba_megatron.trainer.notes import DrawFacts, Note, SourceCounts
from tba_megatron.trainer.probe import ProbeDesk
from tba_megatron.trainer.step import Update
from tba_megatron.transport.messages import Evaluate, Evaluated, Probed
from tba_megatron.transport.registry import Member, State
from tba_megatron.types import Action, CohortPlan, PolicyVersion, PublishPlan, ShardReport

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
COHORT = CohortPlan(epoch=0, replica=0, searchers=("a",), workers=(1,))
PUBLISH = PublishPlan(round=0, host="127.0.0.1", port=1, cohorts=(COHORT,), epochs=(0,))
ENOUGH = 8  # prompts a step


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Control:
    """What ``ControlServer`` knows and was told, without a network."""

    def __init__(self) -> None:
        self.fleet: list[Member] = []
        self.sent: list[tuple[str, object]] = []
        self.evaluations: list[Evaluated] = []
        self.noted: list[tuple[dict[int, int], int]] = []
        self.granting = True
        self.silent: set[str] = set()
        self.stopped: list[bool] = []
        self.refused = self.repeated = 0
        self.absent = 0.0
        self.ended = False
        self.allowed: list[int] = []
        self.probes: list[tuple[str, Probed]] = []
        self.refused_weights: list[str] = []

    def members(self):
        return [m for m in self.fleet if m.gone is None]

    def reachable(self):
        return [m for m in self.members() if m.searcher not in self.silent]

    def states(self):
        return Counter(m.gone or State.CURRENT for m in self.fleet)

    def absent_s(self):
        return self.absent

    def data_ended(self):
        return self.ended

    def epoch(self):
        return 0.5

    def send(self, searcher, message):
        self.sent.append((searcher, message))
        self.change(searcher, evaluating=True)

    def change(self, searcher, **changes):
        self.fleet = [replace(m, **changes) if m.searcher == searcher else m for m in self.fleet]

    def note(self, *, arrived, fresh_prompts):
        self.noted.append((arrived, fresh_prompts))

    def take_evaluations(self):
        done, self.evaluations = self.evaluations, []
        return done

    def generated(self):
        gone = frozenset(m.searcher for m in self.fleet if m.gone is not None)
        return {m.searcher: m.generated for m in self.fleet}, gone

    def allow(self, prompts):
        self.allowed.append(prompts)

    def paused_s(self):
        return 0.5

    def receive_failures(self):
        return 3

    def take_probes(self):
        done, self.probes = self.probes, []
        return done

    def refuse_weights(self, searcher, reason):
        self.refused_weights.append(reason)
        self.change(searcher, epoch=-1, failure=reason)

    def stop_granting(self):
        self.granting = False

    def stop_searchers(self, reason, *, final):
        self.stopped.append(final)

    def times(self):
        return 3.0, 1.0

    def totals(self):
        return {"joined": len(self.fleet), "lost": sum(m.gone is State.LOST for m in self.fleet), "returned": 0}

    def unfinished_prompts(self):
        return 40, [(8, 4)]

    def outstanding_prompts(self):
        return 4

    def take_samples(self):
        return []


class PublishDesk:
    published, failed, refused, on_its_way = 2, 1, None, 0

    def __init__(self) -> None:
        self.asked: list[PolicyVersion] = []

    def metrics(self):
        return {"weights/published_total": self.published}

    def settle(self):
        self.published += self.on_its_way
        self.on_its_way = 0

    def plan(self, members, version, *, sending, everybody):
        self.asked.append(version)
        self.everybody = everybody
        return PUBLISH if not sending and any(m.version != version for m in members) else None


class Log:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict]] = []
        self.spread: dict[int, dict] = {}

    def log(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def histograms(self, step, histograms):
        self.spread[step] = histograms

    def table(self, *args):
        raise AssertionError("no samples were there")


def member(searcher="a", version=None, **fields) -> Member:
    return Member(
        searcher=searcher,
        host="h",
        workers=1,
        version=version or PolicyVersion(0, 0),
        joined_s=0.0,
        heard_s=0.0,
        **({"epoch": 0} | fields),
    )


class Desk:
    """A chief with everything around it."""

    def __init__(self, tmp_path, *overrides: str, state: RunState | None = None, clock: Clock | None = None) -> None:
        fixed = [f"run.folder={tmp_path}", "trainer.steps=4", f"trainer.prompts_per_step={ENOUGH}"]
        others = ["weights.publish_every_steps=1", "evaluation.problems=0"]
        self.config = load_config(QUICKSTART, [*fixed, *others, *overrides])
        self.control, self.publishing, self.log = Control(), PublishDesk(), Log()
        self.control.fleet = [member()]
        self.chief = Chief(
            config=self.config,
            control=self.control,
            desk=self.publishing,
            probes=ProbeDesk(self.config.weights, self.control),
            sampler=make_sampler(self.config.buffer.sampler),
            log=self.log,
            state=state or run_state(),
            clock=clock or Clock(),
        )

    def leader(self, prompts=ENOUGH, fresh=ENOUGH, *, signal=0, counts=None, arrived=None) -> Note:
        report = ShardReport(n_prompts=prompts, n_recent=prompts, n_fresh=fresh, n_rollouts=8 * prompts, bytes=0)
        return Note(signal=signal, report=report, counts=counts or shard_counts(), arrived=arrived or {})

    def decide(self, step=0, prompts=ENOUGH, *, fresh=None, signals=(0,), counts=None, arrived=None):
        leader = self.leader(
            prompts, prompts if fresh is None else fresh, signal=signals[0], counts=counts, arrived=arrived
        )
        return self.chief.decide([leader, *(Note(signal=s) for s in signals[1:])], step)

    def evaluated(self, version: str, accuracy: float, searcher="a") -> None:
        self.control.change(searcher, evaluating=False)
        self.control.evaluations.append(Evaluated(version=version, accuracy=accuracy, problems=10, seconds=1.0))

    def asked(self) -> list[tuple[str, str]]:
        return [(to, message.version) for to, message in self.control.sent if isinstance(message, Evaluate)]


def run_state(step=0, base_steps=(0,), **fields) -> RunState:
    return RunState(
        step=step,
        base_steps=base_steps,
        **({"data_parallel": 1, "next_position": 0, "unfinished_prompts": [], "generated": {}} | fields),
    )


def shard_counts(received=None, **fields) -> ShardCounts:
    zero = dict.fromkeys(("held_untrained", "trained", "duplicate", "evicted_untrained", "invalid"), 0)
    return ShardCounts(received=received or {}, invalid_reasons={}, **(zero | fields))


@pytest.fixture
def clock():
    return Clock()


# ---- train or wait


def test_it_trains_when_the_shards_hold_enough_and_waits_otherwise(tmp_path):
    desk = Desk(tmp_path)
    assert desk.decide(prompts=ENOUGH - 1).action is Action.WAIT
    plan = desk.decide()
    assert (plan.action, plan.step, plan.save) == (Action.TRAIN, 1, False)


def test_training_begins_with_initial_groups_and_goes_on_with_less(tmp_path):
    desk = Desk(tmp_path, "buffer.initial_groups=16", "search.max_age_steps=2")
    assert desk.decide(0, ENOUGH).action is Action.WAIT
    assert desk.decide(0, 16).action is Action.TRAIN
    assert desk.decide(1, ENOUGH).action is Action.TRAIN


def test_prompts_are_repeated_once_searchers_came_back_to_the_same_ones(tmp_path):
    desk = Desk(tmp_path)
    visits = {0: 2 * ENOUGH - 1}
    assert desk.decide(prompts=ENOUGH - 1, arrived=visits).action is Action.WAIT
    assert desk.decide(prompts=ENOUGH - 1, arrived={0: 1}).action is Action.TRAIN
    assert Desk(tmp_path).decide(prompts=0, arrived={0: 2 * ENOUGH}).action is Action.WAIT


def test_fifo_waits_for_as_many_prompts_as_a_step_has(tmp_path):
    desk = Desk(tmp_path, "buffer.sampler={kind: fifo}")
    assert desk.decide(prompts=ENOUGH - 1, arrived={0: 9 * ENOUGH}).action is Action.WAIT
    assert desk.decide(prompts=ENOUGH, arrived={0: 1}).action is Action.TRAIN


@pytest.mark.parametrize(("sampler", "left"), [("reward_recency", 0), ("fifo", 0), ("uniform", ENOUGH)])
def test_a_step_makes_room_for_as_many_prompts_as_it_takes_fresh(sampler, left, tmp_path):
    desk = Desk(tmp_path, f"buffer.sampler={{kind: {sampler}}}")
    desk.decide()
    desk.chief.note_drawn(ENOUGH)
    assert desk.control.noted[-1][1] == left


def test_fresh_prompts_are_waited_for(tmp_path):
    desk = Desk(tmp_path, "buffer.fresh_prompts_per_step=4")
    assert desk.decide(0, fresh=3).action is Action.WAIT
    assert desk.decide(0, fresh=4).action is Action.TRAIN


def test_each_step_has_a_seed_of_its_own_that_a_rerun_repeats(tmp_path):
    seeds = [[Desk(tmp_path / str(i)).decide(step).seed for step in range(4)] for i in range(2)]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 4
    assert Desk(tmp_path / "other", "run.seed=1").decide().seed not in seeds[0]


def test_what_a_step_draws_is_no_longer_fresh(tmp_path):
    desk = Desk(tmp_path)
    desk.decide(prompts=ENOUGH + 3, arrived={7: 2})
    desk.chief.note_drawn(ENOUGH)
    assert desk.control.noted == [({7: 2}, ENOUGH + 3), ({}, 3)]


def test_groups_that_are_never_fresh_hold_searchers_back_too_while_steps_are_made(tmp_path):
    desk = Desk(tmp_path)
    desk.decide(0, fresh=0, arrived={0: 3 * ENOUGH})
    assert desk.control.noted[-1][1] == 3 * ENOUGH
    desk.chief.note_drawn(ENOUGH)
    assert desk.control.noted[-1][1] == 2 * ENOUGH
    desk.decide(1, prompts=0, arrived={0: 1})  # they are of no use: more are needed
    desk.decide(1, fresh=0, arrived={0: 2})
    assert desk.control.noted[-1][1] == 2


# ---- save, publish, stop


def test_it_saves_every_so_many_steps(tmp_path):
    desk = Desk(tmp_path, "trainer.save_every_steps=2")
    assert [desk.decide(step).save for step in range(4)] == [False, True, False, True]
    assert desk.decide(4).save is False  # the last step has been saved


def test_a_searcher_with_old_weights_gets_the_policy_of_now(tmp_path):
    desk = Desk(tmp_path)
    assert desk.decide(0).publish is None
    assert desk.decide(1).publish is PUBLISH
    assert desk.publishing.asked[-1] == PolicyVersion(0, 1)


def test_versions_between_two_publishes_are_only_for_newcomers(tmp_path):
    desk = Desk(tmp_path, "weights.publish_every_steps=2")
    assert [desk.decide(step).publish for step in range(3)] == [None, None, PUBLISH]
    desk.control.change("a", epoch=-1)
    assert desk.decide(3).publish is PUBLISH


def test_a_trainer_that_starves_publishes_though_it_is_not_due(tmp_path):
    desk = Desk(tmp_path, "weights.publish_every_steps=7")
    assert desk.decide(3).publish is None
    plan = desk.decide(3, prompts=0)
    assert (plan.action, plan.publish) == (Action.WAIT, PUBLISH)


def test_a_version_is_not_planned_while_a_rank_still_sends_the_last(tmp_path):
    desk = Desk(tmp_path)
    sending = Note(sending=True)
    assert desk.chief.decide([desk.leader(), sending], 1).publish is None
    assert desk.chief.decide([desk.leader(), Note()], 1).publish is PUBLISH


def test_in_lock_step_a_version_comes_first_then_its_prompts_then_the_step(tmp_path):
    desk = Desk(tmp_path, "weights.mode=sync")
    assert desk.control.allowed == [0]
    plan = desk.decide(1)
    assert (plan.action, plan.publish) == (Action.WAIT, PUBLISH)
    desk.control.change("a", version=PolicyVersion(0, 1))
    assert desk.decide(1).action is Action.WAIT
    assert desk.control.allowed == [0, ENOUGH]
    assert desk.decide(1, arrived={0: ENOUGH}).action is Action.TRAIN


def test_a_searcher_that_does_not_run_what_it_was_sent_is_found_and_sent_it_again(tmp_path):
    desk = Desk(tmp_path, "weights.publish_every_steps=7")
    desk.control.change("a", version=PolicyVersion(0, 0), epoch=0)
    desk.control.probes.append(("a", Probed(version="0.0", logprobs_nats=(-1.0, -9.0))))
    known = Note(probe=("0.0", (-1.0, -2.0)))
    plan = desk.chief.decide([desk.leader(), known], 1)
    assert plan.publish is PUBLISH
    (reason,) = desk.control.refused_weights
    assert "3.5 nats in the mean" in reason


@pytest.mark.parametrize("signals", [(15,), (0, 15), (0, 0, 10)])
def test_a_signal_on_any_rank_saves_and_stops_all(signals, tmp_path):
    desk = Desk(tmp_path)
    desk.decide(0)
    plan = desk.decide(1, signals=signals)
    assert (plan.action, plan.save, plan.exit_code) == (Action.STOP, True, 0)
    result = desk.chief.result(1)
    assert not result.complete and result.stopped_by_signal == max(signals)


def test_a_signal_right_after_a_save_does_not_save_again(tmp_path):
    desk = Desk(tmp_path, "trainer.save_every_steps=1")
    desk.decide(0)
    plan = desk.decide(1, signals=(15,))
    assert (plan.action, plan.save) == (Action.STOP, False)


@pytest.mark.parametrize(("written", "finished"), [((True, True), True), ((True, False), False), ((False,), False)])
def test_a_save_counts_when_every_rank_has_written_its_part(written, finished, tmp_path):
    desk = Desk(tmp_path)
    report = ShardReport(n_prompts=0, n_recent=0, n_fresh=0, n_rollouts=0, bytes=0)
    notes = [Note(save_written=w, report=None if i else report) for i, w in enumerate(written)]
    plan = desk.chief.decide(notes, 1)
    assert (plan.action, plan.finish_save) == (Action.WAIT, finished)
    assert desk.chief.decide(notes, 4).finish_save is finished  # at the end too


# ---- evaluation and the end


def test_a_run_whose_log_holds_enough_is_measured_before_it_goes_on(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10", state=run_state(base_steps=(0, 0)))
    desk.control.fleet, joined = [], [replace(desk.control.fleet[0], version=PolicyVersion(1, 0))]
    assert desk.decide().action is Action.WAIT
    desk.control.fleet = joined
    assert desk.decide().action is Action.WAIT  # with a later version, nobody could answer
    assert desk.asked() == [("a", "1.0")]
    desk.evaluated("1.0", 0.25)
    assert desk.decide().action is Action.TRAIN


def test_where_no_searcher_takes_weights_nothing_is_measured(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10")
    desk.control.change("a", takes_every=0, version=PolicyVersion(0, 0).as_foreign())
    assert desk.decide().action is Action.TRAIN


def test_the_first_policy_is_measured_once_by_one_searcher(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10")
    desk.control.fleet = [member("a"), member("b")]
    desk.decide(0, 0)
    desk.decide(0, 0)
    assert desk.asked() == [("a", "0.0")]
    desk.evaluated("0.0", 0.25)
    desk.decide(0, 0)
    assert desk.chief.result(0).accuracy_before == 0.25
    assert desk.log.rows == [(0, {"eval/accuracy": 0.25, "eval/problems": 10})]


def test_a_restart_before_the_first_checkpoint_still_measures_before_and_after(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10", state=run_state(base_steps=(0, 0)))
    desk.control.fleet = [member(version=PolicyVersion(1, 0))]
    desk.decide(0)
    desk.evaluated("1.0", 0.25)
    desk.decide(0)
    result = desk.chief.result(0)
    assert (result.accuracy_before, result.accuracy_after) == (0.25, None)


def test_the_end_publishes_measures_once_and_stops(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10")
    plan = desk.decide(4)
    assert (plan.action, plan.publish, desk.control.granting) == (Action.WAIT, PUBLISH, False)
    desk.control.change("a", version=PolicyVersion(0, 4))
    assert desk.decide(4).action is Action.WAIT
    assert desk.decide(4).publish is None
    assert desk.asked() == [("a", "0.4")]
    desk.evaluated("0.4", 0.75)
    plan = desk.decide(4)
    assert (plan.action, plan.save) == (Action.STOP, True)
    result = desk.chief.result(4)
    assert result.complete and result.accuracy_after == 0.75


def test_a_version_that_was_measured_before_its_delivery_was_counted_is_counted(tmp_path):
    desk = Desk(tmp_path)
    desk.decide(4)
    desk.publishing.on_its_way = 1
    assert desk.chief.result(4).weight_versions == 3


def test_the_end_without_evaluation_is_at_once(tmp_path):
    plan = Desk(tmp_path).decide(4)
    assert (plan.action, plan.save) == (Action.STOP, True)


def test_another_searcher_measures_when_the_one_that_was_asked_is_lost(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10")
    final = PolicyVersion(0, 4)
    desk.control.fleet = [member("a", final), member("b", final)]
    desk.decide(4)
    desk.control.change("a", gone=State.LOST)
    desk.decide(4)
    assert desk.asked() == [("a", "0.4"), ("b", "0.4")]


def test_failures_of_another_do_not_end_a_run_that_is_being_measured(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10")
    final = PolicyVersion(0, 4)
    desk.control.fleet = [member("healthy", final), member("sick", PolicyVersion(0, 3))]
    desk.decide(4)
    desk.publishing.failed += 10
    assert desk.decide(4).action is Action.WAIT
    desk.control.change("healthy", gone=State.LOST)
    assert desk.decide(4).action is Action.STOP


def test_the_end_does_not_wait_for_searchers_that_never_come(clock, tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10", clock=clock)
    desk.control.fleet = []
    assert desk.decide(4).action is Action.WAIT
    clock.now_s += desk.config.transport.lease_s + 1
    assert desk.decide(4).action is Action.WAIT  # one may be starting
    clock.now_s += chief_module.STARTING_S
    assert desk.decide(4).action is Action.STOP
    assert desk.chief.result(4).accuracy_after is None


def test_a_run_of_no_steps_is_measured_and_stops(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10", "trainer.steps=0")
    assert desk.decide(0).action is Action.WAIT
    desk.evaluated("0.0", 0.5)
    assert desk.decide(0).action is Action.STOP


def test_the_end_gives_up_a_final_version_that_nobody_can_get(clock, tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10", clock=clock)
    for _ in range(100):
        desk.publishing.failed += 1
        clock.now_s += desk.config.weights.timeout_s
        if desk.decide(4).action is Action.STOP:
            return
    raise AssertionError("the run never ends")


def test_data_that_have_ended_end_the_run_once_no_step_can_be_filled(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10", "buffer.fresh_prompts_per_step=1")
    desk.control.ended = True
    assert desk.decide(1, ENOUGH - 1).action is Action.TRAIN  # what is left makes a step of repeated prompts
    plan = desk.decide(2, ENOUGH, fresh=0)
    assert (plan.action, plan.publish, desk.publishing.everybody) == (Action.WAIT, PUBLISH, True)
    desk.control.change("a", version=PolicyVersion(0, 2))
    desk.decide(2, ENOUGH, fresh=0)
    desk.evaluated("0.2", 0.5)
    plan = desk.decide(2, ENOUGH, fresh=0)
    assert (plan.action, plan.save, plan.complete) == (Action.STOP, True, True)
    result = desk.chief.result(2)
    assert (result.complete, result.data_ended, result.accuracy_after) == (True, True, 0.5)
    desk.chief.dismiss_searchers(2)
    assert desk.control.stopped == [True]


def test_in_lock_step_the_last_turn_may_bring_less_than_a_step_needs(tmp_path):
    desk = Desk(tmp_path, "weights.mode=sync", "buffer.max_reuse=1")
    desk.control.change("a", version=PolicyVersion(0, 1))
    desk.decide(1)
    assert desk.decide(1, arrived={0: ENOUGH - 1}).action is Action.WAIT
    desk.control.ended = True
    assert desk.decide(1, ENOUGH - 1).action is Action.TRAIN  # repeated prompts make it whole
    desk.decide(2, 0)
    assert desk.chief.result(2).data_ended


def test_what_an_earlier_attempt_wanted_to_know_is_no_accuracy_of_this_one(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10", state=run_state(2, (0, 2), accuracy_before=0.1))
    desk.evaluated("0.4", 0.9)
    desk.decide(4)
    assert desk.chief.result(4).accuracy_after is None


def test_a_question_that_was_lost_on_its_way_is_asked_again(tmp_path):
    desk = Desk(tmp_path, "evaluation.problems=10")
    desk.decide(0, 0)
    desk.control.change("a", evaluating=False, evaluations_lost=1)
    desk.decide(0, 0)
    assert desk.asked() == [("a", "0.0"), ("a", "0.0")]


def test_a_version_waits_for_no_silent_searcher(tmp_path):
    desk = Desk(tmp_path)
    assert desk.decide(1).publish is PUBLISH
    desk.control.silent = {"a"}
    assert desk.decide(1).publish is None


def test_a_run_without_searchers_is_saved_and_ends_with_a_code_of_its_own(tmp_path, capsys):
    desk = Desk(tmp_path, "search.absent_warning_s=10", "search.absent_limit_s=25")
    told = []
    for desk.control.absent in (5.0, 10.0, 15.0, 20.0, 24.0):
        assert desk.decide(1).action is Action.TRAIN
        told.append(capsys.readouterr().out.count("no searcher for"))
    assert told == [0, 1, 0, 1, 0]
    desk.control.absent = 25.0
    plan = desk.decide(2)
    assert (plan.action, plan.save, plan.exit_code, plan.complete) == (Action.STOP, True, 69, False)
    desk.chief.dismiss_searchers(2)
    assert desk.control.stopped == [False]  # whoever comes may wait for the next attempt


def test_a_searcher_that_joins_again_is_not_counted_as_lost(tmp_path):
    desk = Desk(tmp_path, state=run_state(1, (0, 1), generated={"a": 10, "old": 3}))
    desk.control.fleet = [member("a", generated=12)]
    desk.decide(1, counts=shard_counts({"a": 9}, trained=9))
    ledger = desk.chief.ledger()
    assert (ledger.generated, ledger.in_flight, ledger.lost, ledger.gap) == (15, 3, 3, 0)


# ---- the books


def test_the_books_close_when_all_are_gone_and_all_has_arrived(clock, tmp_path):
    desk = Desk(tmp_path, clock=clock)
    desk.control.change("a", generated=5)
    desk.decide(4)
    desk.chief.dismiss_searchers(4)
    assert desk.control.stopped == [True]
    four = [Note(counts=shard_counts({"a": 4}, held_untrained=4))]
    five = [Note(counts=shard_counts({"a": 5}, held_untrained=5))]
    assert not desk.chief.books_closed(four)
    desk.control.change("a", gone=State.LEFT)
    assert not desk.chief.books_closed(four)  # said goodbye, but one rollout is still in the network
    assert desk.chief.books_closed(five)


def test_the_books_close_late_when_a_searcher_does_not_leave(clock, tmp_path, caplog):
    desk = Desk(tmp_path, clock=clock)
    desk.chief.dismiss_searchers(4)
    assert not desk.chief.books_closed([Note()])
    clock.now_s += chief_module.GOODBYE_S + 1
    assert desk.chief.books_closed([Note()])
    assert "did not leave" in caplog.text


def test_the_ledger_adds_up_over_shards_restarts_and_the_lost(tmp_path):
    desk = Desk(tmp_path, state=run_state(1, (0, 1), generated={"old": 10}))
    desk.control.fleet = [member("a", generated=7), member("b", generated=6, gone=State.LOST)]
    shards = [
        shard_counts({"old": 9, "a": 3}, held_untrained=5, trained=6, duplicate=1),
        shard_counts({"a": 2, "b": 4}, held_untrained=3, evicted_untrained=2, invalid=1),
    ]
    report = ShardReport(n_prompts=9, n_recent=9, n_fresh=9, n_rollouts=8, bytes=0)
    desk.chief.decide([Note(report=report, counts=counts) for counts in shards], 1)
    ledger = desk.chief.ledger()
    assert (ledger.generated, ledger.in_flight, ledger.lost, ledger.gap) == (23, 2, 3, 0)
    result = desk.chief.result(1)
    states = ("in_flight", "held_untrained", "trained", "discarded", "lost")
    assert result.rollouts_generated == sum(getattr(result, f"rollouts_{state}") for state in states)


def test_a_step_is_reported_with_the_facts_of_all_shards(tmp_path):
    desk = Desk(tmp_path)
    desk.decide(0)
    names = ("reward", "loss", "kl", "log_z", "residual_square", "abs_advantage", "equal_rewards")
    lengths = ("completion_tokens", "max_completion_tokens")
    done = Update(skipped=True, grad_norm=float("inf"), learning_rate=0.1, statistics=dict.fromkeys(names + lengths, 1))
    facts = [
        draw_facts({0: 6, 2: 2}, tokens=30, first_time=5, completion_tokens=50),
        draw_facts({0: 4}, off_branch=4, truncated=4, tokens=10, first_time=3, completion_tokens=30),
    ]
    desk.chief.report(1, done, facts, 2.0)
    step, metrics = desk.log.rows[-1]
    assert step == 1 and metrics["optim/skipped_total"] == 1
    assert (metrics["age/p50"], metrics["age/p95"], metrics["age/max"]) == (0, 2, 2)
    assert list(desk.log.spread[1]["age/steps"].counts[:4]) == [10, 0, 2, 0]
    assert metrics["age/off_branch_frac"] == metrics["rollout/truncated_frac"] == 0.25
    assert (metrics["buffer/first_time_share"], metrics["rollout/len_trained"]) == (0.5, 5.0)
    assert metrics["throughput/train_tok_s"] == 20
    assert metrics["fleet/idle_frac"] == 0.25
    state = desk.chief.run_state(1)
    assert (state.step, state.skipped_steps, state.train_s, state.ages) == (1, 1, 2.0, {0: 10, 2: 2})
    assert (state.next_position, state.unfinished_prompts, state.versions) == (40, [(8, 4)], 2)


def test_the_first_time_share_is_that_of_the_whole_run_over_restarts(tmp_path):
    done = Update(skipped=False, grad_norm=1.0, learning_rate=0.1, statistics=Counter())
    desk = Desk(tmp_path)
    desk.decide(0)
    assert desk.chief.result(0).first_time_share == 0.0
    desk.chief.report(1, done, [draw_facts({0: 6}, off_branch=2, first_time=8)], 2.0)
    desk.chief.report(2, done, [draw_facts({0: 4, 1: 4}, first_time=1)], 2.0)
    assert [row["buffer/first_time_share"] for _, row in desk.log.rows] == [1.0, 0.125]
    assert desk.chief.result(2).first_time_share == 9 / 16
    kept = msgspec.json.decode(msgspec.json.encode(desk.chief.run_state(2)), type=RunState)
    resumed = Desk(tmp_path, state=kept)
    resumed.chief.report(3, done, [draw_facts({0: 4}, first_time=0)], 2.0)
    assert resumed.chief.result(3).first_time_share == 9 / 20


def test_the_state_of_a_run_that_did_not_count_first_times_can_be_read():
    state = run_state(3, ages={0: 8})
    older = {k: v for k, v in msgspec.to_builtins(state, str_keys=True).items() if not k.startswith("drawn")}
    assert msgspec.json.decode(msgspec.json.encode(older), type=RunState) == state


def test_lengths_of_what_came_in_are_those_since_the_last_step(tmp_path):
    done = Update(skipped=False, grad_norm=1.0, learning_rate=0.1, statistics=Counter())
    desk = Desk(tmp_path)
    for rollouts, tokens in ((3, 10), (1, 30), (0, 0)):
        counts = SourceCounts(rollouts=rollouts, completion_tokens=tokens)
        desk.chief.decide([Note(received_by_source={"searcher": counts})], 0)
    desk.chief.report(1, done, [], 2.0)
    desk.chief.report(2, done, [], 2.0)
    assert desk.log.rows[0][1]["rollout/len_received"] == 10.0
    assert "rollout/len_received" not in desk.log.rows[1][1]


def draw_facts(ages, *, off_branch=0, truncated=0, tokens=0, first_time=0, completion_tokens=0) -> DrawFacts:
    return DrawFacts(
        ages=Counter(ages),
        off_branch=off_branch,
        first_time=first_time,
        completion_tokens=completion_tokens,
        truncated=truncated,
        empty=0,
        with_replacement=0,
        equal_reward=0,
        short_recent=0,
        repeated_prompts=0,
        tokens=tokens,
    )


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ({}, 0.5, 0),
        ({3: 1}, 0.5, 3),
        ({0: 5, 1: 5}, 0.5, 0),
        ({0: 4, 1: 6}, 0.5, 1),
        ({2: 1, 0: 1, 7: 1}, 1.0, 7),
        ({0: 95, 9: 5}, 0.95, 0),
    ],
)
def test_quantile_is_the_smallest_value_with_that_share_at_or_below(counts, q, expected):
    assert quantile(counts, q) == expected


def test_in_lock_step_visits_that_bring_too_little_are_followed_by_more(tmp_path):
    desk = Desk(tmp_path, "weights.mode=sync")
    desk.control.change("a", version=PolicyVersion(0, 1))
    assert desk.decide(1).action is Action.WAIT
    assert desk.decide(1, prompts=ENOUGH - 1, arrived={0: ENOUGH}).action is Action.WAIT
    assert desk.control.allowed == [0, ENOUGH, ENOUGH]
    assert desk.decide(1, arrived={1: ENOUGH}).action is Action.TRAIN


def test_a_final_version_that_is_not_fit_to_be_sent_does_not_hold_up_the_end(tmp_path, clock):
    desk = Desk(tmp_path, "evaluation.problems=4")
    desk.publishing.refused = PolicyVersion(0, 4)
    assert desk.decide(4).action is Action.STOP


def test_a_final_version_that_no_searcher_can_take_in_does_not_hold_up_the_end(tmp_path, clock):
    desk = Desk(tmp_path, "evaluation.problems=4")
    failures = iter(range(100))
    desk.control.receive_failures = lambda: next(failures)
    assert Action.STOP in [desk.decide(4).action for _ in range(5)]
