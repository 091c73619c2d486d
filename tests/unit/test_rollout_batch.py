"""Rollouts as columns: groups and bytes come back as they were, and what is no batch of rollouts is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_factory import RolloutFactory, as_batch, as_group

from tba_megatron.rollout_batch import MOST_SEQUENCE, STOP_REASONS, RolloutBatch, decode, encode
from tba_megatron.types import PolicySpan, PolicyVersion, Rollout, RolloutGroup, RolloutId, TrainGroup

COLUMNS = [field.name for field in fields(RolloutBatch) if field.name not in ("prompt_ids", "names")]

# Groups

names = st.text(max_size=4) | st.sampled_from(["", "\0", "a\0b", "søker", "問題", "🙂", "\ufeff"])
int64s = st.integers(-(2**63), 2**63 - 1)
tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(lambda ids: np.array(ids, np.int32))
logprobs = st.none() | st.lists(st.floats(width=32), max_size=3).map(lambda values: np.array(values, np.float32))
versions = st.builds(PolicyVersion, int64s, int64s)
spans = st.lists(st.builds(PolicySpan, version=versions, start=int64s, end=int64s), max_size=2).map(tuple)
# A log-prob that is not a number says by its version that it is there.
references = (
    st.just((None, None))
    | st.tuples(st.floats(allow_nan=False), st.none())
    | st.tuples(st.floats(), st.integers(0, 2**63 - 1))
)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    reference, reference_version = draw(references)
    return Rollout(
        rollout_id=RolloutId(draw(names), draw(st.integers(0, MOST_SEQUENCE - 1))),
        token_ids=draw(tokens),
        reward=draw(st.floats()),
        stop_reason=draw(st.sampled_from(STOP_REASONS)),
        spans=draw(spans),
        source=draw(names),
        behaviour_logprobs=draw(logprobs),
        reference_logprob=reference,
        reference_version=reference_version,
    )


some_rollouts = st.lists(rollouts(), max_size=3).map(tuple)
groups = st.lists(
    st.builds(RolloutGroup, prompt_id=names, prompt_token_ids=tokens, rollouts=some_rollouts, lease=int64s), max_size=3
)


@st.composite
def a_train_group(draw: st.DrawFn) -> TrainGroup:
    drawn = draw(some_rollouts)
    copies = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(drawn), max_size=len(drawn)))
    return TrainGroup(prompt_id=draw(names), prompt_token_ids=draw(tokens), rollouts=drawn, copies=tuple(copies))


train_groups = st.lists(a_train_group(), max_size=3)


def plain(value: object) -> object:
    """Exactly what ``value`` holds, comparable: NaN equals NaN, 0.0 is not -0.0."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, (Rollout, RolloutGroup, TrainGroup)):
        return type(value), tuple(plain(getattr(value, field.name)) for field in fields(value))
    return type(value), value


def assert_same_groups(got: Sequence[object], given_groups: Sequence[object]) -> None:
    assert list(map(plain, got)) == list(map(plain, given_groups))


def assert_same_columns(got: RolloutBatch, sent: RolloutBatch) -> None:
    assert (got.prompt_ids, got.names) == (sent.prompt_ids, sent.names)
    for name in COLUMNS:
        assert plain(getattr(got, name)) == plain(getattr(sent, name)), name
        assert getattr(got, name).shape == getattr(sent, name).shape, name


@given(groups)
def test_groups_come_back_as_they_were(given_groups):
    batch = RolloutBatch.of_groups(given_groups)
    assert (batch.n_groups, batch.n_rollouts) == (len(given_groups), sum(len(g.rollouts) for g in given_groups))
    assert batch.copies_S.tolist() == [1] * batch.n_rollouts
    assert_same_groups(batch.groups(), given_groups)


@given(train_groups)
def test_train_groups_come_back_with_their_copies(given_groups):
    batch = RolloutBatch.of_train_groups(given_groups)
    assert batch.lease_G.tolist() == [-1] * len(given_groups)
    assert_same_groups(batch.train_groups(), given_groups)


@given(groups)
def test_a_name_is_held_once(given_groups):
    batch = RolloutBatch.of_groups(given_groups)
    everyone = [name for g in given_groups for r in g.rollouts for name in (r.rollout_id.searcher, r.source)]
    assert sorted(batch.names) == sorted(set(everyone))


