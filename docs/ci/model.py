"""Your model: change it, or name your own in nightly.yaml (docs/models.md)."""

import torch
from torch import nn

from workloads import Workload


def synthetic(generator, samples):
    """Draw inputs (samples, 256) and targets (samples, 1), float32."""
    return torch.randn(samples, 256, generator=generator), torch.randn(samples, 1, generator=generator)


def build():
    """Build a perceptron with one hidden layer of 512 units."""
    module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
    return Workload(module=module, loss=nn.functional.mse_loss, synthetic=synthetic)
