"""How often the named size is the true one, and whether its odds are, for docs/evidence.md (`make knee`).

A generated study has the sizes 1, 2, ..., 128 under weak scaling. The yields of its growths are uniform in
[0, 1], in the first table at least 0.1 from `PAYS_FROM`; the step times of its runs are normal about the true
ones. Slow runs take 10 to 30 % longer and are marked as disturbed in every second study. In the table of
holes each size after the first lacks its figure with a probability of a quarter; in its second row nodes have
8 devices, and the step time grows by up to a half beyond a node.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import click
import numpy as np
import numpy.typing as npt

from reports.analysis.holes import reach
from reports.analysis.knee import PAYS_FROM, SURE_FROM, Knee, Size, knee_of
from reports.analysis.pooling import undisturbed

GPUS = [2**doubling for doubling in range(8)]
BINS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)

Condition = tuple[float, int, int]
"""Noise, runs a size, slow runs."""


def drawn_steps(
    random: np.random.Generator, condition: Condition, *, margin: float, marked: bool
) -> tuple[int, npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return the true size of one generated study, the step time of each size and run, and which are marked
    as disturbed; the true step time of one device is 1."""
    noise, runs, slow = condition
    yields = random.uniform(0, 1 - 2 * margin, len(GPUS) - 1)
    yields = np.where(yields < PAYS_FROM - margin, yields, yields + 2 * margin)
    # Under weak scaling a doubling that yields y multiplies the step time by 2 / (1 + y).
    true = np.cumprod([1.0, *(2 / (1 + yields))])
    steps = true[:, None] * np.maximum(1 + noise * random.standard_normal((len(GPUS), runs)), 0.5)
    disturbed = np.zeros(steps.shape, dtype=bool)
    for _ in range(slow):
        at = random.integers(len(GPUS)), random.integers(runs)
        steps[at] *= random.uniform(1.1, 1.3)
        disturbed[at] = marked
    stops = [*(yields < PAYS_FROM), True]
    return GPUS[stops.index(True)], steps, disturbed


def generated(
    random: np.random.Generator, condition: Condition, *, margin: float, marked: bool
) -> tuple[int, Knee]:
    """Return the true size and the knee of one generated study."""
    size, steps, disturbed = drawn_steps(random, condition, margin=margin, marked=marked)
    sizes = [
        Size(gpus=gpus, batch=8 * gpus, steps=tuple(undisturbed(times.tolist(), flags.tolist())), left_out=0)
        for gpus, times, flags in zip(GPUS, steps, disturbed, strict=True)
    ]
    return size, knee_of(sizes)


def with_holes(random: np.random.Generator, boundary: bool) -> tuple[int, Knee, tuple[int, int]]:
    """Return the true size, the knee of the sizes that are left, and the range that their holes leave."""
    size, steps, _ = drawn_steps(random, (0.01, 6, 0), margin=0.1, marked=False)
    if boundary:
        steps[4:] *= random.uniform(1, 1.5)
        growths = 2 * steps[:-1].mean(axis=1) / steps[1:].mean(axis=1) - 1
        size = GPUS[[*(growths < PAYS_FROM), True].index(True)]
    kept = [True, *(random.random(len(GPUS) - 1) >= 0.25)]
    sizes = [
        Size(gpus=gpus, batch=8 * gpus, steps=tuple(times.tolist()), left_out=0)
        for gpus, times, there in zip(GPUS, steps, kept, strict=True)
        if there
    ]
    found = knee_of(sizes)
    hidden = [gpus for gpus, there in zip(GPUS, kept, strict=True) if not there]
    return size, found, reach(found, 1, hidden)


def holes_table(random: np.random.Generator, studies: int) -> None:
    """Print how often the size is the true one where holes leave one size with high odds, and elsewhere."""
    print("\n| network | one size is left | true | a range is left | holds the true one |")
    print("|---|---|---|---|---|")
    for boundary in (False, True):
        sure, ranges = [], []
        for _ in range(studies):
            size, found, (low, high) = with_holes(random, boundary)
            if found.size is None or found.odds is None:
                continue
            if low == high:
                sure += [found.size == size] if found.odds[found.size] >= SURE_FROM else []
            else:
                ranges.append(low <= size <= high)
        name = "nodes of 8" if boundary else "one level"
        shares = [f"{100 * np.mean(found):.1f} %" for found in (sure, ranges)]
        print(f"| {name} | {len(sure):,} | {shares[0]} | {len(ranges):,} | {shares[1]} |")


@click.command()
@click.option("--studies", default=500, show_default=True, help="Studies of each condition.")
@click.option("--seed", default=1, show_default=True, help="Seed of the generated studies.")
def main(studies: int, seed: int) -> None:
    """Print the table of holes, the share of true sizes, and the odds against it."""
    random = np.random.default_rng(seed)
    holes_table(np.random.default_rng(seed), studies)
    claims: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for margin in (0.1, 0.0):
        print(f"\n| noise, runs a size (margin {margin:g}) | no slow run | 1 slow run | 2 slow runs |")
        print("|---|---|---|---|")
        for noise, runs in product((0.01, 0.03, 0.05, 0.1), (3, 6)):
            shares = []
            for slow in range(3):
                found = [
                    generated(random, (noise, runs, slow), margin=margin, marked=number % 2 == 0)
                    for number in range(studies)
                ]
                right = [
                    (knee.odds[knee.size], knee.size == true)
                    for true, knee in found
                    if knee.odds and knee.size
                ]
                shares.append(f"{100 * np.mean([one for _, one in right]):.1f} %")
                if not margin:
                    for odds, one in right:
                        claims[int(np.searchsorted(BINS, odds, side="right"))].append((odds, one))
            print(f"| {100 * noise:g} %, {runs} | {' | '.join(shares)} |")
    print("\n| stated odds | studies | mean of the odds | true share |\n|---|---|---|---|")
    for at in sorted(claims):
        odds, right = np.array(claims[at]).T
        ends = f"{100 * BINS[at - 1]:.0f} % to {min(100, 100 * BINS[at]):.0f} %"
        print(f"| {ends} | {len(odds):,} | {100 * odds.mean():.1f} % | {100 * right.mean():.1f} % |")


if __name__ == "__main__":
    main()
