"""The rows that the experts of a model compute in measured steps, for modules that count them."""

from __future__ import annotations

import torch
from torch import nn

from results.record import ExpertRows
from workloads.rows import RowCount


class ExpertCounts:
    """The counts of all modules of one rank.

    They are kept from the first step on and read twice, so that the steps that are measured are the steps
    that were compiled and proven, and no step waits for the device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Begin to count in every module of the bare `model` that can."""
        self._counts = {
            name: value
            for name, module in model.named_modules()
            for value in vars(module).values()
            if isinstance(value, RowCount)
        }
        for count in self._counts.values():
            count.begin(device)

    def read(self) -> dict[str, list[int]]:
        """Return the rows of each expert so far, and last the dropped rows, by the name of the module."""
        return {name: [*count.read(), count.dropped()] for name, count in self._counts.items()}

    def since(self, before: dict[str, list[int]]) -> list[ExpertRows]:
        """Return the rows that were computed since `read` returned `before`."""
        found = []
        for name, after in self.read().items():
            *rows, dropped = [now - then for now, then in zip(after, before[name], strict=True)]
            count = self._counts[name]
            found.append(
                ExpertRows(module=name, first=count.first, rows=rows, dropped=dropped, row_flops=count.flops)
            )
        return found
