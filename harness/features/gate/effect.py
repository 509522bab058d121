"""The size of a change, its verdict, and the number of runs or pairs that a verdict needs.

An effect is a difference of logarithms of runs by Welch's t (the run is the sample: Kalibera & Jones, ISMM
2013), or, for figures that may be near 0, a difference over BASE's step time. Confidence refers to the whole
comparison: with `rows` intervals each leaves out alpha / rows on either side (Bonferroni).

If both sides alternated, the pair is the independent sample. With identical code, the quads of one pair vary
about an offset that the two process groups keep while they live, so an interval over quads would report
changes that do not exist. Each pair gives one value, the mean of its quads, and the pairs give a t interval
of their mean.

The pairs are evaluated up to `LOOKS` times. Each look has the same share of the error rate: alpha spending
(Lan & DeMets, Biometrika 70, 1983, p. 659) with the function alpha * look / looks, and the bounds of the
union bound. These are valid for any correlation of the looks; the narrower recursive bounds are for normal
values of known variance, and there are few pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy.special import stdtrit

from harness.features.gate.records.paired import Alternation, Pair, PairedBlock, PairedCell, Side
from results.statistics import Floats, welch_t

ALPHA = 0.01
"""Maximum probability that a comparison without any change reports one for the worse, for any number of rows;
the same for the better."""
FEWEST_RUNS = 3
"""The fewest runs on each side. Two give a t of 1 degree of freedom: 32 standard errors at 99 %."""
QUIET = 0.4
"""The part of a margin that the complete interval of a reported change exceeds."""
MOST_RUNS = 1000


class Verdict(StrEnum):
    """The result of comparing one metric of a subject, or the subject as a whole."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    UNCHANGED = "unchanged"
    CHANGED = "changed"
    """An exact counter differs, and neither side is better."""
    ACCEPTED = "accepted"
    """It would fail, but a tracked file accepts it with a reason."""
    INCONCLUSIVE = "inconclusive"
    SHOWN = "shown"
    """The metric has no margin: its figures are shown without a judgement."""
    INCOMPARABLE = "incomparable"
    NOTHING = "nothing compared"
    """No pair counts, and no counter of any subject could be compared."""
    MISSING = "missing"
    FAILED = "failed"
    NEW = "new"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A change as a share: 0.05 is 5 % more in NEW than in BASE."""

    value: float
    low: float
    high: float
    error: float
    """Standard deviation of one run on each side, pooled, as a share."""
    runs: tuple[int, int]


def relative_effect(base: Sequence[float], new: Sequence[float], alpha: float) -> Effect | None:
    """The change of positive values as a ratio less 1; None with too few runs, or for values not above 0."""
    if min(len(base), len(new)) < FEWEST_RUNS or min(*base, *new) <= 0:
        return None
    return _ratio(_welch(np.log(new), np.log(base), alpha))


def difference_effect(
    base: Sequence[float], new: Sequence[float], scale: float, alpha: float
) -> Effect | None:
    """The difference of values over `scale`; None with too few runs."""
    if min(len(base), len(new)) < FEWEST_RUNS or scale <= 0:
        return None
    return _welch(np.array(new) / scale, np.array(base) / scale, alpha)


def judge(effect: Effect, margin: float, *, lower_is_better: bool = True, paired: bool = False) -> Verdict:
    """Judge an effect by the smallest change that matters.

    unchanged: the complete interval is within the margin. regressed, improved: the complete interval is
    beyond `QUIET` of the margin on that side, and not within the margin. Others are inconclusive, but pairs
    whose effect is certainly not worse are unchanged, to save further pairs.
    """
    low, high = (effect.low, effect.high) if lower_is_better else (-effect.high, -effect.low)
    if -margin < low and high < margin:
        return Verdict.UNCHANGED
    if low > QUIET * margin:
        return Verdict.REGRESSED
    if high < -QUIET * margin:
        return Verdict.IMPROVED
    return Verdict.UNCHANGED if paired and high < margin else Verdict.INCONCLUSIVE


def runs_that_tell(effect: Effect, margin: float, alpha: float, *, paired: bool = False) -> int | None:
    """Runs on each side, or pairs, with which any effect can be judged; None: more than `MOST_RUNS`.

    An interval that is at most as wide as from QUIET x margin to the margin never contains both.
    """
    fewest, samples = (FEWEST_PAIRS, 1) if paired else (FEWEST_RUNS, 2)
    wanted = (1 - QUIET) * margin / 2
    for runs in range(fewest, MOST_RUNS + 1):
        quantile = float(stdtrit(samples * (runs - 1), 1 - alpha))
        if quantile * effect.error * math.sqrt(samples / runs) <= wanted:
            return runs
    return None


def _ratio(logs: Effect) -> Effect:
    """The effect for a difference of logarithms."""
    low, value, high = map(math.expm1, (logs.low, logs.value, logs.high))
    return replace(logs, value=value, low=low, high=high)


def _welch(new: Floats, base: Floats, alpha: float) -> Effect:
    """The difference of means, `alpha` on each side of its interval."""
    centre, variance, freedom = welch_t(new, base)
    half = float(stdtrit(freedom, 1 - alpha)) * math.sqrt(variance) if variance else 0.0
    error = math.sqrt((float(new.var(ddof=1)) + float(base.var(ddof=1))) / 2)
    return Effect(
        value=centre, low=centre - half, high=centre + half, error=error, runs=(len(base), len(new))
    )


LOOKS = 4
PAIRS_A_LOOK = 6
"""Pairs before the first look, and between two looks."""
FEWEST_PAIRS = 4
"""The fewest pairs for an interval: three give a t of 2 degrees of freedom."""
FEWEST_QUADS = 4
"""The fewest quads of a pair that counts, without those that other processes disturbed."""
SPOILED_ABOVE = 0.25
"""The share of the launch's cores that others may take in a quad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedSample:
    """The pairs of one cell."""

    logs: tuple[float, ...]
    """The logarithm of NEW's step time over BASE's, for each pair that counts."""
    means: tuple[float, float]
    """Step times of BASE and NEW in ns: geometric means over the blocks that count, or over all blocks."""
    spoiled: int = 0
    """Pairs that do not count because other processes used too much of the machine."""
    failed: int = 0
    """Pairs without blocks, because one of their runs failed or did not begin."""
    alternation: Alternation = "blocks"
    forked: bool = False
    """Whether the process groups of all pairs were forked from warm ranks."""


