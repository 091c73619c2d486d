"""Groups and packs reach the ranks that need them, and nothing is lost or made twice on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tiny
from ranks import run_ranks

from tba_megatron.packing import encode, pack
from tba_megatron.rollout_batch import RolloutBatch
from tba_megatron.rollout_batch import encode as encode_batch
from tba_megatron.trainer.exchange import (
    assign_replicas,
    exchange_groups,
    from_rank_0,
    gather_on_all,
    return_to_owners,
    share_packs,
)
from tba_megatron.types import RolloutId

GROUPS = tiny.train_groups(6, seed=3)


def as_bytes(group):
    return encode_batch(RolloutBatch.of_train_groups([group]))


def exchanged(groups, drawn):
    """What each leader drew, and what it got to train; None on ranks that are no leaders."""
    if not groups.is_leader:
        return None
    return [as_bytes(g) for g in exchange_groups(RolloutBatch.of_train_groups(drawn[groups.dp_rank]), groups)]


@pytest.mark.parametrize("split", [3, 6, 0, 1], ids="shard 0 draws {}".format)
def test_the_exchange_keeps_every_group_and_balances(split):
    ranks = run_ranks(exchanged, [GROUPS[:split], GROUPS[split:]], dp=2)
    assert [len(groups) for groups in ranks] == [3, 3]
    assert Counter(data for groups in ranks for data in groups) == Counter(as_bytes(g) for g in GROUPS)
    replica_G = assign_replicas([g.n_tokens for g in GROUPS], 2)
    for replica, groups in enumerate(ranks):
        wanted = {as_bytes(g) for g, to in zip(GROUPS, replica_G, strict=True) if to == replica}
        assert set(groups) == wanted


def test_leaders_exchange_while_their_peers_wait_for_packs():
    def body(groups):
        packs = None
        if groups.is_leader:
            drawn = RolloutBatch.of_train_groups(GROUPS[groups.dp_rank :: 2])
            packs = pack(exchange_groups(drawn, groups), 32)
        return groups.dp_rank, groups.is_leader, encode(share_packs(packs, groups))

    ranks = run_ranks(body, pp=2, dp=2)
    by_replica = [{data for dp_rank, _, data in ranks if dp_rank == replica} for replica in range(2)]
    assert [len(packs) for packs in by_replica] == [1, 1] and by_replica[0] != by_replica[1]
    assert sum(is_leader for _, is_leader, _ in ranks) == 2


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "pp": 2}], ids=str)
def test_packs_reach_all_ranks_of_a_replica(sizes):
    packs = pack(GROUPS, 32)

    def body(groups):
        shared = share_packs(packs if groups.is_leader else None, groups)
        assert all(a.rollout_ids == b.rollout_ids for a, b in zip(shared, packs, strict=True))
        for found, expected in zip(shared, packs, strict=True):
            np.testing.assert_array_equal(found.microbatch.tokens, expected.microbatch.tokens)
            assert found.microbatch.tokens.flags.writeable
        return encode(shared)

    assert set(run_ranks(body, **sizes)) == {encode(packs)}


def test_reference_logprobs_reach_every_shard():
    def body(groups):
        return return_to_owners({RolloutId("s", groups.dp_rank): (-1.5 * groups.dp_rank, 0)}, groups)

    assert run_ranks(body, dp=2) == [{RolloutId("s", 0): (0.0, 0), RolloutId("s", 1): (-1.5, 0)}] * 2


def test_small_values_go_from_one_to_all_and_from_all_to_all():
    def body(groups):
        plan = from_rank_0({"step": 3} if groups.rank == 0 else None, groups)
        return plan, gather_on_all(groups.rank * 10, groups), from_rank_0(False if groups.rank == 0 else None, groups)

    assert run_ranks(body, pp=2) == [({"step": 3}, [0, 10], False)] * 2
    assert run_ranks(body) == [({"step": 3}, [0], False)]
