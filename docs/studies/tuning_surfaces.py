"""The search of `bench tune` on simulated surfaces, against other searches (docs/evidence.md).

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from numpy.random import Generator, default_rng

from harness.features.tune.race import finalists, next_rung, standings
from harness.features.tune.records import TunedSetting, TunedTrial
from results.outcome import Outcome
from results.statistics import Floats

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
class Ground:
    """A simulated surface or a recorded grid, on which a search runs."""

    settings: tuple[TunedSetting, ...]
    """The first is the default."""
    rates: Floats
    """The true rate of each setting, which judges it; 0 if it cannot run."""
    lengths_s: tuple[float, float]
    """The shortest budget of the search, and the budget of a run of the grid."""
    final_runs: int
    run: Callable[[Sequence[int], float, Generator], Iterable[tuple[float, float]]]
    """Runs settings once, interleaved, for a budget: the rate of each, 0 if it failed, and device-seconds."""
    rng: Generator

    def block(self, rung: int, block: int, chosen: Sequence[int], budget_s: float) -> list[TunedTrial]:
        return [
            TunedTrial(
                setting=self.settings[at].id,
                rung=rung,
                block=block,
                rate=rate or None,
                outcome=Outcome.OK if rate else Outcome.OUT_OF_MEMORY,
                device_s=device_s,
            )
            for at, (rate, device_s) in zip(chosen, self.run(chosen, budget_s, self.rng), strict=True)
        ]

    def grid_s(self) -> float:
        """The device time of one run of each setting."""
        every = self.run(range(len(self.settings)), self.lengths_s[1], self.rng)
        return sum(device_s for _, device_s in every)

    def final(self, best: Sequence[int]) -> int:
        """The setting with the highest mean of the final's runs, among three and the default."""
        there = [*[one for one in best if one != 0][:3], 0]
        blocks = [self.run(there, self.lengths_s[1], self.rng) for _ in range(self.final_runs)]
        rates = [[rate for rate, _ in runs] for runs in blocks]
        return there[int(np.argmax(np.mean(rates, 0)))]

    def off(self, chosen: int) -> float:
        """How far the true rate of a setting is below the best's, relative to it."""
        return 1 - float(self.rates[chosen] / self.rates.max())


