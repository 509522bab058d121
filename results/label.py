"""What a cell, a series or a skip is called in a table: how gradients travel, in a few words."""

from __future__ import annotations

from typing import Protocol

from results.cell import DEFAULT_COLLECTIVE, UNCOMPRESSED, Cell
from results.link import NO_LINK


class Named(Protocol):
    """What has the four axes that a label is made of."""

    @property
    def strategy(self) -> str: ...
    @property
    def compression(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def link(self) -> str: ...


def label(named: Named) -> str:
    """What it does, and over which link: `ddp + topk:0.01, ring, 1gbit`; what is default is left out."""
    return exchange_label(named) if named.link == NO_LINK else f"{exchange_label(named)}, {named.link}"


def exchange_label(named: Named) -> str:
    """The same on whatever network: `ddp + topk:0.01, ring`."""
    compressed = (
        named.strategy if named.compression == UNCOMPRESSED else f"{named.strategy} + {named.compression}"
    )
    return compressed if named.collective == DEFAULT_COLLECTIVE else f"{compressed}, {named.collective}"


def point(cell: Cell) -> str:
    """A cell among those of its workload: `ddp on 8, batch 32`."""
    return f"{label(cell)} on {cell.gpus:,}, batch {cell.batch_per_replica:,}"
