import numpy as np
import pytest
import torch

from scanl.errors import ShapeError
from scanl.parallel import stretch, stretch_offsets
from scanl.parallel.stretches import bounds


def test_stretches_are_the_whole_in_their_order():
    x = torch.arange(22).view(2, 11)
    for lengths in (None, [4, 0, 7]):
        assert torch.equal(torch.cat([stretch(x, rank, 3, lengths=lengths) for rank in range(3)], 1), x)
    assert [stretch(x, rank, 3).shape[1] for rank in range(3)] == [4, 4, 3]
    assert [bounds(11, rank, 3) for rank in range(3)] == [(0, 4), (4, 8), (8, 11)]


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("steps", [0, 4, 13, 23])
def test_bounds_are_those_of_numpy(steps, size):
    found = [list(range(*bounds(steps, rank, size))) for rank in range(size)]
    assert found == [part.tolist() for part in np.array_split(np.arange(steps), size)]


@pytest.mark.parametrize("lengths", [[5, 5], [4, 4, 4]])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ShapeError, match="expected 3 numbers whose sum is the 11 steps of x"):
        stretch(torch.zeros(2, 11), 0, 3, lengths=lengths)


def test_offsets_begin_with_the_sequence_that_goes_on():
    cu_seqlens = torch.tensor([0, 3, 3, 5, 9, 9])
    assert stretch_offsets(cu_seqlens, 0, 4).tolist() == [0, 3, 3, 4]
    assert stretch_offsets(cu_seqlens, 4, 6).tolist() == [0, 1, 2]
    assert stretch_offsets(cu_seqlens, 5, 9).tolist() == [0, 0, 4, 4]
