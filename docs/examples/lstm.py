"""An LSTM that tells the class of a sequence; batches have sequences of different lengths.

In this folder: bench matrix --workload py:lstm:build --gpus 1..2
"""

import torch
from torch import nn

from workloads import Workload


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=2, batch_first=True)
        self.out = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (last, _) = self.lstm(x)
        return self.out(last[-1])


def build() -> Workload:
    def synthetic(generator, samples):
        length = int(torch.randint(12, 24, (), generator=generator))
        x = torch.randn(samples, length, 8, generator=generator)
        return x, torch.bucketize(x.mean(dim=(1, 2)), torch.tensor([-0.05, 0.05]))

    return Workload(module=Classifier(), loss=nn.functional.cross_entropy, synthetic=synthetic)
