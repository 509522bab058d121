"""Optimizers by their specs: the facts of each without torch (its options, the memory that it
takes), and how one is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from results.cell import Cell
from results.registry import CatalogFacts, Registry, load
from results.spec import Option

if TYPE_CHECKING:
    import torch
    from torch import nn


class OptimizerFacts(CatalogFacts):
    """An optimizer of torch's; its options are arguments of the class that `kind` names."""

    kind: ClassVar[str]
    """`package.module:Class`; imported only on a rank."""
    fuses: ClassVar[bool] = False
    """Whether a GPU updates all parameters by one kernel, which the class is asked for with `fused=True`."""

    @property
    @abstractmethod
    def state_values(self) -> int:
        """Values that it keeps for each parameter."""

    @abstractmethod
    def temporaries(self, cell: Cell) -> int:
        """Return the number of temporary copies of the updated parameters that an update needs."""

    @property
    def arguments(self) -> dict[str, float]:
        """The arguments of the class, other than the parameters."""
        return {key: self.spec.number(key) for key in self.options}


class Sgd(OptimizerFacts):
    """Stochastic gradient descent with momentum: one moment, unless momentum is 0."""

    name = "sgd"
    help = "stochastic gradient descent with momentum"
    options = MappingProxyType(
        {
            "lr": Option(kind="float", default=0.1, minimum=0, help="learning rate"),
            "momentum": Option(kind="float", default=0.9, minimum=0, help="momentum"),
            "weight_decay": Option(kind="float", default=0.0, minimum=0, help="weight decay"),
        }
    )
    kind = "torch.optim:SGD"

    @property
    def state_values(self) -> int:
        return int(self.spec.number("momentum") > 0)

    def temporaries(self, cell: Cell) -> int:
        """Return 1 with weight decay, for the gradient with its decay; else 0."""
        return int(self.spec.number("weight_decay") > 0)


class AdamW(OptimizerFacts):
    """Adam with decoupled weight decay: two moments."""

    name = "adamw"
    help = "AdamW"
    options = MappingProxyType(
        {
            "lr": Option(kind="float", default=3e-4, minimum=0, help="learning rate"),
            "weight_decay": Option(kind="float", default=0.01, minimum=0, help="weight decay"),
        }
    )
    kind = "torch.optim:AdamW"
    fuses = True

    @property
    def state_values(self) -> int:
        return 2

    def temporaries(self, cell: Cell) -> int:
        """Return 1 for the root of the second moment, and 1 for the quotient on CPU; 0 for a fused update."""
        if cell.device == "cpu":
            return 2
        return 0 if cell.memory_format == "contiguous" else 1


OPTIMIZERS: Registry[OptimizerFacts] = Registry("optimizer", (Sgd, AdamW))
"""The catalog of optimizers."""


def build_optimizer(text: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer that `text` names (`sgd:lr=0.1`, `adamw:lr=0.0003`) over `parameters`."""
    updated = list(parameters)
    kind, arguments = optimizer_call(text, updated)
    return kind(updated, **arguments)


def optimizer_call(
    text: str, parameters: Sequence[nn.Parameter]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that `text` names, and its arguments other than these parameters.

    On a GPU the update is fused if the class supports that. torch's default there launches several kernels
    for each list of tensors, and has temporaries as large as the parameters. The fused kernel takes real
    numbers, and gradients with the strides of their parameters. An exchange may make gradients row by row, so
    the parameters have to be row by row too.
    """
    from strategies.devices import device_of  # which imports torch

    facts = OPTIMIZERS.facts(text)
    kind: type[torch.optim.Optimizer] = load(facts.kind)
    fused = facts.fuses and all(
        each.is_floating_point() and each.is_contiguous() and device_of(each.device).asynchronous
        for each in parameters
    )
    return kind, facts.arguments | ({"fused": True} if fused and parameters else {})
