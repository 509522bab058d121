"""Where a part of a tensor lies in the whole of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from strategies.training.boxes import Box, rectangles


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (3, 4), (2, 3, 4), (2, 2, 2, 3)])
def test_rectangles_are_the_elements_of_the_range_in_their_order(shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(values.numel() + 1), 2):
        found = []
        for offsets, sizes in rectangles(shape, start, stop):
            part = values[
                tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            ]
            assert part.shape == torch.Size(sizes)
            found += part.flatten().tolist()
        assert found == list(range(start, stop))


def test_a_rectangle_is_named_by_its_ends_unless_it_is_the_whole() -> None:
    assert Box("weight", (4, 8), (0, 0), (4, 8)).text == "weight"
    assert Box("weight", (4, 8), (2, 0), (2, 8)).text == "weight[2:4,0:8]"
