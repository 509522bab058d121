"""A small classifier that fails on demand: in a training step, rank 1 does what the file `faults` says.

A line `12 rank` (it kills that) is for the 12th training step of a process, `12 validation` (it kills the
rank) for the first validation after at least 12 steps. Each line is used once.
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
from workloads.build import build_workload

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


class Faults:
    """A forward hook: what becomes of the outputs of this process."""

    steps = 0

    def __call__(self, module, inputs, y):
        if module.training:
            self.steps += 1
            while (HERE / "slow").exists() and self.steps > 10:
                time.sleep(0.05)
        if os.environ.get("RANK") == "1" and FAULTS.exists():
            return y * self.fail(module.training)
        return y

    def fail(self, training):
        first, _, rest = FAULTS.read_text().partition("\n")
        at, _, what = first.partition(" ")
        if not at or not self.is_due(int(at), what, training):
            return 1.0
        FAULTS.write_text(rest)
        if what == "nan":
            return float("nan")
        if what == "raise":
            raise ValueError("as it was told")
        above = [os.getpid()]
        while len(above) < 4:
            above.append(psutil.Process(above[-1]).ppid())
        ends = dict(zip(("rank", "torchrun", "guardian", "bench"), above, strict=True))
        os.kill(ends.get(what, os.getpid()), signal.SIGKILL)
        time.sleep(60)

    def is_due(self, step, what, training):
        if what == "validation":
            return not training and self.steps >= step
        return training and self.steps == step


def failing(module):
    module.register_forward_hook(Faults())
    return module


def build(width=16):
    module = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, CLASSES))
    return Workload(
        module=failing(module),
        loss=nn.functional.cross_entropy,
        data=Points(0, 64),
        held_out=Points(1000, 32),
    )


def wide():
    return build(32)


def digits():
    """The MLP of the catalogue, for the data set digits."""
    workload = build_workload("mlp")
    failing(workload.module)
    return workload


def endless():
    """Data of no length, and nothing held out."""
    workload = build()
    return Workload(module=workload.module, loss=workload.loss, data=lambda share: iter(()))
