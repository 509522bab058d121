"""torch's own optimizer of a cell, from its text by code that shares nothing with the strategies'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from strategies.training.optimizer import optimizer_call

STATED: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = MappingProxyType(
    {
        "sgd": (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False},
        ),
        "adamw": (
            torch.optim.AdamW,
            {"lr": 3e-4, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False},
        ),
    }
)
"""By name: the class, and every argument as docs/options.md states its default."""


def plain_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What `text` (`sgd:lr=0.1`, say) means. One that is not in `STATED`, as another package may register,
    is built by its own facts."""
    name, *options = text.split(":")
    if name not in STATED:
        kind, arguments = optimizer_call(text, ())
        return kind(parameters, **arguments)
    kind, stated = STATED[name]
    given = {key: float(value) for key, _, value in (option.partition("=") for option in options)}
    return kind(parameters, **{**stated, **given})
