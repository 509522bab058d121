"""`sgd`: stochastic gradient descent with momentum."""

from __future__ import annotations

from types import MappingProxyType

from results.cell import Cell
from results.spec import Option
from strategies.optimizers.facts import OptimizerFacts


class Sgd(OptimizerFacts):
    """One moment, unless momentum is 0."""

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
        """The gradient with its decay."""
        return int(self.spec.number("weight_decay") > 0)
