"""Comparisons of what a strategy computed with what it must come to, and the bounds they allow.

The bound. On CPU in fp32, uncompiled, both sides do the same local arithmetic, so that only the order of
the sum over replicas may differ: for two replicas not at all (a + b = b + a, and halving is exact), for p
replicas by 2 gamma(p + 1) sum |g_r| / p per element, gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., section 4.2, for either order; p - 1 sums, and two roundings
where shares are multiplied by a rounded 1 / p). Buffers of every replica are equal. Elsewhere kernels need
not be reproducible: the whole gradient, and replica 0's buffers, must agree in relative L2 norm within
`TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.worker.reference import UNIT_ROUNDOFF, Reference, finite
from results.cell import Cell, Precision
from strategies.catalog import shards

TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
"""Relative L2 difference of the gradient that is allowed where kernels need not be reproducible."""
UPDATE_TOLERANCE = 1e-3
"""The same of the update by the same gradients, which is elementwise and in single precision."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one comparison came out."""

    passed: bool
    what: str
    difference: float
    bound: float


def exact_arithmetic(cell: Cell) -> bool:
    """Whether two computations of the same micro-batch give the same bits: not where several ranks compute
    it together, in pieces of its matrices or its samples."""
    return cell.device == "cpu" and cell.precision == "fp32" and not cell.compile and cell.model_parallel == 1


def exact_update(cell: Cell) -> bool:
    """Whether two updates by the same gradients give the same bits: a norm over shards is summed in another
    order than one over whole gradients."""
    return exact_arithmetic(cell) and not (cell.clip_norm is not None and shards(cell.strategy))


def compare_gradients(
    cell: Cell, gradients: Tensors, buffers: Tensors, reference: Reference
) -> list[Finding]:
    """Gradients, and the buffers that a replica left, against the reference."""
    findings = compare_surroundings(cell, gradients, buffers, reference)
    if exact_arithmetic(cell):
        findings += elementwise("gradient", gradients, reference.gradients, reference.bounds)
    elif finite(gradients):
        tolerance = TOLERANCE[cell.precision]
        findings.append(relative("gradient", gradients, reference.gradients, tolerance))
    return findings


def compare_surroundings(
    cell: Cell, gradients: Tensors, buffers: Tensors, reference: Reference
) -> list[Finding]:
    """Which parameters have a gradient, and the buffers that a replica left, against the reference."""
    tolerance = 0.0 if exact_arithmetic(cell) else TOLERANCE[cell.precision]
    return [
        same_names(gradients, reference.gradients),
        relative("buffers", buffers, reference.buffers, tolerance),
    ]


def same_names(ours: Tensors, reference: Tensors) -> Finding:
    different = sorted(set(ours) ^ set(reference))
    return Finding(
        passed=not different,
        what=f"gradients exist on one side only: {', '.join(different[:3])}",
        difference=float(len(different)),
        bound=0.0,
    )


def elementwise(what: str, ours: Tensors, reference: Tensors, bounds: Tensors) -> list[Finding]:
    findings = []
    for name in sorted(set(ours) & set(reference)):
        difference = (ours[name] - reference[name]).abs()
        worst = int((difference - bounds[name]).argmax())
        findings.append(
            Finding(
                passed=bool((difference <= bounds[name]).all()),
                what=f"{what} of {name} differs from the serial simulation",
                difference=float(difference.flatten()[worst]),
                bound=float(bounds[name].flatten()[worst]),
            )
        )
    return findings


def relative(what: str, ours: Tensors, reference: Tensors, bound: float) -> Finding:
    names = sorted(set(ours) & set(reference))
    difference = distance([(ours[name], reference[name]) for name in names])
    size = distance([(reference[name].where(reference[name].isfinite(), 0), None) for name in names])
    return Finding(
        passed=difference <= bound * size,
        what=f"{what} differs from the serial simulation by {difference:.3g}, of {size:.3g}",
        difference=difference,
        bound=bound * size,
    )


def compare_update(cell: Cell, updated: Tensors, expected: Tensors, start: Tensors) -> Finding:
    """The trainer's update against the replayed one: the same bits, or nearly the same way from the start."""
    names = sorted(expected)
    difference = distance([(updated[name], expected[name]) for name in names])
    way = distance([(expected[name], start[name].to(expected[name].device)) for name in names])
    size = distance([(expected[name], None) for name in names])
    bound = 0.0 if exact_update(cell) else UPDATE_TOLERANCE * way + UNIT_ROUNDOFF * size
    return Finding(
        # A replayed update that overflowed would allow everything.
        passed=math.isfinite(bound) and difference <= bound,
        what=f"update differs from the serial simulation by {difference:.3g}, of a way of {way:.3g}",
        difference=difference,
        bound=bound,
    )


def distance(pairs: list[tuple[Tensor, Tensor | None]]) -> float:
    """L2 norm of the differences, or of what stands alone; equal infinities differ by nothing."""
    squares = 0.0
    for first, second in pairs:
        difference = first.double()
        if second is not None:
            difference = torch.where(first == second, 0.0, difference - second.double())
        squares += float(difference.square().sum())
    return math.sqrt(squares)
