"""The search of `bench tune` on simulated surfaces, against other searches (docs/tuning.md).

    python docs/studies/tuning_surfaces.py [SURFACES [FIRST]]

draws SURFACES (by default 200) from the seed FIRST on (by default 20000), and prints the table.

A surface has 60 to 240 settings of 3 to 5 options. Their rates are of one of three families, none of which
the search or the prediction knows: sums of tables for options and pairs of options, decision trees, and a
random network of two layers. Larger micro-batches tend to be faster, until they run out of memory. A run has
noise of 3 %, and so has each block of runs as a whole. Some slow settings are decoys: in a short run they
beat the best. The prediction is the truth times errors, of single settings and of all settings with some
value, the largest of which is 30, 60 or 90 %.

The grid is one run of GRID_S a setting. Every search may take 25 % of the grid's device time. Its best three
settings then run in the same final, which is not counted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Protocol

import numpy as np
from numpy.random import Generator, default_rng

from harness.tune.race import Setting, finalists, next_rung, standings
from results.outcome import Outcome
from results.statistics import Floats
from results.tuning import TunedTrial

SURFACES, FIRST = 200, 20_000
SHARE = 0.25
GRID_S, SHORTEST_S = 9.0, 1.0
NOISE = 0.03
FINAL_RUNS = 3
OPTIONS: dict[str, tuple[str, ...]] = {
    "strategy": ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"),
    "micro_batch": ("1", "2", "4", "8", "16", "32"),
    "bucket_mb": ("1", "5", "25", "100"),
    "checkpointing": ("none", "selective", "all"),
    "memory_format": ("contiguous", "channels_last"),
    "compile": ("false", "true"),
    "prefetch": ("0", "1", "2"),
}
FAMILIES = ("tables", "trees", "network")
REACHES = (0.3, 0.6, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """The truth of one tune. Arrays have a value a setting."""

    family: str
    reach: float
    """The largest relative error of the prediction."""
    settings: tuple[Setting, ...]
    rates: Floats
    """Rates of long runs; 0 where memory does not suffice."""
    decoy: Floats
    """The relative gain of a run too short to show it: it shrinks as exp(-budget / DECOY_S)."""
    decoy_s: float
    start_s: float
    """Device seconds of a run besides its budget."""
    rng: Generator = field(repr=False)

    @property
    def lengths_s(self) -> tuple[float, float]:
        return SHORTEST_S, GRID_S

    def grid_s(self) -> float:
        return float(np.where(self.rates > 0, self.start_s + GRID_S, 2 * self.start_s).sum())

    def block(self, rung: int, block: int, chosen: Sequence[int], budget_s: float) -> Iterator[TunedTrial]:
        """Run the settings once, interleaved. Running out of memory takes the start, and another of the
        workers."""
        common = self.rng.normal(0, NOISE)
        for at in chosen:
            short = 1 + self.decoy[at] * math.exp(-budget_s / self.decoy_s)
            rate = float(self.rates[at] * short * math.exp(common + self.rng.normal(0, NOISE)))
            yield TunedTrial(
                setting=self.settings[at].id,
                rung=rung,
                block=block,
                rate=rate or None,
                outcome=Outcome.OK if rate else Outcome.OUT_OF_MEMORY,
                device_s=self.start_s + budget_s if rate else 2 * self.start_s,
            )

    def final(self, best: Sequence[int]) -> int:
        """The setting with the highest mean of the final's runs, among three and the default."""
        there = [*[one for one in best if one != 0][:3], 0]
        runs = [
            [trial.rate or 0.0 for trial in self.block(0, block, there, GRID_S)]
            for block in range(FINAL_RUNS)
        ]
        return there[int(np.argmax(np.mean(runs, 0)))]

    def off(self, chosen: int) -> float:
        """How far the true rate of a setting is below the best's, relative to it."""
        return 1 - float(self.rates[chosen] / self.rates.max())


