"""Random numbers are a function of their key, and look random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.random import philox4x32, uniform

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, words):
    assert philox4x32(counter, key) == words


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ((0, 0, 0, 0), 0.3990464708489645),
        ((1, 0, 0, 0), 0.8902591729757107),
        ((0, 1, 0, 0), 0.5166791607485287),
        ((0, 0, 1, 0), 0.4172481254010001),
        ((0, 0, 0, 1), 0.9722412015223156),
        ((-1, 3, 2, 4095), 0.009374430748698925),
        ((2**63 + 5, 0, 0, 7), 0.9387835940143907),
    ],
)
def test_a_seed_means_the_same_number_for_ever(key, value):
    assert uniform(*key) == value


def test_a_negative_seed_is_its_64_bit_pattern():
    assert uniform(-1, 0, 0, 0) == uniform(2**64 - 1, 0, 0, 0)
    assert uniform(-(2**63), 0, 0, 0) == uniform(2**63, 0, 0, 0)


def test_both_halves_of_a_seed_count():
    assert len({uniform(seed, 0, 0, 0) for seed in (0, 1, 2**31, 2**32, 2**63, -1)}) == 6


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_number_lies_in_the_half_open_unit_interval(seed, prompt, choice, position):
    assert 0.0 <= uniform(seed, prompt, choice, position) < 1.0


def test_the_largest_number_stays_below_one():
    assert ((2**64 - 1) >> 11) * 2.0**-53 < 1.0


def test_numbers_of_neighbouring_keys_are_spread_evenly_and_unrelated():
    cube = np.array(
        [[[uniform(s, 0, c, p) for p in range(100)] for c in range(8)] for s in range(25)], dtype=np.float64
    )
    observed = np.histogram(cube, bins=64, range=(0, 1))[0]
    expected = cube.size / 64
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert 30 < chi_square < 104  # 63 degrees of freedom: both ends of about 1 in 1,000
    for axis in range(3):
        here = np.take(cube, range(cube.shape[axis] - 1), axis=axis).ravel()
        there = np.take(cube, range(1, cube.shape[axis]), axis=axis).ravel()
        assert abs(np.corrcoef(here, there)[0, 1]) < 0.03


def test_no_two_keys_of_a_busy_server_share_a_number():
    keys = itertools.product((0, 1, 2**40), range(3), range(3), range(200))
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers)
