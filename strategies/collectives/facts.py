"""The facts of a collective, without torch: the calls that it implements, and its restrictions."""

from __future__ import annotations

from typing import ClassVar

from results.cell import Cell
from results.registry import CatalogFacts
from results.spec import Option
from strategies.compression.facts import CompressorFacts, Need

CHUNK_MB = Option(kind="float", default=2.0, minimum=0.001, help="MiB that are sent at once")


class CollectiveFacts(CatalogFacts):
    """The facts of one collective with its options."""

    route: ClassVar[str]
    """A function (spec, link, node_size) to a `Route`, as `package.module:name`; imported only on a rank."""
    places = ("route",)
    implements: ClassVar[frozenset[Need]] = frozenset(("all-reduce", "all-gather", "all-to-all"))
    """The calls that compressors may make."""
    by_nodes: ClassVar[bool] = False
    """Whether it sums within nodes first, so that one rank sends the sum of its node to other nodes."""
    sends: ClassVar[bool] = False
    """Whether it is built from point-to-point messages."""
    on_cuda: ClassVar[str | None] = None
    """The replacement to use on CUDA; None: itself."""

    def refusal(self, cell: Cell, compressor: CompressorFacts) -> str | None:
        """Return why its own rules refuse a cell, as a sentence; None if they do not."""
        return None
