"""The proof that a cell trains: its distributed step against a serial simulation of the same step.

For three steps, all ranks compute gradients by the strategy under test; rank 0 then computes every
replica's micro-batches one after another, in a plain loop of its own, from the same parameters, buffers and
random state, and adds the gradients up in rank order. Replicas, not one big batch: BatchNorm and dropout
depend on how samples are grouped. The reference starts each step from the parameters of the strategy, so
that errors of one step are judged alone, and then replays the update from the strategy's own gradients.

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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.worker.agreement import hash_number, replicas_agree
from harness.worker.control import Control
from harness.worker.failure import out_of_memory
from harness.worker.measure import DivergedError
from harness.worker.parts import Parts
from harness.worker.reference import (
    UNIT_ROUNDOFF,
    Reference,
    TooLongError,
    dense,
    finite,
    replay_update,
    seed_step,
    simulate_step,
    state_of,
)
from results.cell import Cell, Precision
from results.record import Proof
from strategies.parallel import Batch
from strategies.trainer import Trainer

STEPS = 3
LONGEST_S = 60.0
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2}
"""Relative L2 difference of the gradient that is allowed where kernels need not be reproducible."""
UPDATE_TOLERANCE = 1e-3
"""The same of the update by the same gradients, which is elementwise and in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one comparison came out."""

    passed: bool
    what: str
    difference: float
    bound: float


def exact_arithmetic(cell: Cell) -> bool:
    """Whether two computations of the same micro-batch give the same bits."""
    return cell.device == "cpu" and cell.precision == "fp32" and not cell.compile


def prove(parts: Parts, trainer: Trainer, batches: Iterator[Batch], control: Control) -> Proof:
    """Take the cell's first steps and compare them with the reference; collective.

    All ranks learn whether it passed; what was compared is rank 0's to say. Where the reference takes
    more than a minute or more memory than there is, the weaker proof is given, and says that it is: the
    replicas stay equal. Raises DivergedError on all ranks if one has a loss that is not finite.
    """
    findings: list[Finding] = []
    stale = False
    for step in range(STEPS):
        # In host memory: a device that the cell nearly fills has no room for it.
        start = {name: value.to("cpu", copy=True) for name, value in state_of(trainer.model.bare)}
        seed_step(parts.cell.seed, step, parts.rank.rank)
        loss = trainer.compute_gradients(batches)
        if control.largest([float(not loss.isfinite())])[0]:
            raise DivergedError
        reference, obstacle = _attempt(parts, start, step) if parts.rank.rank == 0 else (None, "")
        if control.from_first(float(reference is None)):
            trainer.update()
            return _replica_agreement(trainer, control, obstacle)
        if exact_arithmetic(parts.cell):
            stale |= not _buffers_equal(parts, trainer, control, reference)
        gradients = _gradients(trainer)
        expected = {}
        if reference is not None:
            findings += compare_gradients(parts.cell, trainer, gradients, reference)
            expected = replay_update(parts, start, gradients, trainer)
        trainer.update()
        if reference is not None:
            updated = dict(trainer.model.named_parameters())
            findings.append(compare_update(parts.cell, updated, expected, start))
    agreed = replicas_agree(trainer, control)
    different = any(not finding.passed for finding in findings)
    anywhere = control.largest([float(different or stale), float(stale)])
    return _verdict(parts.cell, findings, agreed=agreed, failed=bool(anywhere[0]), stale=bool(anywhere[1]))


def take_first_steps(parts: Parts, trainer: Trainer, batches: Iterator[Batch]) -> None:
    """The steps that a proof takes, without one: a run that is not proven goes the same way."""
    for step in range(STEPS):
        seed_step(parts.cell.seed, step, parts.rank.rank)
        trainer.step(batches)


def _attempt(parts: Parts, start: dict[str, Tensor], step: int) -> tuple[Reference | None, str]:
    """The reference of a step, or what stands in its way."""
    try:
        return simulate_step(parts, start, step, longest_s=LONGEST_S / STEPS), ""
    except TooLongError as error:
        return None, f"a serial simulation would take about {STEPS * error.seconds:.0f} s"
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None, "a serial simulation does not fit in memory beside the model"


def _buffers_equal(parts: Parts, trainer: Trainer, control: Control, reference: Reference | None) -> bool:
    """Whether this replica's buffers are, bit for bit, what rank 0 computed for it; collective."""
    none = [0.0] * parts.cell.replicas
    expected = control.largest(none if reference is None else reference.buffer_hashes)
    return hash_number(trainer.model.bare.named_buffers()) == expected[parts.rank.rank]


