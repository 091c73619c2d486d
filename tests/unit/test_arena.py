"""Ragged rows in blocks: what goes in comes out, wherever it was moved to, and memory follows what lives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_megatron.buffer import arena as arena_module
from tba_megatron.buffer.arena import Arena

lives = st.lists(
    st.one_of(
        st.lists(st.integers(0, 20), min_size=1, max_size=6).map(lambda lengths: ("put", lengths)),
        st.integers(0, 1 << 30).map(lambda seed: ("free", seed)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(lives)
def test_rows_stay_what_they_were_while_others_come_and_go(life):
    arena, held, n_put = Arena(np.int32), {}, 0
    arena._block_elements = 16
    for action, value in life:
        if action == "put":
            rows = [np.arange(n_put + i, n_put + i + length, dtype=np.int32) for i, length in enumerate(value)]
            addresses = arena.put(np.concatenate(rows), np.array(value))
            held |= {n_put + i: (address, row) for i, (address, row) in enumerate(zip(addresses, rows, strict=True))}
            n_put += len(value)
        elif held:
            keys = np.random.default_rng(value).permutation(list(held))[: len(held) // 2 + 1].tolist()
            gone = [held.pop(key) for key in keys]
            arena.free(np.array([a for a, _ in gone]), np.array([len(row) for _, row in gone]))
        blocks = arena.sparse_blocks()
        moving = [key for key, (address, row) in held.items() if len(row) and Arena.block_of(address) in blocks]
        if moving:
            addresses = np.array([held[key][0] for key in moving])
            moved = arena.move(addresses, np.array([len(held[key][1]) for key in moving]))
            held |= {key: (address, held[key][1]) for key, address in zip(moving, moved, strict=True)}
        for address, row in held.values():
            np.testing.assert_array_equal(arena.rows(np.array([address]), np.array([len(row)]))[0], row)
        assert arena.live_elements == sum(len(row) for _, row in held.values())
        dead = int(arena._filled.sum()) - arena.live_elements
        assert dead <= 0.2 * arena.live_elements + 2 * 16 + 20 + 16  # two blocks, and the current one


def test_rows_that_leave_much_of_their_blocks_unused_are_not_moved_for_it():
    arena = Arena(np.int32)
    length = arena_module.BLOCK_BYTES // 4 * 2 // 3
    addresses = np.concatenate([arena.put(np.ones(length, np.int32), np.array([length])) for _ in range(9)])
    assert len(arena.sparse_blocks()) == 0
    arena.free(addresses[:6], np.full(6, length))
    assert len([block for block in arena._blocks if len(block)]) == 3


def test_a_row_may_be_larger_than_a_block():
    arena = Arena(np.float32)
    row = np.arange(arena_module.BLOCK_BYTES // 4 + 7, dtype=np.float32)
    small, large = arena.put(np.concatenate([row[:3], row]), np.array([3, len(row)]))
    np.testing.assert_array_equal(arena.gather(np.array([large, small]), np.array([len(row), 3])), [*row, *row[:3]])


def test_memory_that_lived_is_given_back():
    arena = Arena(np.int32)
    blocks = 10
    lengths = np.full(blocks * arena_module.BLOCK_BYTES // 4096, 1024)
    addresses = arena.put(np.zeros(lengths.sum(), np.int32), lengths)
    arena.free(addresses, lengths)
    assert sum(len(block) for block in arena._blocks) * 4 <= arena_module.BLOCK_BYTES
    assert len(arena._spare) == 2


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.int64])
def test_rows_keep_their_type(dtype):
    arena = Arena(dtype)
    addresses = arena.put(np.arange(5, dtype=dtype), np.array([2, 3]))
    assert arena.gather(addresses, np.array([2, 3])).dtype == dtype
