"""The knee of a scaling curve: the last size up to which every growth still pays, and the odds of that.

From n to m devices the throughput X grows, and each added device brings (X(m) - X(n)) / (m - n). Over what
each device brought before, X(n) / n, that is the marginal yield

    (X(m) / X(n) - 1) / (m / n - 1)

1 on an ideal line, 0 where growing adds nothing. With E = (X(m) / X(n)) / (m / n), the efficiency of the
growth, it is 2 E - 1 for a doubling: 0.5 is E = 0.75. Unlike E it also sees that growing by a quarter added
nothing (E = 0.8), and does not blame growing eightfold for three doublings at once.

The best estimates decide: the knee is before the first growth whose yield, from the means of its runs, is
below `PAYS_FROM`. The odds of each size come
from resamples: the logarithms of a size's step times are taken as normal, with one variance for all sizes,
because a size has too few runs to know its own. A draw has a variance (scaled inverse chi-square), a mean for
each size (normal), and so a knee: the posterior under the reference prior (Gelman et al., Bayesian Data
Analysis, section 3.2). `make knee` measures how often the named size is the true one, and the odds
(docs/evidence.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from reports.analysis.figures import CellFigures
from reports.analysis.scaling import Curve, unlike_conditions
from reports.text import count, whole_percent
from results.statistics import Metric, ratio_of_runs

PAYS_FROM = 0.5
"""Marginal yield below which growing does not pay: an added device brings less than half of what each brought
before, which for a doubling is an efficiency of 75 %. A convention, not a law."""
SURE_FROM = 0.95
"""Odds from which on the report names no other size."""
DRAWS = 2000
LEAST_RUNS = 3
"""Runs of each deciding size that a study that grows by rounds needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth from one measured size to the next."""

    smaller: int
    larger: int
    marginal: Metric
    """Marginal yield."""

    @property
    def pays(self) -> bool:
        """Whether the best estimate of the yield reaches the threshold."""
        return self.marginal.value >= PAYS_FROM

    @property
    def text(self) -> str:
        """`going from 1 to 2 changes throughput by +47 % (41 to 52), and +50 % or more pays`."""
        ideal = 100 * (self.larger / self.smaller - 1)
        low, high = self.marginal.low, self.marginal.high
        ends = "" if low is None or high is None else f" ({round(low * ideal):,} to {round(high * ideal):,})"
        change, least = round(self.marginal.value * ideal), round(PAYS_FROM * ideal)
        return (
            f"going from {self.smaller:,} to {self.larger:,} changes throughput by {change:+,} %{ends}, and "
            f"{least:+,} % or more pays"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The size at which a curve stops paying, as far as it was measured."""

    growths: tuple[Growth, ...]
    """The growths between measured sizes, ascending, up to the first size for which no claim is made."""
    odds: Mapping[int, float] | None
    """The share of resamples that name each size (the largest: no knee); None for single runs."""
    left_out: int
    """Disturbed runs that the growths do not rest on."""
    unclaimed: tuple[int, ...] = ()
    """Sizes with figures that no claim is made of."""
    reason: str | None = None
    """Why no claim is made of the first of these sizes; None without such sizes."""

    @property
    def beyond(self) -> Growth | None:
        """The first growth that does not pay."""
        return next((growth for growth in self.growths if not growth.pays), None)

    @property
    def at(self) -> int | None:
        """The knee; None if there is none, or nothing to find one in."""
        return None if self.beyond is None else self.beyond.smaller

    @property
    def size(self) -> int | None:
        """The knee or, without one, the largest size; None if no growth can be judged."""
        return self.at or (self.growths[-1].larger if self.growths else None)

    @property
    def instead(self) -> Mapping[int, float]:
        """The odds of other sizes, from 1 - `SURE_FROM` on; empty where the size has odds of `SURE_FROM`."""
        if self.odds is None or self.size is None or self.odds[self.size] >= SURE_FROM:
            return {}
        least = 1 - SURE_FROM
        return {size: share for size, share in self.odds.items() if size != self.size and share >= least}

    @property
    def shown_to(self) -> int | None:
        """The largest size that `SURE_FROM` of the resamples reach, if that is smaller than the size."""
        if not self.instead or self.odds is None or self.size is None:
            return None
        reached = {one: sum(share for size, share in self.odds.items() if size >= one) for one in self.odds}
        largest = max(size for size, share in reached.items() if share >= SURE_FROM)
        return largest if largest < self.size else None

    @property
    def text(self) -> str:
        """`knee between 32 and 64: ...`, `no knee up to 64`, or why nothing is claimed; a clause."""
        if not self.growths or self.size is None:
            return f"no knee is claimed: {self.reason or 'fewer than two sizes have a figure'}"
        without = f"; {count(self.left_out, 'disturbed run')} left out" if self.left_out else ""
        if self.beyond is not None:
            place = f"knee between {self.beyond.smaller:,} and {self.beyond.larger:,}"
            return f"{place}{self._unsure}: {self.beyond.text}{without}"
        unsure = self._unsure or ("" if self.odds else " (single runs)")
        return f"no knee{' seen' if unsure else ''} up to {self.size:,}{unsure}{without}"

    @property
    def _unsure(self) -> str:
        """` (in 80 % of resamples)`; empty where the size is sure, or no odds are known."""
        odds = self.odds[self.size] if self.odds and self.size else SURE_FROM
        return f" (in {whole_percent(odds)} of resamples)" if odds < SURE_FROM else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size with the step times of its runs that count."""

    gpus: int
    batch: int
    """Samples of a step."""
    steps: tuple[float, ...]
    """Step times of the runs that count, in any one unit."""
    left_out: int
    """Disturbed runs that do not count."""
    rounds: tuple[int, ...] = ()
    """The round of each run in a study that grows by rounds; empty: every size was run in each repeat."""

    def within(self, rounds: Set[int]) -> Sequence[float]:
        """The step times of its runs in these rounds, or of all runs if none is in them."""
        return [
            step for step, one in zip(self.steps, self.rounds, strict=False) if one in rounds
        ] or self.steps


def knee(curve: Curve) -> Knee:
    """The knee of a curve, from the single device that it is measured against, if that is smaller."""
    sizes, unclaimed = judged_sizes(curve)
    return replace(
        knee_of(sizes),
        unclaimed=tuple(sorted(unclaimed)),
        reason=unclaimed[min(unclaimed)] if unclaimed else None,
    )


def judged_sizes(curve: Curve) -> tuple[list[Size], dict[int, str]]:
    """The sizes that can be compared, ascending, and the other ones with figures, each with the reason."""
    cells = cells_of(curve)
    unclaimed = {one.cell.gpus: f"{why} sizes make no claim" for one in cells if (why := one.no_claim)}
    measured = [one for one in cells if one.no_claim is None]
    judged = measured[:1]
    for smaller, larger in pairwise(measured):
        if (unlike := unlike_conditions(larger, smaller)) is not None:
            unclaimed |= {one.cell.gpus: str(unlike) for one in measured[len(judged) :]}
            break
        judged.append(larger)
    sizes = [
        Size(
            gpus=one.cell.gpus,
            batch=one.cell.global_batch,
            steps=one.run_step_ns,
            left_out=one.pool.disturbed_out,
            rounds=one.rounds,
        )
        for one in judged
    ]
    return sizes, unclaimed


def knee_of(sizes: Sequence[Size]) -> Knee:
    """The knee of comparable sizes, which ascend."""
    return Knee(
        growths=tuple(_growth(smaller, larger) for smaller, larger in pairwise(sizes)),
        odds=odds_of(sizes),
        left_out=sum(one.left_out for one in sizes),
    )


def _growth(smaller: Size, larger: Size) -> Growth:
    # Only rounds that have both sizes, so that drift between rounds does not look like scaling.
    common = {*smaller.rounds} & {*larger.rounds}
    ratio = ratio_of_runs(smaller.within(common), larger.within(common), "ratio")
    speed_up = ratio.times(larger.batch / smaller.batch)
    added = larger.gpus / smaller.gpus - 1
    return Growth(
        smaller=smaller.gpus, larger=larger.gpus, marginal=speed_up.mapped(lambda end: (end - 1) / added)
    )


def odds_of(sizes: Sequence[Size], pays_from: float = PAYS_FROM) -> dict[int, float] | None:
    """Return the share of resamples that name each size as the knee; those without a knee name the largest.

    `sizes` ascend. Return None if too few runs show by how much runs differ.
    """
    freedom, squares, times, spread = _of_rounds(sizes) or _of_repeats(sizes)
    if freedom <= 0:
        return None
    random = np.random.default_rng(0)
    deviations = np.sqrt(squares / random.chisquare(freedom, (DRAWS, 1)))
    errors = deviations * (random.standard_normal((DRAWS, len(sizes))) @ spread)
    log_rates = np.log([one.batch for one in sizes]) - times - errors
    # Runs that are absurdly far apart must not overflow.
    speed_ups = np.exp(np.clip(np.diff(log_rates, axis=1), -700, 700))
    gpus = np.array([one.gpus for one in sizes])
    marginal = (speed_ups - 1) / (gpus[1:] / gpus[:-1] - 1)
    stops = np.column_stack([marginal < pays_from, np.ones(DRAWS, dtype=bool)]).argmax(axis=1)
    shares = np.bincount(stops, minlength=len(sizes)) / DRAWS
    return {one.gpus: float(share) for one, share in zip(sizes, shares, strict=True)}


_Fit = tuple[int, float, npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""The degrees of freedom, the sum of the squared residuals, the logarithms of the step times of sizes, and a
square root of their covariance over the variance."""


