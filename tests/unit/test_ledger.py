import json

import pytest

from tba_megatron.buffer.ledger import RolloutState, ShardLedger, combine

HELD, TRAINED, DUPLICATE = RolloutState.HELD_UNTRAINED, RolloutState.TRAINED, RolloutState.DUPLICATE
EVICTED, INVALID = RolloutState.EVICTED_UNTRAINED, RolloutState.INVALID


def shard(searcher: str, n: int):
    ledger = ShardLedger()
    ledger.receive({searcher: n}, {HELD: n})
    return ledger


def test_the_states_of_a_shard_sum_to_what_it_received():
    ledger = shard("a", 3)
    ledger.receive({"b": 2}, {DUPLICATE: 1, INVALID: 1}, {"spans": 1})
    ledger.move(HELD, TRAINED)
    ledger.move(HELD, EVICTED)
    counts = ledger.counts()
    assert counts.received == {"a": 3, "b": 2}
    assert (counts.held_untrained, counts.trained, counts.evicted_untrained) == (1, 1, 1)
    assert (counts.duplicate, counts.invalid, counts.invalid_reasons) == (1, 1, {"spans": 1})


@pytest.mark.parametrize("new", [HELD, DUPLICATE, EVICTED, INVALID])
def test_nothing_leaves_trained(new):
    ledger = shard("a", 1)
    ledger.move(HELD, TRAINED)
    with pytest.raises(ValueError, match="cannot go from trained"):
        ledger.move(TRAINED, new)


def test_no_state_becomes_negative():
    with pytest.raises(ValueError, match="0 rollouts are held_untrained, so 1 cannot become trained"):
        ShardLedger().move(HELD, TRAINED)


def test_every_arrival_has_a_state():
    with pytest.raises(ValueError, match="3 rollouts arrived and 2 have a state"):
        ShardLedger().receive({"a": 3}, {HELD: 2})


def test_what_was_generated_and_not_received_is_in_flight_or_lost_with_its_sender():
    shards = [shard("a", 3).counts(), shard("b", 2).counts(), shard("a", 1).counts()]
    counts = combine({"a": 10, "b": 5, "c": 4}, {"b"}, shards)
    assert (counts.generated, counts.in_flight, counts.lost) == (19, 6 + 4, 3)
    assert counts.held_untrained == 6
    assert counts.gap == 0


def test_a_rollout_of_a_lost_searcher_that_arrives_late_leaves_lost():
    ledger = shard("a", 2)
    before = combine({"a": 5}, {"a"}, [ledger.counts()])
    ledger.receive({"a": 1}, {HELD: 1})
    after = combine({"a": 5}, {"a"}, [ledger.counts()])
    assert (before.lost, after.lost, after.held_untrained) == (3, 2, 3)
    assert before.gap == after.gap == 0


def test_more_received_than_reported_counts_as_generated():
    counts = combine({"a": 1}, {"z"}, [shard("a", 4).counts(), shard("unknown", 2).counts()])
    assert (counts.generated, counts.in_flight, counts.lost, counts.gap) == (6, 0, 0, 0)


def test_an_empty_run_adds_up():
    assert combine({}, set(), []).gap == 0


def test_a_restored_ledger_has_the_counters_of_the_saved_one():
    ledger = shard("a", 3)
    ledger.receive({"b": 1}, {INVALID: 1}, {"aborted": 1})
    ledger.move(HELD, TRAINED)
    restored = ShardLedger.from_state(json.loads(json.dumps(ledger.state())))
    assert restored.counts() == ledger.counts()
    restored.receive({"a": 1}, {HELD: 1})
    assert restored.counts().received["a"] == ledger.counts().received["a"] + 1