def test_a_log_prob_that_is_no_number_and_has_no_version_is_none():
    make = RolloutFactory()
    (group,) = as_batch(as_group("p", [make.rollout(1, reference_logprob=float("nan"))])).groups()
    assert (group.rollouts[0].reference_logprob, group.rollouts[0].reference_version) == (None, None)


@given(train_groups.filter(len), st.data())
def test_selected_groups_are_those_in_their_order_as_copies(given_groups, data):
    indices = data.draw(st.lists(st.integers(0, len(given_groups) - 1), max_size=5))
    batch = RolloutBatch.of_train_groups(given_groups)
    chosen = batch.select(indices)
    assert_same_groups(chosen.train_groups(), [given_groups[i] for i in indices])
    assert_same_columns(decode(encode(chosen)), chosen)
    for name in COLUMNS:
        assert not np.shares_memory(getattr(chosen, name), getattr(batch, name)), name


def test_a_selection_keeps_the_leases():
    make = RolloutFactory()
    batch = as_batch(*(replace(make.group("p", [i]), lease=10 + i) for i in range(3)))
    assert batch.select([2, 0, 2]).lease_G.tolist() == [12, 10, 12]
    assert batch.select([]).n_groups == 0
    with pytest.raises(IndexError):
        batch.select([3])


# Bytes


@given(groups)
@example([])
@example([RolloutGroup(prompt_id="", prompt_token_ids=np.zeros(0, np.int32), rollouts=())])
def test_bytes_give_the_same_batch_whatever_holds_them(given_groups):
    batch = RolloutBatch.of_groups(given_groups)
    data = encode(batch)
    for held in (data, memoryview(bytearray(data)), memoryview(b"12345678" + data)[8:]):
        got = decode(held)
        assert_same_columns(got, batch)
        assert_same_groups(got.groups(), given_groups)
        assert encode(got) == data


def one_batch() -> RolloutBatch:
    """Every column has something, and every length of a part is its own."""
    make = RolloutFactory("søker\0")
    spans = (
        PolicySpan(version=PolicyVersion(0, 1), start=0, end=1),
        PolicySpan(version=PolicyVersion(1, 2), start=1, end=2),
    )
    full = make.rollout(
        [1, 2], spans=spans, behaviour_logprobs=np.array([-0.5, -1], np.float32), reference=-2.5, reward=1 / 3
    )
    return as_batch(as_group("a\0b", [full, make.rollout([3])]), as_group("π", []), as_group("ccc", [make.rollout([])]))


GOOD = encode(one_batch())


def test_decoded_arrays_are_aligned_views_of_the_bytes():
    batch, whole = decode(GOOD), np.frombuffer(GOOD, np.uint8)
    for name in COLUMNS:
        column = getattr(batch, name)
        assert column.size and np.shares_memory(column, whole), name
        assert column.flags.aligned and not column.flags.writeable, name


def test_columns_that_are_not_contiguous_or_wider_are_written_like_others():
    batch = one_batch()
    wide = replace(
        batch,
        **{name: np.repeat(getattr(batch, name), 2, axis=0)[::2] for name in COLUMNS if name != "size_G"},
        size_G=batch.size_G.astype(">i8"),
    )
    assert encode(wide) == GOOD


def test_bytes_that_end_early_or_late_are_refused():
    for length in range(len(GOOD)):
        with pytest.raises(ValueError):
            decode(GOOD[:length])
    for more in range(1, 20):
        with pytest.raises(ValueError, match="after the last array"):
            decode(GOOD + bytes(more))


@settings(max_examples=50)
@given(groups, st.floats(0, 1, exclude_max=True))
def test_any_batch_that_is_cut_is_refused(given_groups, part):
    data = encode(RolloutBatch.of_groups(given_groups))
    with pytest.raises(ValueError):
        decode(data[: int(part * len(data))])


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_is_one_longer_or_shorter_is_refused(name):
    batch = one_batch()
    column = getattr(batch, name)
    for wrong in (column[:-1], column[:0], np.concatenate([column, column[-1:]])):
        with pytest.raises(ValueError):
            decode(encode(replace(batch, **{name: wrong})))


@pytest.mark.parametrize("name", ["size_G", "prompt_length_G", "length_S", "behaviour_length_S", "span_count_S"])
def test_lengths_of_parts_that_are_wrong_are_refused(name):
    batch = one_batch()
    column = getattr(batch, name)
    for i in range(len(column)):
        for value in (int(column[i]) + 1, int(column[i]) - 1, -2, -(2**31), 2**31 - 1):
            wrong = column.copy()
            wrong[i] = value
            if name == "behaviour_length_S" and sorted((value, int(column[i]))) == [-1, 0]:
                continue  # log-probs of no tokens, or none: both take no place
            with pytest.raises(ValueError):
                decode(encode(replace(batch, **{name: wrong})))


