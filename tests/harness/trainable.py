"""A small classifier that fails on demand: in a training step, rank 1 does what the file `faults` says.

A line `12 rank` (it kills that) is for the 12th training step of a process. Each line is taken once.
"""

import os
import signal
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset

from workloads import Workload

HERE = Path(__file__).parent
FAULTS = HERE / "faults"
CLASSES = 4


class Points(Dataset):
    """Points around the corners of a square."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        label = (self.first + index) % CLASSES
        corner = torch.tensor([float(label % 2), float(label // 2)])
        return corner + 0.3 * torch.randn(2, generator=generator), label


class Classifier(nn.Sequential):
    steps = 0

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.steps += 1
            while (HERE / "slow").exists() and self.steps > 10:
                time.sleep(0.05)
            if os.environ["RANK"] == "1" and FAULTS.exists():
                return y * self.fail()
        return y

    def fail(self):
        first, _, rest = FAULTS.read_text().partition("\n")
        at, _, what = first.partition(" ")
        if not at or int(at) != self.steps:
            return 1.0
        FAULTS.write_text(rest)
        if what == "nan":
            return float("nan")
        if what == "raise":
            raise ValueError("as it was told")
        above = [os.getpid()]
        while len(above) < 4:
            above.append(psutil.Process(above[-1]).ppid())
        os.kill(
            dict(zip(("rank", "torchrun", "guardian", "bench"), above, strict=True))[what], signal.SIGKILL
        )
        time.sleep(60)


def build(width=16):
    module = Classifier(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, CLASSES))
    return Workload(
        module=module, loss=nn.functional.cross_entropy, data=Points(0, 64), held_out=Points(1000, 32)
    )


def wide():
    return build(32)


def endless():
    """Data of no length, and nothing held out."""
    workload = build()
    return Workload(module=workload.module, loss=workload.loss, data=lambda share: iter(()))
