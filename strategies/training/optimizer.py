"""Optimizers by their spec texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from results.registry import load
from strategies.optimizers.catalog import OPTIMIZERS


def build_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `text` names (`sgd:lr=0.1`, `adamw:lr=0.0003`) over `parameters`."""
    kind, options = optimizer_call(text)
    return kind(parameters, **options)


def optimizer_call(text: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that `text` names, and what it is given beside the parameters."""
    facts = OPTIMIZERS.facts(text)
    kind: type[torch.optim.Optimizer] = load(facts.kind)
    return kind, facts.arguments