def draw(seed: int) -> Surface:
    """Draw a surface. The first setting, which fits, is the default."""
    rng = default_rng(seed)
    while True:
        names = ["micro_batch", *rng.permutation([name for name in OPTIONS if name != "micro_batch"])]
        options = {name: OPTIONS[name] for name in names[: rng.integers(3, 6)]}
        if 60 <= math.prod(map(len, options.values())) <= 240:
            break
    points = np.array(list(product(*(range(len(values)) for values in options.values()))))
    family = FAMILIES[seed % len(FAMILIES)]
    logs = {"tables": _tables, "trees": _trees, "network": _network}[family](points, rng)
    batch = points[:, 0] / points[:, 0].max()
    logs = rng.uniform(0.15, 0.6) * (logs - logs.mean()) / logs.std() + rng.uniform(0, 0.8) * np.sqrt(batch)
    need = 2 * batch + 0.4 * _additive(points, rng)
    walls = need > np.quantile(need, rng.uniform(0.6, 0.9))
    rates = 1000 * np.exp(logs) * ~walls
    # The default fits, and is no better than most.
    order = _default_first(rates, rng)
    points, rates, logs = points[order], rates[order], logs[order]
    slow = np.flatnonzero((rates > 0) & (rates < 0.93 * rates.max()) & (rates > 0.4 * rates.max()))
    decoys = rng.permutation(slow)[: max(2, len(points) // 15)]
    decoy_s = rng.uniform(1, 3)
    decoy = np.zeros(len(points))
    decoy[decoys] = rng.uniform(1.03, 1.25, len(decoys)) * rates.max() / rates[decoys] - 1
    decoy *= math.exp(SHORTEST_S / decoy_s)
    reach = REACHES[seed // len(FAMILIES) % len(REACHES)]
    predicted = np.exp(logs) * _errors(points, reach, rng)
    named = [dict(zip(options, point, strict=True)) for point in points]
    settings = tuple(
        Setting(
            id=f"s{index}",
            choices={name: options[name][value] for name, value in point.items()},
            predicted_rate=1000 * float(predicted[index]),
            complexity=int((points[index] != points[0]).sum()),
        )
        for index, point in enumerate(named)
    )
    return Surface(
        family=family,
        reach=reach,
        settings=settings,
        rates=rates,
        decoy=decoy,
        decoy_s=decoy_s,
        start_s=float(np.exp(rng.uniform(math.log(0.3), math.log(4)))),
        rng=rng,
    )


def _default_first(rates: Floats, rng: Generator) -> Floats:
    """An order of the settings that begins with one that fits."""
    fit = np.flatnonzero((rates > 0) & (rates <= np.median(rates[rates > 0])))
    default = rng.choice(fit)
    return np.concatenate([[default], np.delete(np.arange(len(rates)), default)])


def _additive(points: Floats, rng: Generator) -> Floats:
    return np.sum([rng.normal(size=column.max() + 1)[column] for column in points.T], 0)


def _tables(points: Floats, rng: Generator) -> Floats:
    """A table a option, and one a pair of options."""
    pairs = [
        rng.normal(size=(9, 9))[points[:, a], points[:, b]]
        for a, b in combinations(range(points.shape[1]), 2)
    ]
    return _additive(points, rng) + rng.uniform(0.3, 1) * np.sum(pairs, 0)


def _trees(points: Floats, rng: Generator) -> Floats:
    """Three trees of seven levels; each node asks whether an option has some of its values."""
    total = np.zeros(len(points))
    for _ in range(3):
        leaf = np.zeros(len(points), dtype=int)
        for level in range(7):
            option = rng.integers(points.shape[1], size=2**level)[leaf]
            some = rng.random((2**level, 9)) < 0.5
            side = some[leaf, points[np.arange(len(points)), option]]
            total += rng.normal(size=2 ** (level + 1))[2 * leaf + side]
            leaf = 2 * leaf + side
    return total


def _network(points: Floats, rng: Generator) -> Floats:
    """Random vectors for values, two layers of rectifiers."""
    inputs = np.concatenate([rng.normal(size=(9, 4))[column] for column in points.T], 1)
    hidden = np.maximum(inputs @ rng.normal(size=(inputs.shape[1], 16)), 0)
    return np.maximum(hidden @ rng.normal(size=(16, 16)), 0) @ rng.normal(size=16)


def _errors(points: Floats, reach: float, rng: Generator) -> Floats:
    """Factors of the prediction, evenly from 1 - reach to 1 + reach: of each value, and of each setting."""
    share = rng.uniform(0.2, 0.8)
    errors = share * _additive(points, rng) + (1 - share) * rng.normal(size=len(points))
    return 1 + reach * (2 * errors.argsort().argsort() / (len(points) - 1) - 1)


class Ground(Protocol):
    """A simulated surface or a recorded grid, as a search can run it."""

    @property
    def settings(self) -> Sequence[Setting]:
        """The first is the default."""

    @property
    def rng(self) -> Generator: ...

    @property
    def lengths_s(self) -> tuple[float, float]:
        """The shortest budget of the search, and the budget of a run of the grid."""

    def grid_s(self) -> float:
        """The device time of one run of each setting."""

    def block(
        self, rung: int, block: int, chosen: Sequence[int], budget_s: float
    ) -> Iterator[TunedTrial]: ...

    def final(self, best: Sequence[int]) -> int: ...

    def off(self, chosen: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of one search, and the share of the grid's device time that it took."""

    off: float
    """How far the chosen setting is below the best, relative to it."""
    share: float


def race(ground: Ground, device_s: float | None) -> Found:
    """The search of `bench tune`."""
    at = {setting.id: index for index, setting in enumerate(ground.settings)}
    default = ground.settings[0].id
    shortest_s, _ = ground.lengths_s
    trials: list[TunedTrial] = []
    spent = 0.0
    while True:
        left = None if device_s is None else device_s - spent
        rung = next_rung(ground.settings, trials, default=default, device_s_left=left, shortest_s=shortest_s)
        if rung is None:
            break
        chosen = [at[setting] for setting in rung.settings]
        for block in range(rung.blocks):
            trials += ground.block(rung.number, block, chosen, rung.budget_s)
        spent = sum(trial.device_s for trial in trials)
    best = finalists(standings(ground.settings, trials, default=default))
    chosen_at = ground.final([at[one] for one in best])
    return Found(off=ground.off(chosen_at), share=spent / ground.grid_s())


def in_order(ground: Ground, order: Sequence[int], device_s: float) -> Found:
    """Runs of the grid in an order, until the time is over; the best go to the final."""
    spent, rates = 0.0, {}
    for number, index in enumerate(order):
        (trial,) = ground.block(number, 0, [index], ground.lengths_s[1])
        if spent + trial.device_s > device_s:
            break
        spent += trial.device_s
        if trial.rate is not None:
            rates[index] = trial.rate
    best = sorted(rates, key=lambda one: -rates[one])
    return Found(off=ground.off(ground.final(best)), share=spent / ground.grid_s())


def by_prediction(ground: Ground) -> list[int]:
    return sorted(range(len(ground.settings)), key=lambda at: -(ground.settings[at].predicted_rate or 0))


def first_choice(ground: Ground) -> Found:
    """The setting with the best prediction of those that fit."""
    off = (ground.off(at) for at in by_prediction(ground))
    return Found(off=next(one for one in off if one < 1), share=0.0)


TUNE, RANDOM, ORDERED, CHOICE = (
    "`bench tune`",
    "random search",
    "in the order of prediction",
    "the prediction's first choice",
)
SEARCHES: dict[str, Callable[[Ground, float], Found]] = {
    TUNE: race,
    RANDOM: lambda one, device_s: in_order(one, one.rng.permutation(len(one.settings)), device_s),
    ORDERED: lambda one, device_s: in_order(one, by_prediction(one), device_s),
    CHOICE: lambda one, _: first_choice(one),
}


def compare(grounds: Mapping[int, Ground], near: float, noise: float) -> dict[str, Floats]:
    """Run every search on every ground, by its seed, and print the tables. Return how far each was off."""
    found = {
        name: [
            search(replace(one, rng=default_rng((seed, 1))), SHARE * one.grid_s())
            for seed, one in grounds.items()
        ]
        for name, search in SEARCHES.items()
    }
    off = {name: np.array([each.off for each in results]) for name, results in found.items()}
    print(f"| search | within {near:.0%} | median off | 90 % off | worst | of the grid's time |")
    print("|---|---|---|---|---|---|")
    for name, values in off.items():
        share = [each.share for each in found[name]]
        middle, high, worst = np.quantile(values, [0.5, 0.9, 1])
        print(
            f"| {name} | {(values <= near).sum()} of {len(grounds)} | {middle:.1%} | {high:.1%} "
            f"| {worst:.1%} | {np.mean(share):.0%}, at most {max(share):.1%} |"
        )
    poor = off[CHOICE] > 0.03
    there = "where the first choice is off: better | equal"
    print(f"\n| {TUNE} against | mean difference | better | alike | worse | {there} |")
    print("|---|---|---|---|---|---|---|")
    for name in (RANDOM, ORDERED, CHOICE):
        gain = np.log((1 - off[TUNE]) / (1 - off[name]))
        error = 2 * gain.std(ddof=1) / math.sqrt(len(gain))
        counts = [(gain > noise).sum(), (abs(gain) <= noise).sum(), (gain < -noise).sum()]
        there = f"{(gain > 0)[poor].sum()} of {poor.sum()} | {(gain == 0)[poor].sum()}"
        mean = f"{np.expm1(gain.mean()):+.1%} ± {error:.1%}"
        print(f"| {name} | {mean} | {' | '.join(map(str, counts))} | {there} |")
    return off


def main() -> None:
    count, first = (*map(int, sys.argv[1:]), *(SURFACES, FIRST)[len(sys.argv) - 1 :])
    surfaces = {seed: draw(seed) for seed in range(first, first + count)}
    tune = compare(surfaces, near=0.05, noise=NOISE)[TUNE]
    print("\n| surfaces | `bench tune` within 5 % |")
    print("|---|---|")
    kinds = {family: np.array([one.family == family for one in surfaces.values()]) for family in FAMILIES}
    for reach in REACHES:
        kinds[f"errors to {reach:.0%}"] = np.array([one.reach == reach for one in surfaces.values()])
    for name, which in kinds.items():
        print(f"| {name} | {(tune[which] <= 0.05).sum()} of {which.sum()} |")


if __name__ == "__main__":
    main()
