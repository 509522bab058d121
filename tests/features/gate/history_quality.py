"""How often the search for change points errs, on simulated histories that are looked at every night.

`python tests/features/gate/history_quality.py SERIES [NOISE]` prints tables of docs/evidence.md, for nights
that vary by NOISE (0.02); `... ranges HISTORIES` the odds of ranges, and how often they hold the true commit.
"""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from itertools import pairwise, product

import numpy as np

from harness.features.gate.records.baseline import Baseline, Subject
from harness.features.gate.trends import Step, change_points, trends

NIGHTS = 100
WITHIN = 8
KINDS = ("white", "outliers", "missing", "correlated 0.3", "correlated 0.6", "season", "drift", "heavy tails")
STEPS = {0.02: (0.10, 0.05, 0.03), 0.10: (0.10, 0.30)}
"""Sizes of steps by the noise of a night."""
OTHERS = {"median:5%": 0.05, "two runs 10%": 0.10, "200%": 1.0}
"""Thresholds on the ratio to the night before: pytest-benchmark's --benchmark-compare-fail=median:5% against
the run that was saved last, a plain comparison of two runs, and github-action-benchmark's default."""


def series(rng: np.random.Generator, kind: str, noise: float = 0.02) -> np.ndarray:
    """Logarithms of `NIGHTS` nights."""
    logs = noise * rng.standard_normal(NIGHTS)
    if kind in ("outliers", "missing"):
        hit = rng.random(NIGHTS) < 0.05
        logs[hit] += np.log1p(rng.exponential(0.3, int(hit.sum())))
    if kind == "missing":
        logs = logs[rng.random(NIGHTS) < 0.8]
    if kind.startswith("correlated"):
        share = float(kind.split()[1])
        for night in range(1, NIGHTS):
            logs[night] = share * logs[night - 1] + (1 - share**2) ** 0.5 * logs[night]
    if kind == "season":
        logs += 0.01 * np.sin(2 * np.pi * np.arange(NIGHTS) / 7 + rng.random() * 6)
    if kind == "drift":
        logs += np.arange(NIGHTS) / NIGHTS * 0.05 * rng.choice([-1, 1])
    if kind == "heavy tails":
        logs = noise * rng.standard_t(3, NIGHTS) / 3**0.5
    return logs


def two_runs(logs: np.ndarray, threshold: float) -> np.ndarray:
    """For each night but the first, whether a gate that holds it against the one before alarms."""
    return np.diff(logs) > np.log1p(threshold)


def false_changes(count: int, noise: float) -> None:
    """Alarms in 1,000 nights of histories without a change."""
    print(f"| nights, {noise:.0%} noise | false changes in 1,000 nights | {' | '.join(OTHERS)} |")
    print("|---|---|---|---|---|")
    for kind in KINDS:
        rng = np.random.default_rng(1)
        made = [series(rng, kind, noise) for _ in range(count)]
        nights = sum(map(len, made)) / 1000
        ours = sum(len(change_points(np.exp(logs))) for logs in made) / nights
        others = [
            sum(int(two_runs(logs, share).sum()) for logs in made) / nights for share in OTHERS.values()
        ]
        print(f"| {kind} | {ours:.2f} | {' | '.join(f'{rate:.1f}' for rate in others)} |", flush=True)


def found_steps(count: int, noise: float) -> None:
    """How many steps amid outliers are found; the other methods see one only on its first night."""
    heads = ("noise", "step", f"found within {WITHIN} nights", "found at all", "median delay", *OTHERS)
    print(f"\n| {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|---|")
    for step in STEPS.get(noise, (noise,)):
        rng = np.random.default_rng(2)
        delays = []
        others = dict.fromkeys(OTHERS, 0)
        for _ in range(count):
            logs, at = series(rng, "outliers", noise), int(rng.integers(20, 70))
            logs[at:] += np.log1p(step)
            found = [c for c in change_points(np.exp(logs)) if abs(c.at - at) <= 3 and c.effect > 0]
            delays += [found[0].seen_at - at + 1] if found else []
            for name, share in OTHERS.items():
                others[name] += bool(two_runs(logs, share)[at - 1])
        within = sum(delay <= WITHIN for delay in delays) / count
        median = f"{np.median(delays):.0f}" if delays else "-"
        rates = " | ".join(f"{number / count:.1%}" for number in others.values())
        print(
            f"| {noise:.0%} | {step:.0%} | {within:.1%} | {len(delays) / count:.1%} | {median} | {rates} |",
            flush=True,
        )


