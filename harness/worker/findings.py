"""Comparisons of what a strategy computed with what it must come to, and the bounds they allow.

The bound. On CPU in fp32, uncompiled, both sides do the same local arithmetic, so that only the order of
the sum over replicas may differ: for two replicas not at all (a + b = b + a, and halving is exact), for p
replicas by 2 gamma(p + 1) sum |g_r| / p per element, gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., section 4.2, for either order; p - 1 sums, and two roundings
where shares are multiplied by a rounded 1 / p). Buffers of every replica are equal. Elsewhere kernels need
not be reproducible: the whole gradient, and replica 0's buffers, must agree in relative L2 norm within
`TOLERANCE`.

Where several ranks compute one replica together, each has parameters of its own to get wrong, and a small one
would not be seen in the norm of all: there every parameter's gradient must agree by itself. Its bound is in
parts of its own norm, but at least of `SMALL_SHARE` of the whole one: the gradients of some parameters are
zero but for rounding (a bias of attention's keys, or one before BatchNorm), which differs wholly. What is
right (gpt-nano and llama-nano, split within layers and between them) stayed within a hundredth of `TOLERANCE`
of a parameter's own norm in fp32, and within 0.4 of it in bf16. In fp16, where the reference loses small
values of gradients that are not scaled, the weights of attention's queries needed a share of 0.003.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.worker.exactness import exact_arithmetic, exact_update
from harness.worker.reference import UNIT_ROUNDOFF, History, Reference, finite
from results.cell import Cell, Precision

TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
"""Relative L2 difference of the gradient that is allowed where kernels need not be reproducible."""
SMALL_SHARE = 1e-2
"""Of the L2 norm of all gradients: that of one parameter counts for no less where each has its own bound."""
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


def compare_gradients(
    cell: Cell, gradients: Tensors, buffers: Tensors, reference: Reference
) -> list[Finding]:
    """Gradients, and the buffers that a replica left, against the reference."""
    findings = compare_surroundings(cell, gradients, buffers, reference)
    if exact_arithmetic(cell):
        findings += elementwise("gradient", gradients, reference.gradients, reference.bounds)
    elif finite(gradients):
        compare = relative_each if cell.model_parallel > 1 else relative
        findings += compare("gradient", gradients, reference.gradients, TOLERANCE[cell.precision])
    return findings


def compare_surroundings(
    cell: Cell, gradients: Tensors, buffers: Tensors, reference: Reference
) -> list[Finding]:
    """Which parameters have a gradient, and the buffers that a replica left, against the reference."""
    tolerance = 0.0 if exact_arithmetic(cell) else TOLERANCE[cell.precision]
    return [
        same_names(gradients, reference.gradients),
        *relative("buffers", buffers, reference.buffers, tolerance),
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


def relative(what: str, ours: Tensors, reference: Tensors, bound: float) -> list[Finding]:
    names = sorted(set(ours) & set(reference))
    difference = distance([(ours[name], reference[name]) for name in names])
    size = _size([reference[name] for name in names])
    return [_within(what, difference, size, bound * size)]


def relative_each(what: str, ours: Tensors, reference: Tensors, bound: float) -> list[Finding]:
    """Every tensor by itself, with `SMALL_SHARE` of the norm of all in the place of a smaller one."""
    sizes = {name: _size([reference[name]]) for name in sorted(set(ours) & set(reference))}
    least = SMALL_SHARE * math.hypot(*sizes.values())
    return [
        _within(
            f"{what} of {name}", distance([(ours[name], reference[name])]), size, bound * max(size, least)
        )
        for name, size in sizes.items()
    ]


def _within(what: str, difference: float, size: float, bound: float) -> Finding:
    return Finding(
        passed=difference <= bound,
        what=f"{what} differs from the serial simulation by {difference:.3g}, of {size:.3g}",
        difference=difference,
        bound=bound,
    )


def _size(values: list[Tensor]) -> float:
    """L2 norm of what is finite."""
    return distance([(value.where(value.isfinite(), 0), None) for value in values])


def compare_history(cell: Cell, history: History, replayed: History) -> list[Finding]:
    """The optimizer's state that an update begins with, against what the replay of the one before left: the
    same bits, or nearly, in every value of every parameter."""
    tolerance = 0.0 if exact_update(cell) else UPDATE_TOLERANCE
    findings = []
    for name in sorted(set(history) | set(replayed)):
        ours, theirs = history.get(name, {}), replayed.get(name, {})
        for key in sorted(set(ours) | set(theirs)):
            difference, size = _between(ours.get(key), theirs.get(key))
            findings.append(
                Finding(
                    passed=difference <= tolerance * size,
                    what=f"optimizer state of {name} differs from the replayed one in {key}",
                    difference=difference,
                    bound=tolerance * size,
                )
            )
    return findings


def _between(ours: object, replayed: object) -> tuple[float, float]:
    """How far apart two values of a state are, and the size of the replayed one; all but tensors of one shape
    are equal or not."""
    if isinstance(ours, Tensor) and isinstance(replayed, Tensor):
        if ours.shape == replayed.shape:
            return distance([(ours, replayed)]), _size([replayed])
        return 1.0, 0.0
    alike = type(ours) is type(replayed) and ours == replayed
    return float(not alike), 0.0


def compare_update(cell: Cell, updated: Tensors, expected: Tensors, start: Tensors) -> Finding:
    """The trainer's update against the replayed one: the same bits, or nearly the same way from the start."""
    names = sorted(expected)
    difference = distance([(updated[name], expected[name]) for name in names])
    way = distance([(expected[name], start[name]) for name in names])
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