def _of_repeats(sizes: Sequence[Size]) -> _Fit:
    """Fit the mean of each size."""
    logs = [np.log(one.steps) for one in sizes]
    squares = sum(float(np.square(one - one.mean()).sum()) for one in logs)
    counts = np.array([len(one) for one in logs])
    times = np.log([np.mean(one.steps) for one in sizes])
    return int(counts.sum()) - len(sizes), squares, times, np.diag(1 / np.sqrt(counts))


def _of_rounds(sizes: Sequence[Size]) -> _Fit | None:
    """Fit an effect of each size and of each round to the logarithms of the step times, by least squares.

    Rounds have different sizes in them, so that drift from round to round would look like scaling (incomplete
    blocks; Cochran and Cox, Experimental Designs, chapter 9). None without rounds, and if rounds do not
    connect the sizes.
    """
    at = [(place, each) for place, one in enumerate(sizes) for each in one.rounds]
    numbers = sorted({each for _, each in at})
    design = np.zeros((len(at), len(sizes) + len(numbers)))
    for row, (place, each) in enumerate(at):
        design[row, place] = design[row, len(sizes) + numbers.index(each)] = 1
    effects = np.linalg.matrix_rank(design)
    logs = np.log([step for one in sizes for step in one.steps])
    if not numbers or len(at) < len(logs) or effects < len(sizes) + len(numbers) - 1:
        return None
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ logs
    values, vectors = np.linalg.eigh(inverse[: len(sizes), : len(sizes)])
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    squares = float(np.square(logs - design @ fitted).sum())
    return len(at) - int(effects), squares, fitted[: len(sizes)], root


def cells_of(curve: Curve) -> Sequence[CellFigures]:
    """The curve's cells by size, with the single device in front."""
    cells = [point.figures for point in curve.points]
    if curve.single is not None and cells and curve.single.cell.gpus < cells[0].cell.gpus:
        return [curve.single, *cells]
    return cells
