"""The losses at the end of trainings, and whether NEW's lie where the seeds of BASE predict them.

With n seeds in BASE, of mean b and standard deviation s, the mean of m other seeds of the same code lies in
b +- t(n - 1, 1 - alpha) s sqrt(1 / n + 1 / m), but for alpha on either side (Hahn & Meeker, Statistical
Intervals, 1991, chapter 4). The seed is the sample, and its newest run counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from harness.features.gate.effect import Effect, Verdict
from harness.features.gate.records.baseline import Subject
from reports.text import count, number

FEWEST_SEEDS = 5
"""The fewest seeds of BASE that judge one of NEW: the interval then reaches 4.1 standard deviations."""


def gates(base: Subject, new: Subject) -> bool:
    """Whether the losses of NEW are judged."""
    return len(_compared(base, new)[1]) >= FEWEST_SEEDS


def judge_losses(
    base: Subject, new: Subject, margin: float, alpha: float
) -> tuple[Verdict, str, dict[str, Any]]:
    """A verdict, its reason, and figures of a finding. A change up to `margin`, a share, is unchanged."""
    steps, kept, found = _compared(base, new)
    after = _known(found)
    if not kept:
        verdict = Verdict.INCOMPARABLE if len(base.losses) >= FEWEST_SEEDS else Verdict.SHOWN
        told = f"{_lengths(base)} in BASE, {_lengths(new)} in NEW"
        return verdict, f"losses of unequal steps do not compare: {told}", {}
    figures: dict[str, Any] = {"base": (fmean(kept),), "new": (fmean(after),) if after else ()}
    if len(kept) < FEWEST_SEEDS:
        reason = f"it is judged by {FEWEST_SEEDS} seeds of BASE, which has {len(kept)} (--seed 1,2,3,4,5)"
        return Verdict.SHOWN, reason, figures
    if len(after) < len(found):
        lost = f"{len(found) - len(after)} of {count(len(found), 'seed')} of NEW"
        return Verdict.REGRESSED, f"no finite loss after {steps:,} steps in {lost}", figures
    if stdev(kept) == 0:
        return Verdict.SHOWN, f"{len(kept)} seeds of BASE have one loss, so the seed has no effect", figures
    effect, span = _effect(kept, after, alpha)
    figures |= {"effect": effect, "margin": margin}
    if effect.low <= 0 <= effect.high or abs(effect.value) <= margin:
        return Verdict.UNCHANGED, "", figures
    verdict = Verdict.REGRESSED if effect.value > 0 else Verdict.IMPROVED
    return verdict, f"{len(kept)} seeds predict {span} for the last fifth of {steps:,} steps", figures


def _effect(kept: list[float], after: list[float], alpha: float) -> tuple[Effect, str]:
    """The change with its interval over the size of BASE's mean, and the predicted losses as text."""
    centre, deviation = fmean(kept), stdev(kept)
    half = float(stdtrit(len(kept) - 1, 1 - alpha)) * deviation * math.sqrt(1 / len(kept) + 1 / len(after))
    change = fmean(after) - centre
    figures = (change - half, change, change + half, deviation)
    low, value, high, error = (figure / (abs(centre) or 1.0) for figure in figures)
    effect = Effect(value=value, low=low, high=high, error=error, runs=(len(kept), len(after)))
    return effect, f"{number(centre - half)} to {number(centre + half)}"


def _lengths(side: Subject) -> str:
    return ", ".join(f"{n:,}" for n in sorted(set[int]().union(*side.losses.values()))) or "none"


def _known(losses: Iterable[float | None]) -> list[float]:
    return [loss for loss in losses if loss is not None]


def _compared(base: Subject, new: Subject) -> tuple[int, list[float], list[float | None]]:
    """Return the largest number of steps that all seeds of NEW and enough seeds of BASE have (or else fewer
    of BASE), the known losses of BASE there, and the losses of NEW."""
    kept = {
        n: _known(by.get(n) for by in base.losses.values())
        for n in set[int]().union(*new.losses.values())
        if all(n in by for by in new.losses.values())
    }
    best = max(kept, key=lambda n: (min(len(kept[n]), FEWEST_SEEDS), n), default=0)
    return best, kept.get(best, []), [by[best] for by in new.losses.values() if best in by]
