"""Optimizers by their spec texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from results.registry import load
from strategies.devices import device_of
from strategies.optimizers.catalog import OPTIMIZERS


def build_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `text` names (`sgd:lr=0.1`, `adamw:lr=0.0003`) over `parameters`."""
    updated = list(parameters)
    kind, arguments = optimizer_call(text, updated)
    return kind(updated, **arguments)


def optimizer_call(
    text: str, parameters: Sequence[nn.Parameter]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that `text` names, and what it is given beside these parameters.

    On a GPU the update is fused where the class can. torch's default there launches several kernels for each
    list of tensors, and has temporaries as large as the parameters. The fused kernel takes real numbers, and
    gradients with the strides of their parameters. An exchange may give gradients that are row by row, so
    parameters have to be as well.
    """
    facts = OPTIMIZERS.facts(text)
    kind: type[torch.optim.Optimizer] = load(facts.kind)
    fused = facts.fuses and bool(parameters) and all(map(_fuses, parameters))
    return kind, facts.arguments | ({"fused": True} if fused else {})


def _fuses(parameter: nn.Parameter) -> bool:
    plain = parameter.is_floating_point() and parameter.is_contiguous()
    return plain and device_of(parameter.device).asynchronous
