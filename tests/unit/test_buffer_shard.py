"""The laws of a replay shard, each by a small case; tests/unit/test_shard_twin.py holds all of them together."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from list_shard import plain_rollout
from rollout_factory import NEW_RUN, RolloutFactory, as_batch, as_group, prompt_tokens

from tba_megatron.buffer.rows import precedences, turns, version_code, version_of
from tba_megatron.buffer.shard import ReplayShard
from tba_megatron.buffer.shard_state import SavedShard, restore, to_columns
from tba_megatron.types import (
    FOREIGN_ATTEMPT,
    PolicyHistory,
    PolicySpan,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    StopReason,
)


def add(shard: ReplayShard, *groups: RolloutGroup, segment: int = -1) -> None:
    shard.add(as_batch(*groups), segment=segment)


def prompt_ids(shard: ReplayShard) -> list[str]:
    return sorted(shard.prompts)


def rows_of(shard: ReplayShard, *ids: str) -> np.ndarray:
    return shard.rows_of(np.array([shard.prompts.number(prompt_id) for prompt_id in ids]))[0]


def row_with(shard: ReplayShard, prompt_id: str, *tokens: int) -> np.ndarray:
    rows, rollouts = rows_of(shard, prompt_id), held(shard, prompt_id)
    return rows[[rollout.token_ids.tolist() == list(tokens) for rollout in rollouts]]


def held(shard: ReplayShard, prompt_id: str) -> tuple[Rollout, ...]:
    """The rollouts of a prompt in order of arrival."""
    number, rows = np.array([shard.prompts.number(prompt_id)]), rows_of(shard, prompt_id)
    return shard.batch(number, np.array([len(rows)]), rows, np.ones(len(rows), np.int32)).groups()[0].rollouts


def held_tokens(shard: ReplayShard, prompt_id: str) -> list[int]:
    return [int(rollout.token_ids[0]) for rollout in held(shard, prompt_id)]


def copies(shard: ReplayShard, prompt_id: str) -> list[int]:
    return shard.rows.copies[rows_of(shard, prompt_id)].tolist()


def ledger_of(shard: ReplayShard) -> tuple[int, int, int, int, int]:
    c = shard.counts()
    assert sum(c.received.values()) == (c.held_untrained + c.trained + c.duplicate + c.evicted_untrained + c.invalid)
    return c.held_untrained, c.trained, c.duplicate, c.evicted_untrained, c.invalid


# Validity


def span(start: int, end: int, step: int = 0, attempt: int = 0) -> PolicySpan:
    return PolicySpan(version=PolicyVersion(attempt, step), start=start, end=end)


@pytest.mark.parametrize(
    ("reason", "overrides"),
    [
        ("reward_not_finite", {"reward": math.nan}),
        ("reward_not_finite", {"reward": math.inf}),
        ("behaviour_logprobs_length", {"behaviour_logprobs": np.zeros(2, np.float32)}),
        ("behaviour_logprobs_not_finite", {"behaviour_logprobs": np.array([0, -np.inf, 0], np.float32)}),
        ("reference_logprob_not_finite", {"reference_logprob": math.nan, "reference_version": 0}),
        ("reference_logprob_not_finite", {"reference_logprob": math.inf}),
        ("reference_version_missing", {"reference_logprob": -1.0}),
        ("spans", {"spans": ()}),
        ("spans", {"spans": (span(0, 2),)}),
        ("spans", {"spans": (span(0, 4),)}),
        ("spans", {"spans": (span(0, 1), span(2, 3))}),
        ("spans", {"spans": (span(0, 2), span(1, 3))}),
        ("spans", {"spans": (span(2, 3), span(0, 2))}),
        ("spans", {"spans": (span(0, 3), span(3, 3, step=9))}),
        ("spans", {"spans": (span(0, 3, step=-1),)}),
        ("spans", {"spans": (span(0, 3, attempt=-1),)}),
        ("token_negative", {"token_ids": np.int32([1, -1, 2])}),
        ("aborted", {"stop_reason": StopReason.ABORT}),
    ],
)
def test_an_invalid_rollout_is_counted_and_the_others_of_its_group_stay(reason, overrides):
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, as_group("p", [make.rollout([1, 2, 3], **overrides), make.rollout([4], reward=1.0)]))
    assert held_tokens(shard, "p") == [4]
    assert ledger_of(shard) == (1, 0, 0, 0, 1)
    assert shard.counts().invalid_reasons == {reason: 1}


def test_a_completion_written_by_two_policies_and_an_empty_one_are_valid():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    spans = (span(0, 1), span(1, 2, step=3))
    add(shard, as_group("p", [make.rollout([1, 2], spans=spans), make.rollout([])]))
    assert [rollout.version.step for rollout in held(shard, "p")] == [3, 0]
    assert held(shard, "p")[0].spans == spans
    assert ledger_of(shard) == (2, 0, 0, 0, 0)


def test_a_token_that_the_model_has_no_row_for_is_invalid():
    make, shard = RolloutFactory(), ReplayShard(10, 10, vocab_size=7)
    add(shard, make.group("p", [6, [6, 7, 1], [1, 2_000_000_000], [], [0]]))
    assert shard.counts().invalid_reasons == {"token_unknown": 2}
    assert len(shard) == 3


def test_a_rollout_without_the_references_logprob_is_invalid_only_where_no_trainer_computes_it():
    for needed, invalid in ((False, {}), (True, {"reference_logprob_missing": 1})):
        make, shard = RolloutFactory(), ReplayShard(10, 10, needs_reference=needed)
        sent = [make.rollout([1], reference=-2.5), make.rollout([2]), make.rollout([], reference=0.0)]
        nan = make.rollout([3], reference_logprob=math.nan, reference_version=0)
        add(shard, as_group("p", [*sent, nan]))
        assert shard.counts().invalid_reasons == invalid | {"reference_logprob_not_finite": 1}
        known = {tuple(r.token_ids.tolist()): r.reference_logprob for r in held(shard, "p")}
        assert known == {(1,): -2.5, (): 0.0} | ({} if needed else {(2,): None})


def test_truncated_completions_are_invalid_only_where_the_objective_drops_them():
    for drop, invalid in ((False, 0), (True, 1)):
        make, shard = RolloutFactory(), ReplayShard(10, 10, drop_truncated=drop)
        add(shard, as_group("p", [make.rollout(1, stop_reason=StopReason.LENGTH)]))
        assert shard.counts().invalid == invalid


def test_a_group_without_a_valid_rollout_holds_no_prompt():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    wrong = replace(make.group("p", [1, 2], reward=math.nan), prompt_token_ids=np.array([5, 6], np.int32))
    add(shard, wrong)
    assert prompt_ids(shard) == []
    assert (shard.bytes, len(shard)) == (0, 0)
    add(shard, wrong, make.group("p", [3]))
    assert held_tokens(shard, "p") == [3]


def test_another_prompt_under_a_known_prompt_id_is_refused():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1]))
    add(shard, replace(make.group("p", [2], reward=math.nan), prompt_token_ids=np.array([5, 6], np.int32)))
    add(shard, replace(make.group("q", [2]), prompt_token_ids=np.array([], np.int32)))
    assert shard.counts().invalid_reasons == {"prompt_differs": 1, "prompt_empty": 1}


def test_the_first_of_two_prompts_under_one_new_prompt_id_counts():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    other = replace(make.group("p", [2]), prompt_token_ids=np.array([5, 6], np.int32))
    add(shard, make.group("p", [1]), other, make.group("p", [3]))
    assert held_tokens(shard, "p") == [1, 3]
    assert shard.counts().invalid_reasons == {"prompt_differs": 1}


def test_a_prompt_whose_last_rollout_left_may_come_back_with_other_tokens():
    make, shard = RolloutFactory(), ReplayShard(1, 10)
    add(shard, make.group("p", [1]))
    shard.mark_trained(rows_of(shard, "p"))
    add(shard, make.group("q", [2], step=1))
    add(shard, replace(make.group("p", [3], step=2), prompt_token_ids=np.array([5, 6], np.int32)))
    assert prompt_ids(shard) == ["p"]
    assert shard.prompts.trained_visit[shard.prompts.number("p")] == -1
    assert ledger_of(shard) == (1, 1, 0, 1, 0)


def test_a_batch_without_groups_and_a_group_without_rollouts_change_nothing():
    shard = ReplayShard(10, 10)
    add(shard)
    add(shard, as_group("p", []))
    assert (len(shard), shard.bytes, prompt_ids(shard)) == (0, 0, [])
    assert ledger_of(shard) == (0, 0, 0, 0, 0)


# De-duplication


def test_equal_completions_of_one_version_are_copies_of_one_rollout():
    shard = ReplayShard(10, 10)
    add(shard, RolloutFactory().group("p", [1, 1, 2, 1]))
    assert (held_tokens(shard, "p"), copies(shard, "p")) == ([1, 2], [3, 1])
    assert ledger_of(shard) == (2, 0, 2, 0, 0)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_newer_copy_replaces_the_older_and_counts_from_one(at_once):
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    newer = make.rollout(1, step=2)
    groups = [make.group("p", [1, 1], step=1), as_group("p", [newer])]
    for some in [groups] if at_once else [groups[:1], groups[1:]]:
        add(shard, *some)
    (got,) = held(shard, "p")
    assert (got.rollout_id, got.version.step, copies(shard, "p")) == (newer.rollout_id, 2, [1])
    assert (len(shard), shard.bytes, len(shard.fresh_prompts())) == (1, 8, 1)
    assert ledger_of(shard) == (1, 0, 2, 0, 0)


def test_an_older_copy_that_arrives_late_changes_nothing():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    first = make.rollout(1, step=5)
    add(shard, as_group("p", [first]))
    add(shard, make.group("p", [1], step=4, reference=-1.0))
    (got,) = held(shard, "p")
    assert (got.rollout_id, got.reference_logprob, copies(shard, "p")) == (first.rollout_id, None, [1])
    assert ledger_of(shard) == (1, 0, 1, 0, 0)


def test_the_same_tokens_under_another_prompt_are_another_completion():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1]), make.group("q", [1]))
    assert ledger_of(shard) == (2, 0, 0, 0, 0)


def test_a_trained_rollout_stays_trained_when_a_newer_copy_replaces_it():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1], step=1))
    shard.mark_trained(rows_of(shard, "p"))
    add(shard, make.group("p", [1], step=2))
    assert shard.rows.uses[rows_of(shard, "p")].tolist() == [0]
    assert ledger_of(shard) == (1, 1, 0, 0, 0)


def test_a_newer_copy_inherits_the_reference_logprob_that_it_does_not_bring():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1], step=1, reference=-2.5))
    add(shard, make.group("p", [1], step=2), make.group("p", [1], step=3))
    (got,) = held(shard, "p")
    assert (got.version.step, got.reference_logprob, got.reference_version) == (3, -2.5, 0)
    add(shard, make.group("p", [1], step=4, reference=-7.0))
    assert held(shard, "p")[0].reference_logprob == -7.0


def test_a_batch_that_is_given_twice_is_received_twice():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    for _ in range(2):
        add(shard, make.group("p", [1, 2]))
    assert copies(shard, "p") == [2, 2]
    assert ledger_of(shard) == (2, 0, 2, 0, 0)


# Arrivals and visits


def test_every_rollout_that_is_received_is_counted_and_a_visit_is_its_groups_first():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1], reward=math.nan), as_group("q", []), make.group("p", [2, 2, 3]))
    add(shard, make.group("p", [4, 5]))
    rows = rows_of(shard, "p")
    assert shard.rows.arrival[rows].tolist() == [1, 3, 4, 5]
    assert shard.rows.visit[rows].tolist() == [1, 1, 4, 4]


# Eviction and the ledger


def test_the_oldest_version_then_the_oldest_arrival_leaves_a_full_pool():
    make, shard = RolloutFactory(), ReplayShard(100, 3)
    add(shard, make.group("p", [1], step=2))
    add(shard, make.group("p", [2, 3], step=1))
    add(shard, make.group("p", [4], step=2))
    assert held_tokens(shard, "p") == [1, 3, 4]
    add(shard, make.group("p", [5], step=0))
    assert held_tokens(shard, "p") == [1, 3, 4]
    assert ledger_of(shard) == (3, 0, 0, 2, 0)


def test_a_whole_batch_is_told_apart_before_anything_leaves():
    make, shard = RolloutFactory(), ReplayShard(100, 2)
    add(shard, make.group("p", [1, 2], step=1))
    # Group by group, the oldest would leave before its copy is seen.
    add(shard, make.group("p", [3], step=1), make.group("p", [1], step=1))
    assert (held_tokens(shard, "p"), copies(shard, "p")) == ([2, 3], [1, 1])
    assert ledger_of(shard) == (2, 0, 1, 1, 0)


def test_the_oldest_of_all_prompts_leave_a_full_shard_and_an_empty_pool_goes():
    make, shard = RolloutFactory(), ReplayShard(3, 10)
    add(shard, make.group("old", [1, 2], step=1))
    add(shard, make.group("mid", [3], step=2), make.group("new", [4, 5], step=3))
    assert prompt_ids(shard) == ["mid", "new"]
    assert len(shard) == 3
    assert ledger_of(shard) == (3, 0, 0, 2, 0)


def test_what_another_policy_wrote_leaves_in_turn_with_what_is_of_its_time():
    for shard, ids in ((ReplayShard(3, 10), "pqrs"), (ReplayShard(10, 3), "pppp")):
        make = RolloutFactory()
        versions = [(FOREIGN_ATTEMPT, 2), (0, 1), (0, 2), (0, 3)]
        groups = [
            make.group(prompt_id, [token], attempt=attempt, step=step)
            for token, (prompt_id, (attempt, step)) in enumerate(zip(ids, versions, strict=True))
        ]
        add(shard, *groups)
        contents = [sorted(int(t) for p in set(ids) for t in held_tokens(shard, p))]
        for step in (3, 3, 4):
            add(shard, make.group(ids[-1], [10 + len(contents)], step=step))
            contents.append(sorted(int(t) for p in set(ids) if p in shard.prompts for t in held_tokens(shard, p)))
        assert contents == [[0, 2, 3], [0, 3, 11], [3, 11, 12], [11, 12, 13]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)])
def test_of_equal_completions_the_trainers_own_is_held_whenever_it_was_written(order):
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    versions = [PolicyVersion(0, 3), PolicyVersion(0, 2), PolicyVersion(0, 9).as_foreign(), PolicyVersion(0, 4)]
    for i in order:
        add(shard, make.group("p", [1], attempt=versions[i].attempt, step=versions[i].step))
        if versions[i].is_foreign:
            add(shard, make.group("p", [1], attempt=FOREIGN_ATTEMPT, step=8))
    (got,) = held(shard, "p")
    assert got.version == PolicyVersion(0, 4)
    assert ledger_of(shard) == (1, 0, 4, 0, 0)


def test_an_old_version_that_arrives_last_leaves_a_full_shard_first():
    make, shard = RolloutFactory(), ReplayShard(2, 10)
    for prompt_id, token, step in (("p", 1, 5), ("q", 2, 4), ("r", 3, 3)):
        add(shard, make.group(prompt_id, [token], step=step))
    assert prompt_ids(shard) == ["p", "q"]
    add(shard, make.group("r", [4], step=6, attempt=1))
    assert prompt_ids(shard) == ["p", "r"]


def test_the_oldest_leave_a_shard_that_holds_too_many_bytes_and_no_more_than_must():
    make, logprobs = RolloutFactory(), np.zeros(3, np.float32)
    old, mid = (make.rollout([i, 1, 1], behaviour_logprobs=logprobs) for i in range(2))
    # The old one frees its prompt of ten tokens too: 64 bytes of 96.
    for limit, left in ((96, 3), (95, 2), (32, 2), (31, 1), (8, 1), (7, 0), (0, 0)):
        shard = ReplayShard(10, 10, capacity_bytes=limit)
        add(shard, as_group("ten tokens", [old]), as_group("q", [mid, make.rollout(5, step=1)]))
        assert (len(shard), shard.bytes <= limit) == (left, True), limit
        assert ledger_of(shard) == (left, 0, 0, 3 - left, 0)


def test_training_again_and_eviction_leave_a_rollout_trained():
    make, shard = RolloutFactory(), ReplayShard(1, 10)
    add(shard, make.group("p", [1]))
    for _ in range(2):
        shard.mark_trained(rows_of(shard, "p"))
    assert shard.rows.uses[rows_of(shard, "p")].tolist() == [2]
    add(shard, make.group("q", [2], step=1))
    assert ledger_of(shard) == (1, 1, 0, 0, 0)


def test_a_row_that_was_drawn_for_two_groups_of_a_step_is_used_once():
    shard = ReplayShard(10, 10)
    add(shard, RolloutFactory().group("p", [1, 2]))
    first, second = rows_of(shard, "p").tolist()
    shard.mark_trained(np.array([second, first, second]))
    assert shard.rows.uses[[first, second]].tolist() == [1, 1]
    assert ledger_of(shard) == (0, 2, 0, 0, 0)


def test_references_are_stored_with_the_rows():
    shard = ReplayShard(10, 10)
    add(shard, RolloutFactory().group("p", [1, 2, 3]))
    rows = rows_of(shard, "p")
    shard.set_reference(rows[[2, 0]], np.array([-3.0, -4.0]), 7)
    got = [(rollout.reference_logprob, rollout.reference_version) for rollout in held(shard, "p")]
    assert got == [(-4.0, 7), (None, None), (-3.0, 7)]


def test_segments_of_the_log_are_named_while_a_rollout_of_them_is_held():
    make, shard = RolloutFactory(), ReplayShard(2, 10)
    add(shard, make.group("p", [1, 2]), segment=3)
    add(shard, make.group("p", [1]), segment=4)
    assert shard.segments() == {3}
    add(shard, make.group("p", [1], step=1), segment=5)
    assert shard.segments() == {3, 5}
    add(shard, make.group("q", [7], step=1), segment=6)
    assert shard.segments() == {5, 6}


# Recency and what is fresh


VERSIONS = st.builds(PolicyVersion, st.integers(0, 3), st.integers(0, 8))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=3), VERSIONS, st.integers(0, 8))
def test_an_age_is_never_negative_and_a_foreign_version_has_none(bases, version, step):
    history = PolicyHistory(base_steps=(0, *bases))
    age = history.age_steps(version, step)
    assert age == (step - version.step if history.holds(version) and version.step <= step else None)
    foreign = version.as_foreign()
    assert history.age_steps(foreign, step) is None and not history.holds(foreign)
    assert (foreign.is_foreign, foreign.era, foreign.as_foreign()) == (True, version, foreign)
    assert PolicyVersion.parse(str(foreign)) == foreign == version_of(version_code(foreign))


@given(st.lists(st.tuples(VERSIONS, st.booleans()), max_size=8, unique=True))
def test_turns_go_by_era_and_precedences_by_whose_policy_it_is(some):
    versions = [version.as_foreign() if foreign else version for version, foreign in some]
    codes = np.array([version_code(version) for version in versions], np.int64)
    by_turn = [versions[i] for i in np.argsort(turns(codes)).tolist()]
    assert by_turn == sorted(versions, key=lambda version: (version.era, version.is_foreign))
    by_precedence = [versions[i] for i in np.argsort(precedences(codes)).tolist()]
    assert by_precedence == sorted(versions, key=lambda version: (not version.is_foreign, version))
    assert turns(codes).tolist() == [turns(code) for code in codes.tolist()]


def test_a_version_of_a_step_that_is_still_to_come_is_held_and_never_recent():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1], step=5), make.group("q", [2], step=4))
    assert shard.recent_rows(NEW_RUN, 4, 100).tolist() == row_with(shard, "q", 2).tolist()
    assert (shard.report(NEW_RUN, 4, 100).n_recent, shard.report(NEW_RUN, 4, 100).n_fresh) == (1, 1)
    assert shard.report(NEW_RUN, 5, 0).n_recent == 1


def test_what_another_policy_wrote_is_never_recent_and_fresh_for_as_long_as_if_it_were():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1], attempt=FOREIGN_ATTEMPT, step=4), make.group("q", [2], step=4))
    for step, n_recent, n_fresh in ((4, 1, 2), (6, 1, 2), (7, 0, 0), (3, 0, 0)):
        report = shard.report(NEW_RUN, step, 2)
        assert (report.n_recent, report.n_fresh) == (n_recent, n_fresh), step
        assert int(row_with(shard, "p", 1)[0]) not in shard.recent_rows(NEW_RUN, step, 2).tolist()
    resumed = PolicyHistory(base_steps=(0, 3))  # its era is on a branch that was abandoned
    assert shard.report(resumed, 5, 2).n_fresh == 0
    shard.mark_trained(row_with(shard, "p", 1))
    assert shard.report(NEW_RUN, 4, 2).n_fresh == 1


def test_versions_of_an_abandoned_branch_are_held_and_never_recent():
    make, shard = RolloutFactory(), ReplayShard(10, 10)
    add(shard, make.group("p", [1], attempt=0, step=12), make.group("q", [2], attempt=0, step=10))
    add(shard, make.group("q", [3], attempt=0, step=12), make.group("r", [4], attempt=1, step=11))
    resumed = PolicyHistory(base_steps=(0, 10))
    assert shard.recent_rows(resumed, 11, 2).tolist() == [*row_with(shard, "q", 2), *row_with(shard, "r", 4)]
    report = shard.report(resumed, 11, 2)
    assert (report.n_prompts, report.n_recent) == (3, 2)


def test_a_prompt_is_fresh_until_its_newest_visit_was_trained_on():
    make, shard = RolloutFactory(), ReplayShard(100, 100)
    number = lambda: [shard.prompts.number("p")]  # noqa: E731

    def fresh() -> bool:
        reports = shard.report(NEW_RUN, 0, 2), shard.report_fresh()
        assert reports[0].n_fresh == reports[1].n_fresh == reports[1].n_recent == len(shard.fresh_prompts())
        return shard.fresh_prompts().tolist() == number()

    add(shard, make.group("p", [1, 2]))
    assert fresh()
    shard.mark_trained(row_with(shard, "p", 1))  # a part of a visit counts: not every rollout is drawn
    assert not fresh()
    add(shard, make.group("p", [3, 4]))
    assert fresh()
    shard.mark_trained(row_with(shard, "p", 2))
    assert fresh()
    shard.mark_trained(row_with(shard, "p", 3))
    assert not fresh()


# Batches that are drawn


def test_a_batch_is_the_groups_that_were_asked_for_in_memory_of_its_own():
    make, shard = RolloutFactory("søker\0"), ReplayShard(10, 10)
    full = make.rollout([5, 6], reward=1 / 3, behaviour_logprobs=np.array([-0.1, -0.2], np.float32), reference=-1.0)
    add(shard, make.group("p", [1, 2, []]), as_group("prøve\0", [full]))
    p, q = (shard.prompts.number(prompt_id) for prompt_id in ("p", "prøve\0"))
    rows = np.concatenate(
        [row_with(shard, "p"), rows_of(shard, "prøve\0"), row_with(shard, "p", 2), row_with(shard, "p", 1)]
    )
    batch = shard.batch(np.array([p, q, p, p]), np.array([1, 1, 0, 2]), rows, np.array([4, 1, 2, 3]))
    groups = batch.train_groups()
    assert [group.prompt_id for group in groups] == ["p", "prøve\0", "p", "p"]
    assert [[r.token_ids.tolist() for r in group.rollouts] for group in groups] == [[[]], [[5, 6]], [], [[2], [1]]]
    assert [group.copies for group in groups] == [(4,), (1,), (), (2, 3)]
    assert plain_rollout(groups[1].rollouts[0]) == plain_rollout(full)
    batch.token_ids_T[:], batch.prompt_tokens[:], batch.behaviour_B[:], batch.spans_P[:] = 0, 0, 0, 0
    assert held_tokens(shard, "prøve\0") == [5]
    again = shard.batch(np.array([q]), np.array([1]), rows_of(shard, "prøve\0"), np.array([1])).groups()[0]
    assert again.prompt_token_ids.tolist() == prompt_tokens("prøve\0").tolist()
    assert plain_rollout(again.rollouts[0]) == plain_rollout(full)


# At rest; lives of shards that are saved and dealt are in test_shard_twin.py


def saved(shard: ReplayShard) -> SavedShard:
    return SavedShard(columns=to_columns(shard, with_payload=True))


def test_the_oldest_of_all_parts_leave_a_shard_that_is_too_small_for_them():
    make, parts, small = RolloutFactory(), [ReplayShard(10, 10) for _ in range(2)], ReplayShard(2, 10)
    add(parts[0], make.group("a", [1, 2], step=1))
    add(parts[1], make.group("b", [3], step=0), make.group("b", [4], step=2))
    assert restore(small, [saved(part) for part in parts]) == 0
    assert (held_tokens(small, "a"), held_tokens(small, "b")) == ([2], [4])
    assert ledger_of(small) == (2, 0, 0, 2, 0)


def test_another_format_is_refused():
    columns, shard = to_columns(ReplayShard(10, 10), with_payload=True), ReplayShard(10, 10)
    with pytest.raises(ValueError, match="format is 99"):
        restore(shard, [SavedShard(columns=columns | {"format": np.array([99, 0])})])
