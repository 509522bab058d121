"""How often the search for change points errs, on simulated histories that are looked at every night.

`python tests/reports/gate/history_quality.py SERIES [NOISE]` prints the tables of docs/gate.md, for nights
that vary by NOISE (0.02).
"""

from __future__ import annotations

import sys

import numpy as np

from reports.gate.trends import change_points

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


def main(count: int, noise: float = 0.02) -> None:
    false_changes(count, noise)
    found_steps(count, noise)


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
