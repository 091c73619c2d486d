"""Which replica trains which group."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.trainer.exchange import assign_replicas

TOKENS = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.just(n), st.integers(0, 6).flatmap(lambda g: st.lists(st.integers(0, 500), min_size=g * n, max_size=g * n))
    )
)


@settings(max_examples=200)
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
