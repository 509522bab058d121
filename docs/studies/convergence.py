"""What compression does to training: test accuracy on the digits after a fixed budget, over five seeds.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 docs/studies/convergence.py

prints the table of docs/evidence.md. The model, its start, the order of the data and the optimizer are
the same for every compressor of a seed; the exchange alone differs. DGC does the momentum itself, before it
compresses, so that the optimizer behind it has none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies import Trainer, TrainSettings
from workloads.datasets.samples import read_digits

SEEDS = range(5)
STEPS = 400
BATCH = 16
"""Images of one rank and step."""
HELD_OUT = 360
OPTIMIZERS = ((0.1, 0.0), (0.01, 0.9))
"""Learning rate and momentum: the same pace, with and without a memory of past gradients."""
COMPRESSIONS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "topk:0.01",
    "topk:0.01:select=sampled",
    "topk:0.01:select=block",
    "topk:0.01:feedback=false",
    "randomk:0.1",
    "randomk:0.1:feedback=false",
    "powersgd:2",
    "torch-powersgd:2",
    "signsgd",
    "signsgd:feedback=false",
    "dgc:0.01",
)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """1797 images of 8 x 8, a part of them held out."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, seed: int) -> Digits:
        pixels, labels = read_digits()
        images = pixels.flatten(1) / 16
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        test, train = order[:HELD_OUT], order[HELD_OUT:]
        return cls(train=(images[train], labels[train]), test=(images[test], labels[test]))

    def batches(self, seed: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of every global batch, drawn anew each step."""
        generator = torch.Generator().manual_seed(1000 + seed)
        images, labels = self.train
        while True:
            drawn = torch.randint(len(labels), (size * BATCH,), generator=generator)[rank::size]
            yield images[drawn], labels[drawn]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def accuracy(compression: str, rate: float, momentum: float, seed: int, *, steps: int = STEPS) -> float:
    """Share of the held-out images that are recognised after `steps` steps; collective."""
    if compression.startswith("dgc"):
        compression, momentum = f"{compression}:warmup=40:momentum={momentum}", 0.0
    digits = Digits.load(seed)
    network = model(seed)
    trainer = Trainer(
        network,
        nn.functional.cross_entropy,
        device=CPU,
        settings=TrainSettings(
            strategy="ddp",
            compression=compression,
            optimizer=f"sgd:lr={rate}:momentum={momentum}",
            seed=seed,
        ),
    )
    batches = digits.batches(seed, dist.get_rank(), dist.get_world_size())
    for _ in range(steps):
        trainer.step(batches)
    images, labels = digits.test
    with torch.no_grad():
        return (network(images).argmax(dim=1) == labels).double().mean().item()


def table() -> Iterator[str]:
    """The rows, each computed when it is asked for; collective."""
    titles = [f"lr {rate}, momentum {momentum} | points below `none`" for rate, momentum in OPTIMIZERS]
    yield f"| compression | {' | '.join(titles)} |"
    yield "|---" * (1 + 2 * len(OPTIMIZERS)) + "|"
    dense: dict[tuple[float, float], list[float]] = {}
    for compression in COMPRESSIONS:
        cells = []
        for optimizer in OPTIMIZERS:
            found = [100 * accuracy(compression, *optimizer, seed) for seed in SEEDS]
            before = dense.setdefault(optimizer, found)
            lost = [first - second for first, second in zip(before, found, strict=True)]
            cells += [_band(found, ".1f"), _band(lost, "+.1f")]
        yield f"| `{compression}` | {' | '.join(cells)} |"


def _band(values: list[float], form: str) -> str:
    """Mean, lowest and highest."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for line in table():
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
