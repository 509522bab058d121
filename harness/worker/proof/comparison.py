"""Comparisons of what a strategy computed with the reference, and the bounds that they allow.

The bound. On CPU in fp32, uncompiled, both sides do the same local arithmetic, so that only the order of the
sum over replicas may differ: for two replicas not at all (a + b = b + a, and halving is exact), for p
replicas by 2 gamma(p + 1) sum |g_r| / p per element, gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., section 4.2, for either order; p - 1 sums, and two roundings
where shares are multiplied by a rounded 1 / p). Within a replica, two orders of the sum are right for a
tensor that several blocks use (`ReferenceModel.by_blocks`): gradients that differ from a simulation in one
order are compared with a simulation in the other, within the same bounds. Buffers of every replica are equal.
Elsewhere kernels need not be reproducible: the whole gradient, and replica 0's buffers, must agree in
relative L2 norm within `TOLERANCE`.

Where several ranks compute one replica together, each can get its own parameters wrong, and a small one would
not be seen in the norm of all: there every parameter's gradient must agree by itself. Its bound is
`TOLERANCE` times its norm, but at least `ROUNDING` times the norm of all. The gradients of some parameters
are zero but for rounding (a bias of attention's keys, or one before BatchNorm). Rounding is a share of the
terms of a sum, and their terms are as large as the terms of other gradients, which the norm of all
represents.

Gradients were compared with a computation that takes products and sums in halves, as another kernel may. The
gradients of gpt-nano and llama-nano differ by at most 0.01 of `TOLERANCE` times their norm in fp32, 0.3 in
bf16 and 0.12 in fp16. Gradients that are only rounding differ by at most 0.9 units of roundoff of the norm of
all in fp32, and by 0.4 in bf16 and fp16 (attention of 8 features and a BatchNorm of 16, 4 to 16 samples).

In float8 a rounding of bf16 before a product may be the next number of e4m3, a sixteenth away. By the same
computation in halves, gradients of gpt-nano and llama-nano differ by at most 0.063 of the norm of all, and
one parameter's by 0.14 of its own. Gradients in bf16 differ by no more than 0.08 from those in float8. So no
bound tells the two precisions apart where kernels differ: the distance from fp32 does (0.005 to 0.015 in
bf16, 0.07 to 0.08 in float8). On one CPU the gradients of the simulation are equal, or differ as in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from harness.worker.proof.reference import (
    SMALLEST_NORMAL,
    UNIT_ROUNDOFF,
    History,
    Reference,
    Replay,
    computes_together,
    dense,
    exact_arithmetic,
    finite,
)
from results.cell import Cell, Precision
from strategies.catalog import STRATEGIES

TOLERANCE: dict[Precision, float] = {
    "fp32": 1e-4,
    "tf32": 1e-2,
    "bf16": 3e-2,
    "fp16": 1e-2,
    "float8": 0.2,
}
"""Relative L2 difference of the gradient that is allowed where kernels need not be reproducible."""
ROUNDING: dict[Precision, float] = {
    "fp32": 2.0**-20,
    "tf32": 2.0**-11,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "float8": 2.0**-8,
}
"""Difference that every parameter is allowed if each has its own bound, relative to the L2 norm of all
gradients. One unit roundoff; in fp32, where even 16 are little, 16."""

MORE_THAN_ROUNDING = 3.0
"""Factor of the change by one rounding of every parameter: a larger difference is a defect."""
LARGEST_CHANGE_OF_NORM = 0.25
"""Largest change of the norm of all gradients, in parts of it: the mean of two gradients that have nothing in
common is shorter than each by 0.29, and one that misses a division by 2 longer by 1."""
NEAR_FP32 = 0.1
"""Part of the distance of half precision from fp32: gradients that are nearer were computed in fp32."""
NEAR_BF16 = 0.5
"""The same of float8: gradients that are nearer were computed in fp32 or bf16."""

Tensors = Mapping[str, Tensor]


def tolerance_of(cell: Cell) -> float:
    """Return the relative L2 difference of the gradient that a cell may have."""
    half = STRATEGIES.facts(cell.strategy).averages_half
    return max(TOLERANCE[cell.precision], TOLERANCE["fp16"] if half else 0.0)


ProofSubject = Literal[
    "gradient",
    "precision",
    "names",
    "buffers",
    "update",
    "state",
    "exchange",
    "promise",
    "samples",
    "choices",
    "fingerprints",
]
"""The subject of a finding: gradients, or the average that was made of them; their precision; which
parameters have a gradient; buffers; updates; the optimizer's state; whether an exchange applied anything; a
compressor's promise; the samples that a step used; the discrete choices of a model; the fingerprints of
ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofFinding:
    """The result of one comparison."""

    passed: bool
    of: ProofSubject
    what: str
    """The sentence of the failure."""
    difference: float
    bound: float

    @classmethod
    def within(cls, of: ProofSubject, what: str, difference: float, bound: float) -> Self:
        """Return a finding that passes if the difference is at most `bound`."""
        return cls(passed=difference <= bound, of=of, what=what, difference=difference, bound=bound)


