"""How often the search for change points errs, on simulated histories that are looked at every night.

`python tests/reports/gate/history_quality.py SERIES` prints the tables of docs/gate.md.
"""

from __future__ import annotations

import sys

import numpy as np

from reports.gate.change_points import change_points

NIGHTS = 100
WITHIN = 8
KINDS = ("white", "outliers", "missing", "correlated 0.3", "correlated 0.6", "season", "drift", "heavy tails")
STEPS = ((0.02, 0.10), (0.02, 0.05), (0.02, 0.03), (0.10, 0.10), (0.10, 0.30))


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


def two_runs(logs: np.ndarray, threshold: float) -> int:
    """Alarms of a gate that holds each night against the one before."""
    return int((np.diff(logs) > np.log1p(threshold)).sum())


def main(count: int) -> None:
    print("| nights, 2 % noise | false changes in 1,000 nights | last night + 5 % | last night + 200 % |")
    print("|---|---|---|---|")
    for kind in KINDS:
        rng = np.random.default_rng(1)
        made = [series(rng, kind) for _ in range(count)]
        nights = sum(map(len, made)) / 1000
        ours = sum(len(change_points(np.exp(logs))) for logs in made) / nights
        others = [sum(two_runs(logs, share) for logs in made) / nights for share in (0.05, 1.0)]
        print(f"| {kind} | {ours:.2f} | {others[0]:.1f} | {others[1]:.1f} |", flush=True)
    print(f"\n| noise | step | found within {WITHIN} nights | found at all | median delay |\n|{'---|' * 5}")
    for noise, step in STEPS:
        rng = np.random.default_rng(2)
        delays = []
        for _ in range(count):
            logs, at = series(rng, "outliers", noise), int(rng.integers(20, 70))
            logs[at:] += np.log1p(step)
            found = [c for c in change_points(np.exp(logs)) if abs(c.at - at) <= 3 and c.effect > 0]
            delays += [found[0].seen_at - at + 1] if found else []
        within = sum(delay <= WITHIN for delay in delays) / count
        median = f"{np.median(delays):.0f}" if delays else "-"
        print(
            f"| {noise:.0%} | {step:.0%} | {within:.1%} | {len(delays) / count:.1%} | {median} |", flush=True
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
