"""How often the band of a replay holds the true step time: a figure of docs/evidence.md (`make knee`).

Replays miss the true step time by a random walk over the doublings.
"""

from __future__ import annotations

import click
import numpy as np

from harness.features.project.bands import band
from harness.features.project.laws import Steps
from harness.features.project.series import REPLAY, Replayed, scaled


@click.command()
@click.option("--studies", default=500, show_default=True, help="Studies of each row.")
@click.option("--seed", default=1, show_default=True, help="Seed of the generated studies.")
def main(studies: int, seed: int) -> None:
    """Print how often the band of a replay at twice the largest size holds the true step time."""
    random = np.random.default_rng(seed)
    print("\n| error of the replay a doubling | studies | answered | in the band |\n|---|---|---|---|")
    gpus = (8, 16, 32)
    for error in (0.01, 0.02, 0.03, 0.04, 0.06):
        inside = []
        for _ in range(studies):
            true = np.exp(np.cumsum(random.normal(0, error, len(gpus) + 1)))
            replays = {size: Replayed(step_ns=1.0, loss="") for size in gpus}
            answered = scaled(Steps(gpus=gpus, ns=tuple(true[:-1]), pool_slope=0.0), replays)
            if not isinstance(answered, str):
                low, high = band(REPLAY, 1.0, answered[1])
                inside.append(low <= true[-1] / answered[0] <= high)
        share = 100 * len(inside) / studies
        print(f"| {100 * error:g} % | {studies:,} | {share:.0f} % | {100 * np.mean(inside):.1f} % |")


if __name__ == "__main__":
    main()
