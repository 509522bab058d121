"""The MLP classifier: fully connected layers with ReLU and dropout."""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn import functional as F

from results.layout import ModelLayout
from workloads.mlp import MLPShape
from workloads.workload import ImageInput, Workload


def build_mlp(shape: MLPShape) -> Workload:
    """Build the classifier with torch's default initialisation, for flattened images."""
    takes = ImageInput(shape=(shape.widths[0],), classes=shape.widths[-1])
    *hidden, last = pairwise(shape.widths)
    layers: list[nn.Module] = []
    for inputs, outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(shape.dropout)]
    return Workload(
        module=nn.Sequential(*layers, nn.Linear(*last)),
        loss=F.cross_entropy,
        synthetic=takes.synthetic,
        unit="images",
        layout=ModelLayout(),
        input=takes,
    )
