"""Buckets: many gradients in one flat vector, so that one exchange moves them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""The size of a bucket; a larger tensor has its own bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRange:
    """The place of one parameter in a bucket."""

    name: str
    offset: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def of(self, values: Tensor) -> Tensor:
        """Return this parameter's part of the bucket's values, or of a vector of the same layout: a view in
        its shape."""
        return values[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One flat vector of gradients, or of the values that are exchanged instead."""

    index: int
    """The buckets of a step are exchanged in this order on all ranks."""
    values: Tensor
    """1-D and contiguous. Before the exchange this rank's share of the result (its gradient over the number
    of ranks), after it the sum of all shares."""
    pieces: tuple[BucketRange, ...]

    def as_real(self) -> Bucket:
        """Return the same memory as real values, two for each complex one, in an additional last
        dimension."""
        pieces = tuple(
            BucketRange(name=piece.name, offset=2 * piece.offset, shape=torch.Size((*piece.shape, 2)))
            for piece in self.pieces
        )
        return Bucket(index=self.index, values=torch.view_as_real(self.values).flatten(), pieces=pieces)


def own_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the stride of a dense view in the memory format of `parameter` (such as channels last).

    If the parameter has gaps it is row by row, as torch lays out gradients and its buckets.
    """
    stride = torch.empty_like(parameter, device="meta").stride()
    return stride if stride == parameter.stride() else torch.empty(parameter.shape, device="meta").stride()


def pieces_of(named: Iterator[tuple[str, torch.Size]], step: int = 1) -> tuple[BucketRange, ...]:
    """Place pieces one after another, each at a multiple of `step` elements."""
    pieces: list[BucketRange] = []
    offset = 0
    for name, shape in named:
        pieces.append(BucketRange(name=name, offset=offset, shape=shape))
        offset += -(-shape.numel() // step) * step
    return tuple(pieces)


def buckets_of(tensors: Mapping[str, Tensor]) -> Iterator[Bucket]:
    """Yield buckets of zeros for tensors in their order, each of one data type and up to `BUCKET_BYTES`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), []).append((name, tensor))
    runs = (run for named in kinds.values() for run in _runs(named))
    for index, run in enumerate(runs):
        pieces = pieces_of((name, tensor.shape) for name, tensor in run)
        size = sum(piece.numel for piece in pieces)
        yield Bucket(index=index, values=run[0][1].new_zeros(size), pieces=pieces)


def _runs(named: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut tensors into runs of up to `BUCKET_BYTES`."""
    run: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if run and size + tensor.nbytes > BUCKET_BYTES:
            yield run
            run, size = [], 0
        run.append((name, tensor))
        size += tensor.nbytes
    yield run