def test_parts_that_sum_up_but_hold_a_negative_length_are_refused():
    batch = one_batch()
    for name in ("size_G", "prompt_length_G", "length_S", "span_count_S"):
        wrong = getattr(batch, name).copy()
        wrong[:2] += [wrong[1] + 1, -wrong[1] - 1]
        with pytest.raises(ValueError, match="holds -1"):
            decode(encode(replace(batch, **{name: wrong})))


@pytest.mark.parametrize("names", [("prompt_ids", ()), ("prompt_ids", ("a",) * 4), ("names", ()), ("names", ("s",))])
def test_tables_that_are_too_short_or_long_are_refused(names):
    with pytest.raises(ValueError):
        decode(encode(replace(one_batch(), **dict([names]))))


@pytest.mark.parametrize("name", ["searcher_S", "source_S", "stop_reason_S", "sequence_S"])
def test_numbers_that_are_not_in_their_range_are_refused(name):
    most = {"stop_reason_S": len(STOP_REASONS), "sequence_S": MOST_SEQUENCE}.get(name, 2)
    for value in (-1, most, most + 20):
        column = getattr(one_batch(), name).copy()
        column[-1] = value
        with pytest.raises(ValueError, match=f"{name} holds"):
            decode(encode(replace(one_batch(), **{name: column})))


# Heads


def head_of(data: bytes) -> tuple[list, bytes]:
    """The msgpack head and all bytes after its padding."""
    size = int.from_bytes(data[:8], "little")
    return msgspec.msgpack.decode(data[8 : 8 + size]), data[8 + size + -size % 8 :]


def with_head(head: object, rest: bytes) -> bytes:
    packed = msgspec.msgpack.encode(head)
    return len(packed).to_bytes(8, "little") + packed + bytes(-len(packed) % 8) + rest


def test_a_head_is_read_as_it_was_written():
    assert with_head(*head_of(GOOD)) == GOOD


@pytest.mark.parametrize("i", range(len(COLUMNS)))
def test_a_length_in_the_head_that_is_wrong_is_refused(i):
    (form, prompt_ids, table, lengths), rest = head_of(GOOD)
    for value in (lengths[i] + 1, lengths[i] - 1, 0, -1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, "1", 1.5, None):
        wrong = [*lengths[:i], value, *lengths[i + 1 :]]
        with pytest.raises(ValueError):
            decode(with_head([form, prompt_ids, table, wrong], rest))


@pytest.mark.parametrize(
    "head",
    [
        None,
        [],
        {},
        [1],
        [1, [], []],
        [1, [], [], []],
        [1, [], [], [0] * 17],
        [1, [], [], [0] * 19],
        [1, [b"\xff"], [], [0] * 18],
        [1, [1], [], [0] * 18],
        [1, [], None, [0] * 18],
        ["1", [], [], [0] * 18],
    ],
)
def test_a_head_of_another_shape_is_refused(head):
    with pytest.raises(ValueError):
        decode(with_head(head, b""))


def test_another_format_is_refused_by_its_number():
    (_, *head), rest = head_of(GOOD)
    with pytest.raises(ValueError, match="format 2 with 18 arrays; this program reads format 1"):
        decode(with_head([2, *head], rest))


def test_names_that_are_no_text_are_refused():
    assert GOOD.count("π".encode()) == 1
    with pytest.raises(ValueError):
        decode(GOOD.replace("π".encode(), b"\xff\xfe"))


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, len(GOOD), len(GOOD) - 7])
def test_a_head_that_is_longer_than_the_bytes_is_refused(size):
    with pytest.raises(ValueError, match="a head of"):
        decode(size.to_bytes(8, "little") + GOOD[8:])


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.binary(max_size=40))
def test_damage_is_refused_or_gives_columns_that_fit_each_other(place, change, noise):
    flipped = GOOD[:place] + bytes([GOOD[place] ^ change]) + GOOD[place + 1 :]
    overwritten = GOOD[:place] + noise + GOOD[place + len(noise) :]
    for data in (flipped, overwritten, noise):
        try:
            batch = decode(data)
        except ValueError:
            continue
        assert len(batch.groups()) == batch.n_groups
        assert sum(len(group.rollouts) for group in batch.train_groups()) == batch.n_rollouts
