"""False alarms of the gate over final losses, from seeds of one distribution: `loss_quality.py CALLS`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from harness.features.gate.comparison import Rules, compare
from harness.features.gate.effect import Verdict
from harness.features.gate.records.baseline import Baseline, Subject

DRAWS = {
    "normal": lambda random, count: random.normal(3, 0.1, count),
    "exponential": lambda random, count: 2.5 + random.exponential(0.2, count),
}


def side(cells: Sequence[Sequence[float | None]], steps: int = 100) -> Baseline:
    """A side with the final losses of each cell, one a seed."""
    losses = [{seed: {steps: one} for seed, one in enumerate(each)} for each in cells]
    subjects = (Subject(key=f"{at}", label=f"{at}", losses=each) for at, each in enumerate(losses))
    return Baseline(name="side", measured_at="2026-01-01T00:00:00Z", subjects=tuple(subjects))


def alarms(kind: str, calls: int, seeds: int, new: int = 1, cells: int = 1, worse: float = 0) -> int:
    """The calls that regressed: `seeds` in BASE, and `new` in NEW, whose losses are higher by `worse`."""
    random, found = np.random.default_rng(1), 0
    for _ in range(calls):
        base, other = (DRAWS[kind](random, (cells, count)) for count in (seeds, new))
        sides = (side(losses.tolist()) for losses in (base, other + worse))
        found += compare(*sides, Rules(margins={})).count(Verdict.REGRESSED) > 0
    return found


if __name__ == "__main__":
    calls = int(sys.argv[1])
    print("| losses | 5 seeds against 1 | 10 against 1 | 5 against 3 | 5 against 1, 8 cells |")
    for kind in DRAWS:
        rates = [alarms(kind, calls, *sizes) / calls for sizes in ((5,), (10,), (5, 3), (5, 1, 8))]
        print(f"| {kind} | {' | '.join(f'{rate:.2%}' for rate in rates)} |")
    for seeds in (5, 10):
        found = [alarms("normal", calls, seeds, worse=0.1 * size) / calls for size in (3, 5, 7)]
        print(f"{seeds} seeds, higher by 3, 5, 7 standard deviations:", *(f"{rate:.1%}" for rate in found))