def compare_gradients(cell: Cell, gradients: Tensors, reference: Reference) -> list[ProofFinding]:
    if exact_arithmetic(cell):
        return elementwise(gradients, reference.gradients, reference.bounds)
    if not finite(gradients):
        return []
    both, tolerance = (gradients, reference.gradients), tolerance_of(cell)
    if computes_together(cell):
        return relative_each(*both, tolerance, ROUNDING[cell.precision])
    return relative("gradient", *both, tolerance)


def compare_surroundings(
    cell: Cell, gradients: Tensors, buffers: Tensors, reference: Reference
) -> list[ProofFinding]:
    """Compare which parameters have a gradient, and the buffers that a replica left, with the reference."""
    different = sorted(set(gradients) ^ set(reference.gradients))
    what = f"gradients exist on one side only: {', '.join(different[:3])}"
    names = ProofFinding.within("names", what, float(len(different)), 0.0)
    return [names, *compare_buffers(cell, buffers, reference)]


def compare_buffers(cell: Cell, buffers: Tensors, reference: Reference) -> list[ProofFinding]:
    """Compare the buffers that a replica left with the reference."""
    tolerance = 0.0 if exact_arithmetic(cell) else tolerance_of(cell)
    return relative("buffers", buffers, reference.buffers, tolerance)


def elementwise(ours: Tensors, reference: Tensors, bounds: Tensors) -> list[ProofFinding]:
    """Compare every gradient element by element, and report the element that is worst by its bound."""
    findings = []
    for name in sorted(set(ours) & set(reference)):
        worst, bound = 0.0, float(bounds[name].min())
        if not same_values(ours[name], reference[name]):
            difference = (ours[name] - reference[name]).abs()
            at = int((difference - bounds[name]).argmax())
            worst, bound = float(difference.flatten()[at]), float(bounds[name].flatten()[at])
        what = (
            f"gradient of {name} differs from the serial simulation by {worst:.3g} in an element, more than "
            f"{bound:.3g}"
        )
        findings.append(ProofFinding.within("gradient", what, worst, bound))
    return findings


def relative(of: ProofSubject, ours: Tensors, reference: Tensors, bound: float) -> list[ProofFinding]:
    """Compare all tensors together, within `bound` of their norm."""
    names = sorted(set(ours) & set(reference))
    difference = distance([(ours[name], reference[name]) for name in names])
    size = _size([reference[name] for name in names])
    return [_within(of, of, difference, size, bound * size)]


def relative_each(ours: Tensors, reference: Tensors, bound: float, least: float) -> list[ProofFinding]:
    """Compare each gradient, within `bound` times its norm or `least` times the norm of all."""
    sizes = {name: _size([reference[name]]) for name in sorted(set(ours) & set(reference))}
    allowed = least * math.hypot(*sizes.values())
    findings = []
    for name, size in sizes.items():
        difference = distance([(ours[name], reference[name])])
        what = f"gradient of {name}"
        findings.append(_within("gradient", what, difference, size, max(bound * size, allowed)))
    return findings


def compare_precision(cell: Cell, ours: Tensors, reference: Tensors, in_fp32: Tensors) -> list[ProofFinding]:
    """Compare two distances from gradients in fp32: the distance of a cell's gradients in half precision or
    float8, and the distance of the reference.

    Returns no finding if one of the three sets of gradients is not known or not finite.
    """
    names = sorted(set(ours) & set(reference) & set(in_fp32))
    if not names or not all(map(finite, (ours, reference, in_fp32))):
        return []
    eight = cell.precision == "float8"
    near, wider = (NEAR_BF16, "fp32 or bf16") if eight else (NEAR_FP32, "fp32")
    found, asked = (distance([(each[name], in_fp32[name]) for name in names]) for each in (ours, reference))
    return [
        ProofFinding(
            passed=found >= near * asked,
            of="precision",
            what=f"gradients differ by {found:.3g} from a simulation in fp32, and one in {cell.precision} by "
            f"{asked:.3g}: the step was computed in {wider}",
            difference=asked - found,
            bound=(1 - near) * asked,
        )
    ]


def _within(of: ProofSubject, what: str, difference: float, size: float, bound: float) -> ProofFinding:
    differs = f"{what} differs from the serial simulation by {difference:.3g}, of {size:.3g}"
    return ProofFinding.within(of, differs, difference, bound)


def _size(values: list[Tensor]) -> float:
    """Return the L2 norm of the finite values."""
    return distance([(value.where(value.isfinite(), 0), None) for value in values])


