"""Which replica trains which group, and how a group travels there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import ranks  # noqa: F401  (changes Megatron before it is imported)
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.trainer.exchange import assign_replicas, decode_groups, encode_groups
from tba_megatron.types import PolicySpan, PolicyVersion, StopReason, TrainGroup

TOKENS = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.just(n), st.integers(0, 6).flatmap(lambda g: st.lists(st.integers(0, 500), min_size=g * n, max_size=g * n))
    )
)


@settings(max_examples=200, deadline=None)
@given(TOKENS)
def test_every_replica_gets_equally_many_groups_and_balanced_tokens(case):
    n, tokens_G = case
    replica_G = assign_replicas(tokens_G, n)
    assert replica_G == assign_replicas(list(tokens_G), n)
    assert [replica_G.count(r) for r in range(n)] == [len(tokens_G) // n] * n
    if tokens_G:
        loads = [sum(t for t, r in zip(tokens_G, replica_G, strict=True) if r == replica) for replica in range(n)]
        # Longest first: when a replica got its last group it was the lightest with room, or the others were full.
        assert max(loads) <= sum(tokens_G) / n + len(tokens_G) // n * max(tokens_G)


def test_equal_numbers_go_before_balance():
    assert sorted(assign_replicas([100, 1, 1, 1], 2)) == [0, 0, 1, 1]
    assert assign_replicas([5, 9, 1, 5], 2) == [1, 0, 0, 1]


def same(a: TrainGroup, b: TrainGroup) -> bool:
    def plain(group):
        rollouts = [
            {
                field.name: value.tolist() if isinstance(value := getattr(r, field.name), np.ndarray) else value
                for field in dataclasses.fields(r)
            }
            for r in group.rollouts
        ]
        return group.prompt_id, group.prompt_token_ids.tolist(), group.copies, rollouts

    return plain(a) == plain(b)


def test_groups_travel_whole():
    (group,) = tiny.train_groups(1)
    spans = (
        PolicySpan(version=PolicyVersion(0, 3), start=0, end=2),
        PolicySpan(version=PolicyVersion(1, 4), start=2, end=5),
    )
    rich = dataclasses.replace(
        group.rollouts[0],
        token_ids=np.arange(5, dtype=np.int32),
        reward=0.1 + 0.2,
        stop_reason=StopReason.LENGTH,
        spans=spans,
        behaviour_logprobs=np.linspace(-3, 0, 5, dtype=np.float32),
        reference_logprob=-1.0 / 3.0,
        reference_version=7,
    )
    empty = dataclasses.replace(group.rollouts[1], token_ids=np.zeros(0, np.int32))
    sent = [dataclasses.replace(group, rollouts=(rich, empty, group.rollouts[2])), *tiny.train_groups(3, seed=5)]
    found = decode_groups(encode_groups(sent))
    assert len(found) == len(sent)
    assert all(same(a, b) for a, b in zip(sent, found, strict=True))
    assert found[0].rollouts[0].token_ids.dtype == np.int32
    assert found[0].rollouts[0].behaviour_logprobs.dtype == np.float32
    assert found[0].rollouts[0].reward == 0.1 + 0.2


def test_nothing_travels_as_nothing():
    assert decode_groups(encode_groups([])) == []


def test_damaged_bytes_are_no_groups():
    import msgspec

    with pytest.raises(msgspec.DecodeError):
        decode_groups(encode_groups(tiny.train_groups(2))[:-3])
