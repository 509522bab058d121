"""Optimizers by their spec texts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from strategies.catalog import OPTIMIZERS


def build_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `text` names (`sgd:lr=0.1`, `adamw:lr=0.0003`) over `parameters`."""
    spec = OPTIMIZERS.parse(text)
    if spec.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=spec.number("lr"),
            momentum=spec.number("momentum"),
            weight_decay=spec.number("weight_decay"),
        )
    assert spec.name == "adamw", spec.name
    return torch.optim.AdamW(parameters, lr=spec.number("lr"), weight_decay=spec.number("weight_decay"))
