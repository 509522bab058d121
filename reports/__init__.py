"""Reports: the figures of a study (analysis), the page that shows them (page), and comparisons (gate).

`reports.load("runs/my-study")` gives a study as tables of pandas: see docs/exports.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.page.export import Loaded

__all__ = ["load"]


def load(
    study: str | Path,
    *more: str | Path,
    usd_per_device_hour: float | None = None,
    epoch_samples: int | None = None,
) -> Loaded:
    """The tables of a study, or of several below each other, as frames of pandas. Writes nothing.

    `usd_per_device_hour` is the price of every device. Without it, runs of a scheduler have the price in the
    profile of their site, if it has one, and other GPUs have the list prices of the catalogue.
    `epoch_samples` is the size of an epoch of any data set. Raises UsageError for a folder that is not a
    study or is given twice, and for a price or a size that is not positive.
    """
    # pandas takes a third of a second to import, and planning imports this package.
    from reports.page.export import loaded

    return loaded((study, *more), usd_per_device_hour=usd_per_device_hour, epoch_samples=epoch_samples)
