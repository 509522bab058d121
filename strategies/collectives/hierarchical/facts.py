"""`hierarchical` without torch."""

from __future__ import annotations

from types import MappingProxyType

from results.cell import Cell
from results.spec import Option
from strategies.collectives.facts import CollectiveFacts
from strategies.compression.facts import CompressorFacts


class Hierarchical(CollectiveFacts):
    """A sum inside of each node, the compressor across the nodes, and out to all ranks again."""

    name = "hierarchical"
    help = "inside of the nodes, across them, inside again; compression across nodes alone"
    options = MappingProxyType(
        {
            "via": Option(
                kind="str",
                default="shards",
                choices=("shards", "leaders"),
                help="across nodes every rank moves its shard, or one rank a node moves all",
            )
        }
    )
    route = "strategies.collectives.hierarchical.route:route"
    by_nodes = True

    def refusal(self, cell: Cell, compressor: CompressorFacts) -> str | None:
        if self.spec.word("via") != "shards":
            return None
        if compressor.whole_matrices:
            return (
                f"{compressor.name} needs whole matrices, hierarchical:via=shards cuts them: use "
                f"hierarchical:via=leaders"
            )
        if cell.node_size is not None and cell.gpus > cell.node_size and cell.gpus % cell.node_size:
            return (
                f"for hierarchical:via=shards ranks ({cell.gpus}) must be a multiple of --node-size "
                f"({cell.node_size}); use hierarchical:via=leaders"
            )
        return None