def compare_history(history: History, replay: Replay) -> list[ProofFinding]:
    """Compare the optimizer's state before an update with what the replay of the update before it left.

    Every value of every parameter must have the same bits, or nearly. Both are made of the same gradients
    element by element, so that the norm of a value is the size of what is summed in it; among the smallest
    numbers (squares of a gradient that is only rounding) rounding is absolute.
    """
    findings = []
    for name in sorted(set(history) | set(replay.history)):
        ours, theirs = history.get(name, {}), replay.history.get(name, {})
        for key in sorted(set(ours) | set(theirs)):
            difference, bound = _between(ours.get(key), theirs.get(key), replay.tolerance)
            what = f"optimizer state of {name} differs from the replayed one in {key}"
            findings.append(ProofFinding.within("state", what, difference, bound))
    return findings


def _between(ours: object, replayed: object, tolerance: float) -> tuple[float, float]:
    """Return how far apart two values of a state are, and may be.

    All values but tensors of one shape are equal or not.
    """
    if isinstance(ours, Tensor) and isinstance(replayed, Tensor):
        if ours.shape == replayed.shape:
            ours, replayed = dense(ours), dense(replayed)
            smallest = SMALLEST_NORMAL * math.sqrt(replayed.numel())
            return distance([(ours, replayed)]), tolerance * (_size([replayed]) + smallest)
        return 1.0, 0.0
    alike = type(ours) is type(replayed) and ours == replayed
    return float(not alike), 0.0


def compare_update(updated: Tensors, replay: Replay, start: Tensors) -> ProofFinding:
    """Compare the trainer's update with the replayed one: equal bits, or nearly the same change from
    `start`."""
    expected, names = replay.parameters, sorted(replay.parameters)
    difference = distance([(updated[name], expected[name]) for name in names])
    if not replay.tolerance and difference == 0:
        return ProofFinding(passed=True, of="update", what="", difference=0.0, bound=0.0)
    way = distance([(expected[name], start[name]) for name in names])
    size = distance([(expected[name], None) for name in names])
    bound = replay.tolerance * way + UNIT_ROUNDOFF * size if replay.tolerance else 0.0
    return ProofFinding(
        # A replayed update that overflowed would allow everything.
        passed=math.isfinite(bound) and difference <= bound,
        of="update",
        what=f"update differs from the serial simulation by {difference:.3g}, of a change of {way:.3g}",
        difference=difference,
        bound=bound,
    )


def wide(values: Tensor) -> torch.dtype:
    """Return the type in double precision, complex for complex values."""
    return torch.promote_types(values.dtype, torch.float64)


def same_values(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have equal values and no NaN, which is much faster than their distance."""
    return first.dtype == second.dtype and torch.equal(first, second)


def distance(pairs: list[tuple[Tensor, Tensor | None]]) -> float:
    """Return the L2 norm of the differences of all pairs. A first value without a second one counts as its
    own difference, and equal infinities do not differ."""
    squares = 0.0
    for first, second in pairs:
        if second is not None and same_values(first, second):
            continue
        difference = first.to(wide(first))
        if second is not None:
            difference = torch.where(first == second, 0.0, difference - second.to(difference.dtype))
        squares += float(difference.abs().square().sum())
    return math.sqrt(squares)


def size_of(values: Tensors) -> float:
    """Return the L2 norm of all finite values together, and never 0, so that it may divide."""
    return max(_size(list(values.values())), SMALLEST_NORMAL)


def explained_by_rounding(
    cell: Cell,
    findings: Sequence[ProofFinding],
    ours: Tensors,
    reference: Tensors,
    exact: Tensors,
    rounded: Tensors,
) -> str | None:
    """Return why gradients that failed may be right, if rounding may explain the difference; else None.

    A compiler rounds at other places. Some models (BatchNorm in half precision, at first) amplify rounding
    until the gradient of a right step has another direction. A second simulation of one replica (`rounded`;
    the first one is `exact`), whose parameters are off by one rounding of the cell's precision, shows how
    much that is. The norm of all gradients hardly changes by it, and still has to equal the norm of the
    simulation.
    """
    size, size_of_one = size_of(reference), size_of(exact)
    found = max(finding.difference for finding in findings if not finding.passed) / size
    by_rounding = distance([(rounded[name], exact[name]) for name in exact]) / size_of_one
    # A simulation with values that are not finite does not show how much rounding changes.
    if not TOLERANCE[cell.precision] < by_rounding < math.inf or found > MORE_THAN_ROUNDING * by_rounding:
        return None
    longer = abs(size_of(ours) / size - 1)
    longer_by_rounding = max(TOLERANCE[cell.precision], abs(size_of(rounded) / size_of_one - 1))
    if longer > min(MORE_THAN_ROUNDING * longer_by_rounding, LARGEST_CHANGE_OF_NORM):
        return None
    return (
        f"gradients differ from a serial simulation by {found:.2g} of their L2 norm, and by "
        f"{by_rounding:.2g} where parameters are off by one rounding of {cell.precision}; the norm "
        f"itself differs by {longer:.2g}"
    )
