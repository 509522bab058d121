"""How often a certain size is the true one, and what growing takes: tables of docs/evidence.md (`make knee`).

A generated study has the sizes 1, 2, ..., 256 under weak scaling; in half of the studies each of them is as
likely to be the true one. The yields of its growths are at least 0.1 from `PAYS_FROM`, but a family may
have the growth beyond the true size near it. The step times of its runs are normal about the true
ones, by 3 %.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import click
import numpy as np

from harness.features.until.growth import Ladder, Step, next_step
from reports.analysis.knee import PAYS_FROM, Size

GPUS = tuple(2**doubling for doubling in range(9))
REPEATS = 3
ROUNDS = 200


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    noise: float = 0.03
    near: float | None = None
    """The growth beyond the size has a yield within this distance of `PAYS_FROM`."""
    drift: float = 0.0
    """Growth of the step time over ten rounds, in either direction; and a fifth of it varies by round."""
    slow: float = 0.0
    """Share of runs that a slow host makes 10 to 30 % longer; it is marked in every second study."""
    lost: float = 0.0
    """Share of sizes after the first that fail for good."""
    least: int = 1
    """The smallest true size."""


FAMILIES = (
    Family(name="3 % noise"),
    Family(name="drift of 10 % in ten rounds", drift=0.1),
    Family(name="slow hosts in 8 % of runs", slow=0.08),
    Family(name="holes at a quarter of the sizes", lost=0.25),
    Family(name="growth beyond within 0.10 of the threshold", near=0.1),
    Family(name="growth beyond within 0.05 of the threshold", near=0.05),
)


@dataclass
class Grown:
    """A generated study that has ended."""

    true: int
    step: Step
    gpu_runs: int
    runs: int

    @property
    def right(self) -> bool:
        return self.step.knee is not None and self.step.knee.size == self.true


def yields(random: np.random.Generator, family: Family) -> np.ndarray:
    """Draw the yield of each growth."""
    far = random.uniform(0, 0.8, len(GPUS) - 1)
    found = np.where(far < PAYS_FROM - 0.1, far, far + 0.2)
    stop = int(np.argmax([*(found < PAYS_FROM), True]))
    if random.random() < 0.5:
        stop = int(random.integers(len(GPUS)))
        found[:stop] = random.uniform(0.6, 1, stop)
        found[stop : stop + 1] = random.uniform(0, 0.4)
    if family.near is not None:
        found[min(stop, len(GPUS) - 2)] = PAYS_FROM + random.uniform(-family.near, family.near)
    return found


def grown(random: np.random.Generator, family: Family, odds: float, *, marked: bool) -> Grown:
    """Grow one generated study until it ends."""
    paid = yields(random, family)
    true_ns = np.cumprod([1.0, *(2 / (1 + paid))])
    true = GPUS[int(np.argmax([*(paid < PAYS_FROM), True]))]
    fails = frozenset(size for size in GPUS[1:] if random.random() < family.lost)
    by_round = random.choice([-1, 1]) * family.drift / 10 * np.arange(ROUNDS)
    by_round += random.normal(0, family.drift / 5, ROUNDS)
    sizes = {size: Size(gpus=size, batch=8 * size, steps=(), left_out=0) for size in GPUS}
    ladder, runs = Ladder(sizes=GPUS, measured=(), repeats=REPEATS), 0
    for number in range(ROUNDS):
        step = next_step(ladder, odds)
        if step.end is not None:
            return Grown(true=true, step=step, gpu_runs=ladder.spent, runs=runs)
        for size in step.sizes:
            ns = true_ns[GPUS.index(size)] * np.exp(by_round[number] + random.normal(0, family.noise))
            slow = random.random() < family.slow
            ns *= random.uniform(1.1, 1.3) if slow else 1
            if size not in fails and not (slow and marked):
                one = sizes[size]
                sizes[size] = replace(one, steps=(*one.steps, ns), rounds=(*one.rounds, number))
        runs += len(step.sizes)
        lost = ladder.lost | (fails & {*step.sizes})
        measured = tuple(one for one in sizes.values() if one.steps)
        spent = ladder.spent + sum(step.sizes)
        ladder = replace(ladder, measured=measured, lost=lost, holes=lost, spent=spent)
    raise AssertionError("a study that grows ends")


def family_of(
    family: Family, studies: int, odds: float = 0.95, seed: int = 1
) -> tuple[list[Grown], float, float]:
    """Generate studies of a family.

    Returns them, the share of true sizes among those that are certain, and the lower end of its 95 % interval
    (Wilson); 0 and 0 if none is certain.
    """
    random = np.random.default_rng(seed)
    found = [grown(random, family, odds, marked=number % 2 == 0) for number in range(studies)]
    certain = [one for one in found if one.step.end == "certain"]
    if not certain:
        return found, 0.0, 0.0
    share, number, z = float(np.mean([one.right for one in certain])), len(certain), 1.96
    middle = share + z**2 / (2 * number)
    half = z * np.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    return found, share, float((middle - half) / (1 + z**2 / number))


def cost_rows(found: list[Grown]) -> Iterator[str]:
    """A row for each true size: the share of the GPU-hours of the full matrix, and of its runs."""
    by_size: dict[int, list[Grown]] = defaultdict(list)
    for one in found:
        by_size[one.true].append(one)
    for size, those in sorted(by_size.items()):
        hours = np.array([one.gpu_runs for one in those]) / (REPEATS * sum(GPUS))
        runs = np.array([one.runs for one in those]) / (REPEATS * len(GPUS))
        yield f"| {size} | {hours.mean():.2f} | {hours.max():.2f} | {runs.mean():.2f} | {runs.max():.2f} |"


@click.command()
@click.option("--studies", default=1000, show_default=True, help="Studies of each family.")
@click.option("--odds", default=0.95, show_default=True, help="Odds at which a size is certain.")
@click.option("--seed", default=1, show_default=True, help="Seed of the generated studies.")
def main(studies: int, odds: float, seed: int) -> None:
    """Print the share of true sizes of each family, and the cost of those whose thresholds are not near."""
    print(f"\n| family, odds of {odds:g} | certain | true size | lower 95 % bound | otherwise ended by |")
    print("|---|---|---|---|---|")
    every: list[Grown] = []
    for family in FAMILIES:
        found, share, low = family_of(family, studies, odds, seed)
        every += found if family.near is None else []
        ends = Counter(str(one.step.end) for one in found if one.step.end != "certain")
        others = ", ".join(f"{name} {100 * number / studies:.0f} %" for name, number in ends.most_common())
        certain = 100 * (1 - ends.total() / studies)
        print(f"| {family.name} | {certain:.0f} % | {100 * share:.1f} % | {100 * low:.1f} % | {others} |")
    print("\n| true size | GPU-hours | most | runs | most |\n|---|---|---|---|---|")
    for row in cost_rows(every):
        print(row)


if __name__ == "__main__":
    main()
