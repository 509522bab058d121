"""Results of training on real data: loss curves, and the time to a loss that all of them reach.

Synthetic samples are noise with random targets. A model can only memorize them, so their loss is not
compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reports.analysis.figures import CellFigures, OfCell
from reports.analysis.scaling import Curve
from results.cell import Cell, exchange_label
from results.run import RunResult
from results.store import Study

WINDOW_SHARE = 10
"""A loss is the mean over the last tenth of the compared samples, because losses of single batches vary."""

FINAL_SHARE = 5
"""The final loss of a training is the mean over the last fifth of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve(OfCell):
    """The losses of a run of a cell."""

    run: RunResult

    @property
    def label(self) -> str:
        return exchange_label(self.cell)

    @property
    def first(self) -> int:
        """Steps of the training before the first loss, which a proof checks."""
        return self.run.first_steps or 0

    @property
    def steps(self) -> list[int]:
        """The last step of each loss, counted from 1, the first step of the training."""
        return loss_steps(self.run)

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.cell.global_batch

    @property
    def samples(self) -> int:
        """Samples that were trained on until the last loss."""
        return self.steps[-1] * self.global_batch

    def loss_after(self, samples: float, *, window: float) -> float:
        """The mean loss of the last `window` samples up to `samples`, as far as losses were recorded."""
        ends = [step * self.global_batch for step in self.steps]
        return mean_until(samples, self.run.losses, ends, self.first * self.global_batch, window=window)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGroup:
    """Curves of one piece of work at one size, with several exchanges.

    Warm-up ends after a different number of steps in each run, so losses are compared after the samples that
    all curves were trained on.
    """

    gpus: int
    curves: tuple[LossCurve, ...]
    late: tuple[LossCurve, ...] = ()
    """Curves left out: their first loss came after the others had ended, as after a long proof."""

    @property
    def samples(self) -> int:
        """The samples that every curve was trained on."""
        return min(curve.samples for curve in self.curves)

    @property
    def target(self) -> float:
        """The worst loss after those samples, so that every curve reaches it."""
        return max(self.final(curve) for curve in self.curves)

    def final(self, curve: LossCurve) -> float:
        """The loss of a curve after the common samples."""
        return self._smoothed(curve, self.samples)

    def smoothed(self, curve: LossCurve) -> list[float]:
        """The running mean at each loss of a curve."""
        return [self._smoothed(curve, step * curve.global_batch) for step in curve.steps]

    def steps_to_target(self, curve: LossCurve) -> int:
        """The first step at which the running mean is at or below the target, at the latest the step at which
        the common samples end."""
        common = math.ceil(self.samples / curve.global_batch)
        before = zip(curve.steps, self.smoothed(curve), strict=True)
        return next((step for step, loss in before if step < common and loss <= self.target), common)

    def ns_to_target(self, curve: LossCurve) -> float:
        """Steps to the target times the cell's mean step time, without start-up and checks."""
        return self.steps_to_target(curve) * curve.figures.step_ns.value

    def _smoothed(self, curve: LossCurve, samples: int) -> float:
        return curve.loss_after(samples, window=self.samples / WINDOW_SHARE)


def trained_samples(cell: Cell, run: RunResult) -> int | None:
    """Samples of all replicas that a run was trained on up to its last loss; None if it was not recorded."""
    if run.loss_last is None or run.first_steps is None:
        return None
    return (run.first_steps + run.warmup_steps + run.steps) * cell.global_batch


def loss_steps(run: RunResult) -> list[int]:
    """The last step of each of a run's losses, counted from 1, the first step of the training."""
    first, every = run.first_steps or 0, run.losses_every
    last = first + run.warmup_steps + run.steps
    return [min(first + place * every, last) for place in range(1, len(run.losses) + 1)]


def mean_until(
    end: float, losses: Sequence[float], ends: Sequence[int], begin: int = 0, *, window: float
) -> float:
    """The mean loss of the last `window` steps or samples up to `end`, as far as losses were recorded. Each
    loss is a mean from the end before it to its own; the first one begins at `begin`."""
    weighted = weights = 0.0
    for loss, upto in zip(losses, ends, strict=True):
        weight = max(0.0, min(upto, end) - max(begin, end - window))
        weighted, weights, begin = weighted + weight * loss, weights + weight, upto
    return weighted / weights


def final_losses(_: Study, runs: Sequence[RunResult]) -> dict[int, float | None]:
    """Return the final losses of the newest run (`Kind.losses`) by powers of two: runs end after unequal
    numbers of steps. A window has at least one recorded loss."""
    run = runs[-1]
    if not run.losses:
        return {}
    ends, first, every = loss_steps(run), run.first_steps or 0, run.losses_every
    # The last loss of a curve that is cut may have fewer steps. Other runs may reach one power more.
    cut = run.loss_last is None
    known = ends[-1] - every * cut
    fewest = max(first, FINAL_SHARE * every - 1).bit_length()
    powers = range(fewest, (first + run.warmup_steps + run.steps).bit_length() + cut)
    return {
        n: mean_until(n, run.losses, ends, first, window=n / FINAL_SHARE) if n <= known else None
        for n in (2**power for power in powers)
    }


def loss_group(curves: Sequence[Curve]) -> LossGroup | None:
    """The loss curves of one piece of work, at the largest size that most series have; None without
    curves."""
    sizes: dict[int, list[LossCurve]] = {}
    for curve in curves:
        for point in curve.points:
            # The newest run that kept its losses.
            of_runs = (loss_curve(point.figures, run) for run in reversed(point.figures.runs))
            found = next((one for one in of_runs if one is not None), None)
            if found is not None:
                sizes.setdefault(point.gpus, []).append(found)
    if not sizes:
        return None
    gpus = max(sizes, key=lambda size: (len(sizes[size]), size))
    common = min(curve.samples for curve in sizes[gpus])
    late = [curve for curve in sizes[gpus] if curve.first * curve.global_batch >= common]
    return LossGroup(gpus=gpus, curves=tuple(c for c in sizes[gpus] if c not in late), late=tuple(late))


def loss_curve(figures: CellFigures, run: RunResult) -> LossCurve | None:
    """The losses of one run of a cell; None if it did not record them, or its samples are synthetic."""
    if figures.cell.synthetic or len(run.losses) < 2:
        return None
    return LossCurve(figures=figures, run=run)
