"""`adamw`: Adam with decoupled weight decay."""

from __future__ import annotations

from types import MappingProxyType

from results.cell import Cell
from results.spec import Option
from strategies.optimizers.facts import OptimizerFacts


class AdamW(OptimizerFacts):
    """Two moments."""

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
        """The root of the second moment, and on CPU what it divides; a fused update has none."""
        if cell.device == "cpu":
            return 2
        return 0 if cell.memory_format == "contiguous" else 1
