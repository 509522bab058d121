"""The places of a rank's tensors in the complete parameters of the bare model: rectangles, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a complete parameter."""

    name: str
    """The parameter's name in the bare model."""
    shape: tuple[int, ...]
    """The shape of the complete parameter."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def text(self) -> str:
        """The name, followed by the rectangle if that is not the complete parameter: `weight[0:4,0:8]`."""
        if self.sizes == self.shape:
            return self.name
        ends = zip(self.offsets, self.sizes, strict=True)
        return f"{self.name}[{','.join(f'{start}:{start + size}' for start, size in ends)}]"


View = Callable[[Tensor], Tensor]
"""A function from a tensor with the layout of the rank's parameter to the part in a box, in the box's
sizes."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter that this rank updates, with its places in the complete parameters."""

    parameter: Tensor
    """The key of its state in the optimizer."""
    boxes: tuple[tuple[Box, View], ...]


def whole(name: str, parameter: Tensor) -> Owned:
    """Return a parameter that the rank has completely."""
    shape = tuple(parameter.shape)
    return Owned(parameter, ((Box(name, shape, (0,) * len(shape), shape), _same),))


def rows_of(name: str, shape: tuple[int, ...], rows: range) -> tuple[Box, View]:
    """Return the place of a rank's tensor that is these rows of a parameter."""
    if not shape:
        return Box(name, (), (), ()), _same
    offsets, sizes = (rows.start, *(0 for _ in shape[1:])), (len(rows), *shape[1:])
    return Box(name, shape, offsets, sizes), _same


def run_of(name: str, shape: tuple[int, ...], elements: range, place: int) -> Iterator[tuple[Box, View]]:
    """Yield the rectangles of a run of `elements` of a parameter, counted row by row, that lie from `place`
    on in a rank's vector."""
    for offsets, sizes in rectangles(shape, elements.start, elements.stop):
        yield Box(name, shape, offsets, sizes), _range(place, sizes)
        place += math.prod(sizes)


def _same(values: Tensor) -> Tensor:
    return values


def _range(place: int, sizes: tuple[int, ...]) -> View:
    return lambda values: values[place : place + math.prod(sizes)].view(sizes)


def rectangles(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements `start` to `stop` of a tensor of `shape`, counted row by row, into rectangles; yield
    the offsets and sizes of these, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else ()
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in rectangles(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)
