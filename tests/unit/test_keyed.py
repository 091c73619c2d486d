import math

import numpy as np
import pytest

from tba_megatron.buffer import keyed


def splitmix64(state: int, value: int) -> int:
    """One stage in plain integers."""
    word = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15 * (value % (1 << 64) + 1)) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def test_a_hash_is_a_chain_of_splitmix64_stages():
    for seed, a, b in ((0, 0, 0), (1, 2, 3), (2**64 - 1, 2**63, 5), (7, -1, 2**40)):
        expected = splitmix64(splitmix64(splitmix64(0, seed), a), b)
        values = [np.array([v % (1 << 64)], np.uint64) for v in (a, b)]
        assert keyed.hashed(seed, *values).tolist() == [expected]


def test_the_first_hashes_of_seed_0_are_the_published_ones():
    # SplitMix64 from state 0: the first two outputs of the reference implementation (Vigna, prng.di.unimi.it).
    state = np.zeros(1, np.uint64)
    assert keyed.absorb(state, 0).tolist() == [0xE220A8397B1DCDAF]
    assert keyed.absorb(state, 1).tolist() == [0x6E789E6AA1B965F4]


def test_values_of_any_integer_type_and_broadcast_scalars_are_the_same_values():
    wide = keyed.hashed(3, np.array([5, 6], np.uint64), np.array([9, 9], np.int64))
    assert keyed.hashed(3, np.array([5, 6], np.int32), 9).tolist() == wide.tolist()
    assert keyed.absorb(keyed.hashed(3, np.array([5, 6])), 9).tolist() == wide.tolist()
    assert keyed.hashed(-1, 0).tolist() == keyed.hashed(2**64 - 1, 0).tolist()


def test_seed_place_and_value_all_matter():
    a, b = np.array([1], np.int64), np.array([2], np.int64)
    hashes = [keyed.hashed(0, a, b), keyed.hashed(0, b, a), keyed.hashed(1, a, b), keyed.hashed(0, a), keyed.hashed(0)]
    assert len({int(h[0]) for h in hashes}) == 5


def test_inputs_stay_as_they_are():
    hashes = keyed.hashed(0, np.arange(4))
    before = hashes.copy()
    keyed.absorb(hashes, 1)
    keyed.gumbel(hashes)
    assert (hashes == before).all()


def test_the_ends_of_the_interval_are_open():
    ends = np.array([0, (1 << 64) - 1], np.uint64)
    assert (keyed.uniform(ends) > 0).all()
    assert (keyed.uniform(ends) < 1).all()
    assert np.isfinite(keyed.gumbel(ends)).all()
    assert keyed.gumbel(ends) == pytest.approx([-3.604, 36.74], abs=0.01)


@pytest.mark.parametrize("column", ["seed", "key", "copy"])
def test_uniform_numbers_are_uniform_and_neighbours_unrelated(column: str):
    n = np.arange(20_000)
    if column == "seed":
        hashes = np.concatenate([keyed.hashed(seed, 1) for seed in range(len(n))])
    else:
        hashes = keyed.hashed(7, n, 3) if column == "key" else keyed.hashed(7, 3, n)
    u = keyed.uniform(hashes)
    counts = np.bincount((u * 50).astype(int), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 110  # 49 degrees of freedom: p = 1e-6
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(len(n))
    bits = np.unpackbits(hashes.view(np.uint8)).reshape(-1, 64).mean(0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / math.sqrt(len(n))


def test_gumbel_noise_has_its_mean_and_variance():
    noise = keyed.gumbel(keyed.hashed(1, np.arange(100_000)))
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