STUDIES = ((1, 0.0), (2, 0.5), (4, 0.0), (4, 0.5))
"""The number of series of a study, and the share of their variance that they have in common."""
BINS = (0.0, 0.5, 0.7, 0.9, 0.95, 1.0)
Said = tuple[float, bool]
"""The odds that were stated, and whether they were right."""


def history_with_step(
    rng: np.random.Generator, kind: str, many: int, shared: float
) -> tuple[list[Step], int]:
    """A study of `many` series with one step, 5 to 30 nights before its last, each night at another commit.

    Returns the changes at most 10 nights from the step, changes of most series first, and the step's night.
    """
    noise, at = rng.choice([0.01, 0.02, 0.05]), int(rng.integers(20, 65))
    common = series(rng, kind, noise)
    logs = [shared**0.5 * common + (1 - shared) ** 0.5 * series(rng, kind, noise) for _ in range(many)]
    step = np.log1p(rng.uniform(0.03, 0.15))
    start = datetime.fromisoformat("2026-01-01T03:00:00+00:00")
    nights = [
        Baseline(
            name="night",
            measured_at=(start + timedelta(days=night)).isoformat(),
            commit=f"{night:03d}",
            subjects=tuple(
                Subject(
                    key=str(cell),
                    label=str(cell),
                    timed={"step_time": (float(np.exp(logs[cell][night] + step * (night >= at))),)},
                )
                for cell in range(many)
            ),
        )
        for night in range(at + int(rng.integers(5, 31)))
    ]
    found = [change for trend in trends({"here": nights}, ("step_time",)) for change in trend.steps]
    near = [change for change in found if abs(int(change.after.commit or 0) - at) <= 10]
    return sorted(near, key=lambda change: -change.series), at


def binned(said: list[Said]) -> None:
    for low, high in pairwise(BINS):
        inside = [one for one in said if low <= one[0] < high or one[0] == high == 1]
        if inside:
            stated, true = np.mean(inside, axis=0)
            print(f"| {low:.0%} to {high:.0%} | {len(inside):,} | {stated:.1%} | {true:.1%} |")


def ranges(count: int) -> None:
    """How often the range, and the likeliest pair of nights, hold the true commit, by the odds stated."""
    heads = ("nights", "series", "noise in common", "found", "stated", "range holds it", "commits in it")
    print(f"| {' | '.join((*heads, 'another change near'))} |")
    print("|---|---|---|---|---|---|---|---|")
    pairs: list[Said] = []
    for kind, (many, shared) in product(("white", "outliers", "heavy tails", "correlated 0.3"), STUDIES):
        rng = np.random.default_rng(3)
        said: list[Said] = []
        widths, torn = [], 0
        for _ in range(count):
            found, at = history_with_step(rng, kind, many, shared)
            if found:
                one = found[0]
                first, last = int(one.range.before.commit or 0), int(one.range.after.commit or 0)
                said.append((one.range.odds, first < at <= last))
                pairs.append((one.likeliest.odds, int(one.after.commit or 0) == at))
                widths.append(last - first)
                torn += len({each.range.odds for each in found}) > 1
        stated, true = np.mean(said, axis=0)
        print(
            f"| {kind} | {many} | {shared:.0%} | {len(said)} of {count} | {stated:.1%} | {true:.1%} | "
            f"{np.mean(widths):.1f} | {torn / len(said):.1%} |",
            flush=True,
        )
    print("\n| odds of the likeliest pair | changes | stated | right |")
    print("|---|---|---|---|")
    binned(pairs)


def main(count: int, noise: float = 0.02) -> None:
    false_changes(count, noise)
    found_steps(count, noise)


if __name__ == "__main__":
    if sys.argv[1] == "ranges":
        ranges(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]), *map(float, sys.argv[2:]))
