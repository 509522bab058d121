"""Models that a training loop is tried with; the loss of the first validation of `bad` is NaN."""

import torch
from torch import nn

from workloads import Workload


class Point(nn.Linear):
    def __init__(self, bad):
        super().__init__(2, 1)
        self.bad = bad

    def forward(self, x):
        y = super().forward(x)
        if self.bad and not self.training:
            self.bad = False
            return y * float("nan")
        return y


def samples(count):
    generator = torch.Generator().manual_seed(count)
    return [(x, x.sum(dim=0, keepdim=True)) for x in torch.randn(count, 2, generator=generator)]


def build(bad=False):
    return Workload(module=Point(bad), loss=nn.functional.mse_loss, data=samples(16), held_out=samples(32))


def alike():
    """Every replica is given the same batches: the function forgets its share."""

    def opened(share):
        return torch.utils.data.DataLoader(samples(16), share.micro_batch)

    return Workload(module=Point(False), loss=nn.functional.mse_loss, data=opened)


def bad():
    return build(bad=True)
