"""Parameters of which each rank has a part, and the places of these parts in the complete parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from strategies.collectives.link import Link
from strategies.training.boxes import Box, Owned, View, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """The division of a parameter over the ranks of a link."""

    link: Link
    dim: int
    parts: int = 1
    """Number of matrices along `dim`, each of which is cut separately."""

    def part(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part."""
        link, dim = self.link, self.dim
        pieces = [piece.chunk(link.size, dim)[link.rank] for piece in whole.chunk(self.parts, dim)]
        return torch.cat(pieces, dim)

    def parameter(self, whole: Tensor) -> nn.Parameter:
        """Return a new parameter with this rank's part of one that is freed then."""
        return nn.Parameter(self.part(whole.detach()), requires_grad=whole.requires_grad)

    def boxes(self, name: str, part: Tensor, rows: range) -> Iterator[tuple[Box, View]]:
        """Yield the places of the rows `rows` of this rank's part in the complete parameter; the views are of
        these rows."""
        shape, ranks = list(part.shape), self.link.size
        shape[self.dim] *= ranks
        length = part.shape[self.dim] // self.parts
        for index in range(self.parts):
            inner = range(index * length, (index + 1) * length)
            kept = range(max(inner.start, rows.start), min(inner.stop, rows.stop)) if self.dim == 0 else inner
            if not kept or not rows:
                continue
            offsets, sizes = [0] * part.dim(), list(part.shape)
            offsets[0], sizes[0] = rows.start, len(rows)
            first = index * length * ranks + self.link.rank * length
            offsets[self.dim], sizes[self.dim] = first + kept.start - inner.start, len(kept)
            start = kept.start - rows.start if self.dim == 0 else kept.start
            yield (
                Box(name, tuple(shape), tuple(offsets), tuple(sizes)),
                partial(torch.narrow, dim=self.dim, start=start, length=len(kept)),
            )

    def whole(self, part: Tensor) -> Tensor:
        """Gather the parts of all ranks; collective."""
        gathered = self.link.all_gather(part.flatten()).view(self.link.size, *part.shape)
        pieces = [piece.chunk(self.parts, self.dim) for piece in gathered]
        return torch.cat([one[index] for index in range(self.parts) for one in pieces], self.dim)


class Slicings:
    """The parameters of a module of which each rank has a part, by name; of all others it has all rows."""

    def __init__(self) -> None:
        self._of: dict[str, Slicing] = {}

    def add(self, name: str, slicing: Slicing) -> None:
        self._of[name] = slicing

    def cut(self, name: str) -> bool:
        """Return whether each rank has a part of a parameter."""
        return name in self._of

    def copies(self, name: str, ranks: int) -> int:
        """Return the number of `ranks` ranks, those that layers are split over, with the same part."""
        return 1 if self.cut(name) else ranks

    def owned(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Owned]:
        """Yield parameters with the places of this rank's parts."""
        for name, parameter in named:
            rows = range(parameter.shape[0] if parameter.dim() else 1)
            yield Owned(parameter, tuple(self.boxes(name, parameter, rows)))

    def boxes(self, name: str, part: Tensor, rows: range) -> Iterator[tuple[Box, View]]:
        """Yield the places of rows of this rank's part in the complete parameter."""
        slicing = self._of.get(name)
        if slicing is None and rows:
            yield rows_of(name, tuple(part.shape), rows)
        elif slicing is not None:
            yield from slicing.boxes(name, part, rows)

    def whole(self, name: str, value: Tensor) -> Tensor:
        """Gather a value with the layout of the parameter `name`; collective if that is cut."""
        slicing = self._of.get(name)
        return value if slicing is None else slicing.whole(value)