def _verdict(cell: Cell, findings: list[Finding], *, agreed: bool, failed: bool, stale: bool) -> Proof:
    worst = max(findings, key=lambda finding: (not finding.passed, finding.difference), default=None)
    if failed or not agreed:
        detail = "replicas differ after the update" if not agreed else _failure(worst, stale=stale)
        if cell.workload.startswith("py:"):
            detail += (
                "; a model that draws from another generator than those of torch, numpy and random, "
                "or keeps state outside of its parameters and buffers, cannot be checked"
            )
        return Proof(method="serial-simulation", passed=False, detail=detail)
    gradients = [finding for finding in findings if finding.what.startswith("gradient ")]
    if findings and not gradients:
        return _weaker(agreed, "the loss scaler left out every step of the simulation: gradients overflowed")
    return Proof(
        method="serial-simulation",
        passed=True,
        detail=f"{STEPS} steps of {cell.replicas} replicas recomputed on one device; {_rule(cell)}",
        max_difference=max((finding.difference for finding in gradients), default=None),
        max_bound=max((finding.bound for finding in gradients), default=None),
    )


def _failure(worst: Finding | None, *, stale: bool) -> str:
    """What this rank knows of it: gradients and updates are compared on rank 0."""
    if worst is not None and not worst.passed:
        return worst.what
    return "a replica's buffers differ from the serial simulation" if stale else "see rank 0"


def _rule(cell: Cell) -> str:
    if not exact_arithmetic(cell):
        return f"gradients agree within {TOLERANCE[cell.precision]:g} of their L2 norm"
    if cell.replicas <= 2:
        return "gradients, buffers and updates are equal bit for bit"
    return "gradients agree within the rounding of a sum in another order; updates are equal bit for bit"


def _replica_agreement(trainer: Trainer, control: Control, obstacle: str) -> Proof:
    return _weaker(replicas_agree(trainer, control), obstacle)


def _weaker(agreed: bool, obstacle: str) -> Proof:
    """The proof that needs no reference; on one device it says nothing but that the loss is finite."""
    found = "are equal bit for bit" if agreed else "differ"
    return Proof(
        method="replica-agreement",
        passed=agreed,
        detail=f"the replicas' parameters {found} after the update; {obstacle}",
    )


def _gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Whole gradients, the loss scaler's factor taken out."""
    scale = trainer.scaler.get_scale()
    return {name: dense(gradient) / scale for name, gradient in trainer.model.named_gradients()}


def compare_gradients(
    cell: Cell, trainer: Trainer, gradients: dict[str, Tensor], reference: Reference
) -> list[Finding]:
    """Gradients, and the buffers that replica 0 left, against the reference."""
    exact = exact_arithmetic(cell)
    tolerance = TOLERANCE[cell.precision]
    buffers = dict(trainer.model.bare.named_buffers())
    findings = [
        _same_names(gradients, reference.gradients),
        _relative("buffers", buffers, reference.buffers, 0.0 if exact else tolerance),
    ]
    if exact:
        findings += _elementwise("gradient", gradients, reference.gradients, reference.bounds)
    elif finite(gradients):
        findings.append(_relative("gradient", gradients, reference.gradients, tolerance))
    return findings


def _same_names(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> Finding:
    different = sorted(set(ours) ^ set(reference))
    return Finding(
        passed=not different,
        what=f"gradients exist on one side only: {', '.join(different[:3])}",
        difference=float(len(different)),
        bound=0.0,
    )


def _elementwise(
    what: str, ours: dict[str, Tensor], reference: dict[str, Tensor], bounds: dict[str, Tensor]
) -> list[Finding]:
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


def _relative(what: str, ours: dict[str, Tensor], reference: dict[str, Tensor], bound: float) -> Finding:
    names = sorted(set(ours) & set(reference))
    distance = _distance([(ours[name], reference[name]) for name in names])
    size = _distance([(reference[name].where(reference[name].isfinite(), 0), None) for name in names])
    return Finding(
        passed=distance <= bound * size,
        what=f"{what} differs from the serial simulation by {distance:.3g}, of {size:.3g}",
        difference=distance,
        bound=bound * size,
    )


def compare_update(
    cell: Cell, updated: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]
) -> Finding:
    """The trainer's update against the replayed one: the same bits, or nearly the same way from the start."""
    names = sorted(expected)
    distance = _distance([(updated[name], expected[name]) for name in names])
    way = _distance([(expected[name], start[name].to(expected[name].device)) for name in names])
    size = _distance([(expected[name], None) for name in names])
    bound = 0.0 if exact_arithmetic(cell) else UPDATE_TOLERANCE * way + UNIT_ROUNDOFF * size
    return Finding(
        # A replayed update that overflowed would allow everything.
        passed=math.isfinite(bound) and distance <= bound,
        what=f"update differs from the serial simulation by {distance:.3g}, of a way of {way:.3g}",
        difference=distance,
        bound=bound,
    )


def _distance(pairs: list[tuple[Tensor, Tensor | None]]) -> float:
    """L2 norm of the differences, or of what stands alone; equal infinities differ by nothing."""
    squares = 0.0
    for first, second in pairs:
        difference = first.double()
        if second is not None:
            difference = torch.where(first == second, 0.0, difference - second.double())
        squares += float(difference.square().sum())
    return math.sqrt(squares)
