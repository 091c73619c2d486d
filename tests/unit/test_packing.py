import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factory import RolloutFactory, train_group

from tba_megatron.packing import (
    Pack,
    decode,
    demonstration_groups,
    encode,
    pack,
    pack_demonstrations,
    pack_into,
    padding,
    unpack_sums,
)
from tba_megatron.types import PackedMicrobatch, TrainGroup


@st.composite
def group_lists(draw) -> list[TrainGroup]:
    make = RolloutFactory()
    completions = st.lists(st.integers(1, 9), max_size=6)
    return [
        train_group(
            f"{i}" * draw(st.integers(1, 5)),
            [
                make.rollout(draw(completions), reward=draw(st.integers(-3, 3)) / 4)
                for _ in range(draw(st.integers(1, 4)))
            ],
        )
        for i in range(draw(st.integers(1, 6)))
    ]


def unpacked(packs: list[Pack]) -> dict:
    """Rollout id -> all that a microbatch says about it; the group as the set of its members."""
    found = {}
    for p in packs:
        mb = p.microbatch
        split = [q for q in packs if 0 <= mb.split_group == q.microbatch.split_group]
        for s, rollout_id in enumerate(p.rollout_ids):
            start, end = mb.cu_seqlens[s : s + 2]
            inside = slice(start, end)
            assert (mb.sequence_index[inside] == s).all()
            assert mb.positions[inside].tolist() == list(range(end - start))
            (rows,) = np.nonzero(mb.response[inside])
            members = frozenset(r for r, g in zip(p.rollout_ids, mb.group_index, strict=True) if g == mb.group_index[s])
            members = frozenset(r for q in split for r in q.rollout_ids) or members
            found[rollout_id] = (
                tuple(mb.tokens[inside].tolist()),
                tuple(mb.labels[inside][rows].tolist()),
                tuple(mb.tokens[inside][rows + 1].tolist()),
                float(mb.reward[s]),
                float(mb.copies[s]),
                members,
            )
    return found


def expected(groups: list[TrainGroup]) -> dict:
    return {
        r.rollout_id: (
            (*g.prompt_token_ids.tolist(), *r.token_ids.tolist()),
            tuple(r.token_ids.tolist()),
            tuple(r.token_ids.tolist()),
            r.reward,
            float(c),
            frozenset(x.rollout_id for x in g.rollouts),
        )
        for g in groups
        for r, c in zip(g.rollouts, g.copies, strict=True)
    }


@given(group_lists(), st.integers(1, 60), st.sampled_from([1, 2, 8]))
def test_unpacking_a_pack_gives_the_groups_back(groups, microbatch_tokens, multiple_of):
    assert unpacked(pack(groups, microbatch_tokens, multiple_of)) == expected(groups)


@given(group_lists(), st.integers(1, 60), st.randoms())
def test_permuting_groups_changes_no_sequence_and_no_group(groups, microbatch_tokens, random):
    shuffled = random.sample(groups, len(groups))
    assert unpacked(pack(shuffled, microbatch_tokens)) == unpacked(pack(groups, microbatch_tokens))


@given(group_lists(), st.integers(1, 60), st.sampled_from([1, 2, 8]))
def test_microbatches_keep_their_limit_and_the_layout_that_is_promised(groups, limit, multiple_of):
    packs = pack(groups, limit, multiple_of)
    for p in packs:
        mb = p.microbatch
        n_tokens = int(mb.cu_seqlens[mb.n_sequences])
        assert len(mb.tokens) <= max(limit, multiple_of) or mb.n_sequences == 1
        assert mb.split_group < 0 or mb.n_groups == 1
        assert len(mb.tokens) % multiple_of == 0
        assert len(mb.tokens) - n_tokens < multiple_of
        assert mb.cu_seqlens[-1] == len(mb.tokens)
        assert (np.diff(mb.cu_seqlens) > 0).all()
        assert (mb.sequence_index[n_tokens:] == -1).all()
        assert not mb.response[n_tokens:].any()
        assert (mb.labels[~mb.response] == 0).all()
        lengths = np.diff(mb.cu_seqlens)[: mb.n_sequences]
        assert (np.diff(lengths) >= 0).all()
        assert set(mb.group_index.tolist()) == set(range(mb.n_groups))


@given(group_lists(), st.integers(1, 60))
def test_only_what_does_not_fit_is_split(groups, limit):
    packs = pack(groups, limit)
    split = [p for p in packs if p.microbatch.split_group >= 0]
    large = [g for g in groups if g.n_tokens > limit and len(g.rollouts) > 1]
    assert len({p.microbatch.split_group for p in split}) == len(large)
    assert {r for p in split for r in p.rollout_ids} == {r.rollout_id for g in large for r in g.rollouts}


@given(group_lists())
def test_any_number_of_microbatches_up_to_the_number_of_groups_can_be_had(groups):
    for n in range(1, len(groups) + 1):
        packs = pack_into(groups, n)
        assert len(packs) == n
        assert all(p.microbatch.n_groups >= 1 for p in packs)
        assert unpacked(packs) == expected(groups)


def test_padding_holds_no_sequence():
    mb = padding(4)
    assert (len(mb.tokens), mb.n_sequences, mb.n_groups) == (4, 0, 0)
    assert not mb.response.any()
    assert mb.cu_seqlens.tolist() == [0, 4]