def draw(seed: int) -> Ground:
    """Draw a surface. The first setting, which fits, is the default."""
    rng = default_rng(seed)
    while True:
        names = ["micro_batch", *rng.permutation([name for name in OPTIONS if name != "micro_batch"])]
        options = {name: OPTIONS[name] for name in names[: rng.integers(3, 6)]}
        if 60 <= math.prod(map(len, options.values())) <= 240:
            break
    points = np.array(list(product(*(range(len(values)) for values in options.values()))))
    family, reach = kind_of(seed)
    logs = {"tables": _tables, "trees": _trees, "network": _network}[family](points, rng)
    batch = points[:, 0] / points[:, 0].max()
    logs = rng.uniform(0.15, 0.6) * (logs - logs.mean()) / logs.std() + rng.uniform(0, 0.8) * np.sqrt(batch)
    need = 2 * batch + 0.4 * _additive(points, rng)
    walls = need > np.quantile(need, rng.uniform(0.6, 0.9))
    rates = 1000 * np.exp(logs) * ~walls
    # The default fits, and is no better than most.
    fit = np.flatnonzero((rates > 0) & (rates <= np.median(rates[rates > 0])))
    default = rng.choice(fit)
    order = np.concatenate([[default], np.delete(np.arange(len(rates)), default)])
    points, rates, logs = points[order], rates[order], logs[order]
    slow = np.flatnonzero((rates > 0) & (rates < 0.93 * rates.max()) & (rates > 0.4 * rates.max()))
    decoys = rng.permutation(slow)[: max(2, len(points) // 15)]
    decoy_s = rng.uniform(1, 3)
    decoy = np.zeros(len(points))
    decoy[decoys] = rng.uniform(1.03, 1.25, len(decoys)) * rates.max() / rates[decoys] - 1
    predicted = np.exp(logs) * _errors(points, reach, rng)
    settings = tuple(
        TunedSetting(
            id=f"s{index}",
            choices={name: values[at] for (name, values), at in zip(options.items(), point, strict=True)},
            predicted_rate=1000 * float(predicted[index]),
        )
        for index, point in enumerate(points)
    )
    start_s = float(np.exp(rng.uniform(math.log(0.3), math.log(4))))

    def run(chosen: Sequence[int], budget_s: float, noise: Generator) -> Iterator[tuple[float, float]]:
        """Decoys gain less in longer runs. A run out of memory takes the start twice, for new workers."""
        common = noise.normal(0, NOISE)
        for at in chosen:
            short = 1 + decoy[at] * math.exp((SHORTEST_S - budget_s) / decoy_s)
            rate = float(rates[at] * short * math.exp(common + noise.normal(0, NOISE)))
            yield rate, start_s + (budget_s if rate else start_s)

    return Ground(
        settings=settings,
        rates=rates,
        lengths_s=(SHORTEST_S, GRID_S),
        final_runs=FINAL_RUNS,
        run=run,
        rng=rng,
    )


def kind_of(seed: int) -> tuple[str, float]:
    """The family of a surface, and the largest relative error of its prediction."""
    return FAMILIES[seed % len(FAMILIES)], REACHES[seed // len(FAMILIES) % len(REACHES)]


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


def race(ground: Ground, device_s: float) -> tuple[int, float]:
    """The search of `bench tune`: the setting that it chooses, and the device time that it takes."""
    at = {setting.id: index for index, setting in enumerate(ground.settings)}
    trials: list[TunedTrial] = []
    spent, settings = 0.0, ground.settings
    while rung := next_rung(settings, trials, device_s_left=device_s - spent, shortest_s=ground.lengths_s[0]):
        chosen = [at[setting] for setting in rung.settings]
        for block in range(rung.blocks):
            trials += ground.block(rung.number, block, chosen, rung.budget_s)
        spent = sum(trial.device_s for trial in trials)
    return ground.final([at[one] for one in finalists(standings(settings, trials))]), spent


def in_order(ground: Ground, order: Sequence[int], device_s: float) -> tuple[int, float]:
    """Runs of the grid in an order, until the time is over; the best go to the final."""
    spent, rates = 0.0, {}
    for number, index in enumerate(order):
        (trial,) = ground.block(number, 0, [index], ground.lengths_s[1])
        if spent + trial.device_s > device_s:
            break
        spent += trial.device_s
        if trial.rate is not None:
            rates[index] = trial.rate
    return ground.final(sorted(rates, key=lambda one: -rates[one])), spent


def by_prediction(ground: Ground) -> list[int]:
    return sorted(range(len(ground.settings)), key=lambda at: -(ground.settings[at].predicted_rate or 0))


TUNE, RANDOM, ORDERED, CHOICE = (
    "`bench tune`",
    "random search",
    "in the order of prediction",
    "the prediction's first choice",
)
SEARCHES: dict[str, Callable[[Ground, float], tuple[int, float]]] = {
    TUNE: race,
    RANDOM: lambda one, device_s: in_order(one, one.rng.permutation(len(one.settings)), device_s),
    ORDERED: lambda one, device_s: in_order(one, by_prediction(one), device_s),
    CHOICE: lambda one, _: (next(at for at in by_prediction(one) if one.rates[at]), 0.0),
}


def compare(grounds: Mapping[int, Ground], near: float, noise: float) -> dict[str, Floats]:
    """Run every search on every ground, by its seed, and print the tables. Return how far each was off."""
    print(f"| search | within {near:.0%} | median off | 90 % off | worst | of the grid's time |")
    print("|---|---|---|---|---|---|")
    off = {}
    for name, search in SEARCHES.items():
        values, share = np.zeros(len(grounds)), np.zeros(len(grounds))
        for at, (seed, one) in enumerate(grounds.items()):
            ground = replace(one, rng=default_rng((seed, 1)))
            chosen, spent_s = search(ground, SHARE * one.grid_s())
            values[at], share[at] = ground.off(chosen), spent_s / ground.grid_s()
        off[name] = values
        middle, high, worst = np.quantile(values, [0.5, 0.9, 1])
        print(
            f"| {name} | {(values <= near).sum()} of {len(grounds)} | {middle:.1%} | {high:.1%} "
            f"| {worst:.1%} | {share.mean():.0%}, at most {share.max():.1%} |"
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
    kinds = [kind_of(seed) for seed in surfaces]
    for place, values in enumerate((FAMILIES, REACHES)):
        for value in values:
            which = np.array([kind[place] == value for kind in kinds])
            name = f"errors to {value:.0%}" if value in REACHES else value
            print(f"| {name} | {(tune[which] <= 0.05).sum()} of {which.sum()} |")


if __name__ == "__main__":
    main()