def quads(cell: PairedCell, alternation: Alternation) -> list[tuple[PairedBlock, ...]]:
    """The groups of blocks that are compared with each other: A B B A, or A B for launches."""
    each = 4 if alternation == "blocks" else 2
    return [cell.blocks[at : at + each] for at in range(0, len(cell.blocks) - each + 1, each)]


def quad_log(quad: Sequence[PairedBlock]) -> float:
    """The logarithm of NEW's step time over BASE's, from one quad; a linear drift cancels in A B B A."""
    return _mean_log(quad, "new") - _mean_log(quad, "base")


def pair_log(
    cell: PairedCell, alternation: Alternation, spoiled_above: float = SPOILED_ABOVE
) -> float | None:
    """The one value of a pair: the mean of its quads; None if too few are unspoiled.

    No quad is trimmed, because a stall in one of 50 steps is in few quads and still makes the step longer.
    """
    counting = _counting(cell, alternation, spoiled_above)
    return sum(quad_log(quad) for quad in counting) / len(counting) if counting else None


def paired_sample(
    pairs: Sequence[tuple[Pair, PairedCell]], spoiled_above: float = SPOILED_ABOVE, *, of: int
) -> PairedSample | None:
    """Build the sample of one cell from its pairs, oldest first. Return None if no pair has a timed block.

    `of` is the number of pairs that were run, including those in which a side never reached the cell.
    """
    ran = [(pair, cell) for pair, cell in pairs if cell.blocks]
    if not ran:
        return None
    found = [pair_log(cell, pair.alternation, spoiled_above) for pair, cell in ran]
    logs = tuple(value for value in found if value is not None)
    return PairedSample(
        logs=logs,
        means=_means(ran, spoiled_above),
        spoiled=len(found) - len(logs),
        failed=of - len(found),
        alternation="launches" if any(pair.alternation == "launches" for pair, _ in pairs) else "blocks",
        forked=all(pair.forked for pair, _ in pairs),
    )


def _means(ran: Sequence[tuple[Pair, PairedCell]], spoiled_above: float) -> tuple[float, float]:
    """The means of a PairedSample."""
    counting = [quad for pair, cell in ran for quad in _counting(cell, pair.alternation, spoiled_above)]
    every = [block for _, cell in ran for block in cell.blocks]
    shown = [block for quad in counting for block in quad] or every
    return math.exp(_mean_log(shown, "base")), math.exp(_mean_log(shown, "new"))


def paired_effect(logs: Sequence[float], alpha: float) -> Effect | None:
    """The change with its interval, `alpha` on each side; None with fewer than `FEWEST_PAIRS`."""
    if len(logs) < FEWEST_PAIRS:
        return None
    values = np.array(logs)
    centre, error = float(values.mean()), float(values.std(ddof=1))
    half = float(stdtrit(len(logs) - 1, 1 - alpha)) * error / math.sqrt(len(logs))
    runs = len(logs), len(logs)
    return _ratio(Effect(value=centre, low=centre - half, high=centre + half, error=error, runs=runs))


def _counting(
    cell: PairedCell, alternation: Alternation, spoiled_above: float
) -> list[tuple[PairedBlock, ...]]:
    """The quads of a pair that other processes did not spoil; empty if they are too few for a value."""
    clean = [
        quad
        for quad in quads(cell, alternation)
        if {block.side for block in quad} == {"base", "new"}
        and all(block.foreign is None or block.foreign <= spoiled_above for block in quad)
    ]
    return clean if len(clean) >= (FEWEST_QUADS if alternation == "blocks" else 1) else []


def _mean_log(blocks: Sequence[PairedBlock], side: Side) -> float:
    logs = [math.log(block.step_ns) for block in blocks if block.side == side]
    return sum(logs) / len(logs)
