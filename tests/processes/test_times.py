"""Stratified times and sampling grids."""

import pytest
import torch

from diladiff.processes.times import bit_reverse, stratified, uniform_grid


def test_bit_reverse_of_three_bits():
    assert bit_reverse(torch.arange(8), 3).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize("bits", [0, 1, 4, 9])
def test_bit_reverse_is_its_own_inverse(bits):
    i = torch.arange(2**bits)
    assert torch.equal(bit_reverse(bit_reverse(i, bits), bits), i)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_every_aligned_slice_has_one_time_a_stratum(size):
    t_B = stratified(torch.tensor(0.37), torch.arange(size), size)
    width = size
    while width >= 1:
        for slice_b in t_B.split(width):
            assert sorted((slice_b * width).long().tolist()) == list(range(width))
        width //= 2


def test_times_do_not_depend_on_the_split():
    u = torch.tensor(0.25)
    parts = [stratified(u, index, 16) for index in torch.arange(16).split(4)]
    assert torch.equal(torch.cat(parts), stratified(u, torch.arange(16), 16))


def test_times_are_uniform_over_u():
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    t = torch.stack([stratified(value, torch.arange(4), 4) for value in u])
    for power in (1, 2, 3):
        assert float((t**power).mean()) == pytest.approx(1 / (power + 1), abs=1e-6)


@pytest.mark.parametrize("size", [0, 3, 12])
def test_a_size_that_is_no_power_of_two_is_refused(size):
    with pytest.raises(ValueError, match="power of two"):
        stratified(torch.tensor(0.5), torch.arange(1), size)


def test_the_grid_runs_from_exactly_one_to_exactly_zero():
    assert uniform_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert uniform_grid(7).dtype == torch.float64
    assert float(uniform_grid(7)[0]) == 1
    assert float(uniform_grid(7)[-1]) == 0
    with pytest.raises(ValueError, match="steps"):
        uniform_grid(0)