def test_more_microbatches_than_groups_are_refused_and_no_groups_make_none():
    group = train_group("p", [RolloutFactory().rollout(1)])
    with pytest.raises(ValueError, match="1 groups cannot fill 2 microbatches"):
        pack_into([group], 2)
    with pytest.raises(ValueError, match="1 groups cannot fill 0 microbatches"):
        pack_into([group], 0)
    assert pack([], 100) == []


def test_microbatches_are_balanced_by_tokens():
    make = RolloutFactory()
    groups = [train_group("p", [make.rollout([1] * n)]) for n in (39, 9, 9, 9, 9, 24)]
    sizes = sorted(len(p.microbatch.tokens) for p in pack_into(groups, 3))
    assert sizes == [30, 35, 40]


def test_a_worked_example():
    make = RolloutFactory()
    long, short = make.rollout([7, 2], reward=1.0), make.rollout([2], reward=0.5)
    (p,) = pack([train_group("ab", [long, short], [1, 3])], 100, multiple_of=4)
    mb = p.microbatch
    assert p.rollout_ids == (short.rollout_id, long.rollout_id)
    assert mb.tokens.tolist() == [97, 98, 2, 97, 98, 7, 2, 0]
    assert mb.labels.tolist() == [0, 2, 0, 0, 7, 2, 0, 0]
    assert mb.response.tolist() == [False, True, False, False, True, True, False, False]
    assert mb.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert mb.sequence_index.tolist() == [0, 0, 0, 1, 1, 1, 1, -1]
    assert mb.cu_seqlens.tolist() == [0, 3, 7, 8]
    assert (mb.copies.tolist(), mb.reward.tolist()) == ([3.0, 1.0], [0.5, 1.0])
    assert mb.group_index.tolist() == [0, 0]


def test_every_token_of_a_completion_counts_also_where_it_equals_eos_or_padding():
    make = RolloutFactory()
    eos_is_pad = [[0], [5, 0], [0, 0, 0], [5, 5, 5, 0], []]
    group = train_group("prompt", [make.rollout(tokens) for tokens in eos_is_pad])
    for multiple_of in (1, 16):
        (p,) = pack([group], 1000, multiple_of)
        mb = p.microbatch
        sums = np.bincount(mb.sequence_index[mb.response], minlength=mb.n_sequences)
        assert unpack_sums(p, sums) == {r.rollout_id: len(r.token_ids) for r in group.rollouts}


def test_a_reference_of_another_version_is_left_out():
    make = RolloutFactory()
    known, unknown = make.rollout([1], reference=-1.5), make.rollout([1, 1])
    group = train_group("p", [known, unknown])
    for version, expected_first in ((None, -1.5), (0, -1.5), (1, math.nan)):
        (p,) = pack([group], 100, reference_version=version)
        np.testing.assert_array_equal(p.microbatch.reference_logprob, [expected_first, math.nan])


def test_behaviour_logprobs_lie_where_their_tokens_are_predicted():
    make = RolloutFactory()
    group = train_group("p", [make.rollout([1, 2], behaviour_logprobs=np.float32([-1, -2])), make.rollout(3)])
    (p,) = pack([group], 100)
    nan = math.nan  # of a completion without them, and of what is no part of a completion
    np.testing.assert_array_equal(p.microbatch.behaviour_logprob, np.float32([nan, nan, -1, -2, nan]))


def test_values_find_their_rollout_and_a_wrong_number_of_them_is_an_error():
    make = RolloutFactory()
    group = train_group("p", [make.rollout([1, 2]), make.rollout([3])])
    (p,) = pack([group], 100)
    assert unpack_sums(p, p.microbatch.cu_seqlens[1:]) == {
        group.rollouts[1].rollout_id: 2.0,
        group.rollouts[0].rollout_id: 5.0,
    }
    with pytest.raises(ValueError):
        unpack_sums(p, [1.0])


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="has no tokens"):
        pack([train_group("", [RolloutFactory().rollout(1)])], 100)


def test_demonstrations_are_groups_of_one_sequence():
    pairs = [(np.int32([1, 2]), np.int32([3, 4])), (np.int32([1]), np.int32([5]))]
    packs = pack_demonstrations(pairs, microbatch_tokens=4)
    assert [p.microbatch.n_groups for p in packs] == [1, 1]
    assert unpacked(packs) == expected(demonstration_groups(pairs))
    assert pack_demonstrations([], 4) == []


@given(group_lists(), st.integers(1, 60))
def test_decoding_gives_what_was_encoded_in_writable_arrays(groups, microbatch_tokens):
    packs = pack(groups, microbatch_tokens, 4)
    received = decode(encode(packs))
    assert [p.rollout_ids for p in received] == [p.rollout_ids for p in packs]
    for new, old in zip(received, packs, strict=True):
        for f in fields(PackedMicrobatch):
            a, b = getattr(new.microbatch, f.name), getattr(old.microbatch, f.name)
            if f.name in ("n_groups", "split_group"):
                assert a == b
                continue
            assert a.dtype == b.dtype
            assert a.flags.writeable
            np.testing.assert_array_equal(a, b)
