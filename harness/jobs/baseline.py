"""The cell that every allocation times on one device, so that allocations can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell


def baseline_of(cells: Sequence[Cell]) -> Cell:
    """The plan's first cell on a single device; without one, its smallest cell changed to one device.

    All jobs of a plan have the same baseline, whatever cells they run themselves. `cells` is not empty.
    """
    alone = [cell for cell in cells if cell.gpus == 1 and cell.strategy == BASELINE_STRATEGY]
    if alone:
        return alone[0]
    return msgspec.structs.replace(
        min(cells, key=lambda cell: cell.gpus),
        strategy=BASELINE_STRATEGY,
        compression=UNCOMPRESSED,
        collective=DEFAULT_COLLECTIVE,
        gpus=1,
        model_parallel=1,
        node_size=None,
        link_mbit_per_s=None,
    )
