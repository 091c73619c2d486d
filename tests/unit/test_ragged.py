import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.ragged import keep, offsets, owners, ranges, split, take

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)


def flat_of(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([x for one in lists for x in one], np.int64), np.array([len(one) for one in lists], np.int64)


@settings(derandomize=True)
@given(LISTS, st.randoms(use_true_random=False))
def test_a_flat_array_and_lengths_are_lists(lists: list[list[int]], random):
    flat, lengths = flat_of(lists)
    assert [part.tolist() for part in split(flat, lengths)] == lists
    assert owners(lengths).tolist() == [i for i, one in enumerate(lists) for _ in one]
    assert offsets(lengths).tolist() == [sum(map(len, lists[:i])) for i in range(len(lists) + 1)]
    starts = [random.randrange(100) for _ in lists]
    expected = [start + i for start, one in zip(starts, lists, strict=True) for i in range(len(one))]
    assert ranges(np.array(starts, np.int64), lengths).tolist() == expected
    some = [random.randrange(len(lists)) for _ in range(3)] if lists else []
    assert take(flat, lengths, np.array(some, np.int64)).tolist() == [x for i in some for x in lists[i]]


@settings(derandomize=True)
@given(LISTS)
def test_what_is_kept_of_lists_are_shorter_lists(lists: list[list[int]]):
    flat, lengths = flat_of(lists)
    kept, sizes = keep(flat, lengths, flat % 2 == 0)
    assert [part.tolist() for part in split(kept, sizes)] == [[x for x in one if x % 2 == 0] for one in lists]
