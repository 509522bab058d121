"""What training came to where the data is real: loss curves, and the time to a loss that all of them reach.

Synthetic samples are noise with random targets: a model can only learn them by heart, and its loss says
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.analysis.figures import CellFigures
from reports.analysis.scaling import Curve
from results.cell import Cell

_SYNTHETIC = "synthetic"
_WINDOW_SHARE = 10
"""A loss is smoothed over a tenth of its curve's points: losses of single batches jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The losses of a cell's newest run that kept them."""

    label: str
    """How gradients travel: `ddp + topk:0.01`."""
    figures: CellFigures
    losses: tuple[float, ...]
    """The mean over ranks."""
    every: int
    """Steps that each of them is the mean of."""
    first: int
    """Steps of the training before them, which a proof checks."""

    @property
    def steps(self) -> list[int]:
        """The last step that each loss is of, from 1, the very first of the training."""
        return [self.first + (place + 1) * self.every for place in range(len(self.losses))]

    @property
    def smoothed(self) -> list[float]:
        """The mean over the last tenth of the points up to each (at the start: of those there are)."""
        window = max(1, len(self.losses) // _WINDOW_SHARE)
        parts = [self.losses[max(0, end - window) : end] for end in range(1, len(self.losses) + 1)]
        return [sum(part) / len(part) for part in parts]

    @property
    def final(self) -> float:
        return self.smoothed[-1]

    def steps_to(self, target: float) -> int | None:
        """The first step whose smoothed loss is at or below `target`; None if there is none."""
        return next(
            (step for step, loss in zip(self.steps, self.smoothed, strict=True) if loss <= target), None
        )

    def ns_to(self, target: float) -> float | None:
        """Steps to the target times the cell's mean step time: start-up and checks are not in it."""
        steps = self.steps_to(target)
        return None if steps is None else steps * self.figures.step_ns.value


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGroup:
    """Curves of one piece of work at one size: the same samples in each step, exchanged in several ways."""

    gpus: int
    curves: tuple[LossCurve, ...]

    @property
    def target(self) -> float:
        """The worst final loss, so that every curve reaches it."""
        return max(curve.final for curve in self.curves)


def is_real(cell: Cell) -> bool:
    """Whether the cell trains on a data set with something to learn."""
    return cell.dataset.partition(":")[0] != _SYNTHETIC


def loss_group(curves: Sequence[Curve]) -> LossGroup | None:
    """The loss curves of one piece of work, at the largest size that most series have; None for none."""
    sizes: dict[int, list[LossCurve]] = {}
    for curve in curves:
        for point in curve.points:
            found = _loss_curve(curve.key.exchange, point.figures)
            if found is not None:
                sizes.setdefault(point.gpus, []).append(found)
    if not sizes:
        return None
    gpus = max(sizes, key=lambda size: (len(sizes[size]), size))
    return LossGroup(gpus=gpus, curves=tuple(sizes[gpus]))


def _loss_curve(label: str, figures: CellFigures) -> LossCurve | None:
    if not is_real(figures.cell):
        return None
    kept = [run for run in figures.runs if len(run.losses) > 1]
    if not kept:
        return None
    newest = kept[-1]
    return LossCurve(
        label=label,
        figures=figures,
        losses=newest.losses,
        every=newest.losses_every,
        first=newest.first_steps or 0,
    )
