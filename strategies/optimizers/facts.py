"""What is known of an optimizer without torch: its options, and the memory that it takes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from results.cell import Cell
from results.registry import CatalogFacts


class OptimizerFacts(CatalogFacts):
    """An optimizer of torch's; its options are arguments of the class that `kind` names."""

    kind: ClassVar[str]
    """`package.module:Class`; imported on a rank alone."""
    fuses: ClassVar[bool] = False
    """Whether a GPU updates all parameters by one kernel, which the class is asked for with `fused=True`."""

    @property
    @abstractmethod
    def state_values(self) -> int:
        """Values that it keeps for each parameter."""

    @abstractmethod
    def temporaries(self, cell: Cell) -> int:
        """Copies of what is updated at once that an update computes in between."""

    @property
    def arguments(self) -> dict[str, float]:
        """Of the class, beside the parameters."""
        return {key: self.spec.number(key) for key in self.options}
