"""`powersgd`: a low-rank approximation of each matrix, by a step of power iteration from the last one.

Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv:1905.13727, algorithm 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from results.spec import Spec
from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor, State
from strategies.compression.streams import generator_of
from strategies.exchange.buckets import Bucket, BucketRange


class PowerSGD(Compressor):
    """Matrices M (n, m) are sent as factors P (n, r) and Q (m, r), which are summed by two all-reduces.

    P = orthonormal(sum of M Q), then Q = M^T P, and the sum of M becomes P (sum of Q)^T, its projection
    onto the columns of P. A parameter of more dimensions is the matrix (shape[0], the rest); one that its
    factors would not make smaller is summed as it is, in the all-reduce of the Ps.

    The residual of a rank is M - P Q^T with its own Q. With the mean Q instead, as in torch's hook, it would
    also contain all that the rank has beyond the mean of the ranks: over the ranks that cancels out, so no
    step ever sends it, and it adds up without bound. Here the residual has no component along P.

    Factors are held as rows, P^T (r, n) and Q^T (r, m): BLAS multiplies a few rows by a matrix several times
    faster than a matrix by a few columns.
    """

    def __init__(self, rank: int, *, warmup: int, seed: int, feedback: bool) -> None:
        """`rank` is r, not the rank of a process. The first `warmup` steps of a parameter send all of it."""
        super().__init__(feedback=feedback, ramp_steps=warmup)
        self._rank = rank
        self._seed = seed
        self._steps: Counter[str] = Counter()
        self._factors: dict[str, Tensor] = {}
        """The summed Q^T of each parameter's last step, the same on all ranks."""

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> PowerSGD:
        warmup, feedback = spec.integer("warmup"), spec.flag("feedback")
        return cls(spec.count, warmup=warmup, seed=seed, feedback=feedback)

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        factored, whole = self._divide(bucket.pieces)
        if residual is not None:
            residual.zero_()
        if not factored:
            wire.all_reduce(bucket.values)
            return

        matrices = [_matrix(piece, bucket.values) for piece in factored]
        bases = self._bases(factored, matrices, [piece.of(bucket.values) for piece in whole], wire)
        rights = [basis.T @ matrix for matrix, basis in zip(matrices, bases, strict=True)]
        if residual is not None:
            residuals = [_matrix(piece, residual) for piece in factored]
            for matrix, basis, right, out in zip(matrices, bases, rights, residuals, strict=True):
                torch.addmm(matrix, basis, right, alpha=-1, out=out)

        totals = _sum_together(rights, wire)
        for piece, matrix, basis, total in zip(factored, matrices, bases, totals, strict=True):
            torch.mm(basis, total, out=matrix)
            # A row of zeros would stay zero for ever, and lose a rank: it keeps its last direction instead.
            alive = total.any(dim=1, keepdim=True)
            self._factors[piece.name] = torch.where(alive, total, self._factor(piece, matrix))

    def _divide(self, pieces: Sequence[BucketRange]) -> tuple[list[BucketRange], list[BucketRange]]:
        """Return the pieces that are sent as factors in this step, and the others; count the step."""
        factored: list[BucketRange] = []
        whole: list[BucketRange] = []
        for piece in pieces:
            self._steps[piece.name] += 1
            ready = self._steps[piece.name] > self.ramp_steps
            (factored if ready and _pays(piece.shape, self._rank) else whole).append(piece)
        return factored, whole

    def _bases(
        self, pieces: Sequence[BucketRange], matrices: Sequence[Tensor], rest: Sequence[Tensor], wire: Wire
    ) -> list[Tensor]:
        """Return an orthonormal P (n, r) of each matrix, and sum the rest in place.

        Each rank makes P orthonormal by itself: from the same bits all ranks compute the same bits.
        """
        lefts = [
            self._factor(piece, matrix) @ matrix.T for piece, matrix in zip(pieces, matrices, strict=True)
        ]
        sums = _sum_together([*rest, *lefts], wire)
        for values, total in zip(rest, sums, strict=False):
            values.copy_(total)
        return _orthonormal(sums[len(rest) :])

    def _factor(self, piece: BucketRange, matrix: Tensor) -> Tensor:
        """Return Q^T (r, m) of the last step; before the first, the same normal numbers on all ranks."""
        if piece.name not in self._factors:
            # On CPU, where the numbers are the same for every kind of device.
            drawn = generator_of(torch.device("cpu"), self._seed, piece.name)
            self._factors[piece.name] = torch.randn(self._rank, matrix.shape[1], generator=drawn)
        return self._factors[piece.name].to(matrix)

    def state_dict(self) -> State:
        # Factors are replaced, never written to: they need no copies.
        return {"factors": dict(self._factors), "steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._factors = dict(cast("dict[str, Tensor]", state["factors"]))
        self._steps = Counter(cast("dict[str, int]", state["steps"]))


def _pays(shape: torch.Size, rank: int) -> bool:
    """Return whether two factors have fewer numbers than the matrix (then it has more than r rows and
    columns)."""
    rows = shape[0] if shape else 0
    columns = shape[1:].numel()
    return (rows + columns) * rank < rows * columns


def _matrix(piece: BucketRange, values: Tensor) -> Tensor:
    """Return a parameter's part of `values` as a view (n, m)."""
    part = piece.of(values)
    return part.view(part.shape[0], -1)


def _sum_together(tensors: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    """Sum each tensor over the ranks, all in one flat all-reduce."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    wire.all_reduce(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _orthonormal(lefts: Sequence[Tensor]) -> list[Tensor]:
    """Return an orthonormal basis (n, r) of the rows of each (r, n), completed where the rows are dependent.

    Householder's QR never divides by zero: even a matrix of zeros has a basis. Matrices of one shape are
    factored in one call, as a call takes longer than a small matrix; on CPU the bits stay the same.
    """
    places: dict[torch.Size, list[int]] = {}
    for place, left in enumerate(lefts):
        places.setdefault(left.shape, []).append(place)
    bases = list(lefts)
    for alike in places.values():
        rows = torch.stack([lefts[place] for place in alike])
        wide = torch.promote_types(rows.dtype, torch.float32)  # LAPACK has no half precision
        found = torch.linalg.qr(rows.mT.to(wide)).Q.to(rows.dtype)
        for place, basis in zip(alike, found.unbind(), strict=True):
            bases[place] = basis
    return bases
