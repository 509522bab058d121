"""`hierarchical`: a sum within each node, then a compressed sum across the nodes, sent to all ranks.

Links within a node are fast and links between nodes are slow, so that compression pays only across nodes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from results.cell import Cell
from results.spec import Option, Spec
from strategies.collectives.facts import CollectiveFacts
from strategies.collectives.route import Flat, Route
from strategies.compression.facts import CompressorFacts

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.link import Link
    from strategies.compression.base import Compressor
    from strategies.exchange.buckets import Bucket


class Hierarchical(CollectiveFacts):
    """A sum within each node, then a compressed sum across the nodes, sent to all ranks."""

    name = "hierarchical"
    help = "within the nodes, across them, within again; it compresses only across nodes"
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
    route = "strategies.collectives.hierarchical:route"
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


def route(spec: Spec, link: Link, node_size: int) -> Route:
    """The route over nodes of `node_size` consecutive ranks; the last node may be smaller if `via` is
    leaders.

    Collective: all ranks create the same groups. With one rank a node, all ranks are summed at once. With one
    node, all ranks are summed at once too, uncompressed.
    """
    if node_size >= link.size:
        return OneNode(link)
    if node_size == 1:
        return Flat(link)
    nodes = [range(first, min(first + node_size, link.size)) for first in range(0, link.size, node_size)]
    # Ranks of equal place in their nodes.
    rails = [range(place, link.size, node_size) for place in range(node_size)]
    inside, across = link.split(nodes), link.split(rails)
    if spec.word("via") == "leaders":
        return Leaders(inside, across)
    assert link.size % node_size == 0, "shards need equal nodes"
    return Shards(inside, across)


class OneNode:
    """All ranks are on one node: no link is slow enough to compress for."""

    def __init__(self, link: Link) -> None:
        self._inside = link

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, compressor: Compressor) -> None:
        self._inside.all_reduce(bucket.values)
        if residual is not None:
            residual.zero_()


class Shards:
    """Each rank gets its node's sum of one shard, exchanges it across the nodes, and gathers the other
    shards.

    All links between nodes are used at once, each for 1 / node size of the values. The residual of a
    shard's exchange is kept by the rank of the shard. Gloo has no reduce-scatter: it sums the whole vector.
    """

    def __init__(self, inside: Link, across: Link) -> None:
        self._inside = inside
        self._across = across

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, compressor: Compressor) -> None:
        import torch
        from torch.nn.functional import pad

        from strategies.exchange.buckets import Bucket

        numel, node_size = bucket.values.numel(), self._inside.size
        length = -(-numel // node_size)
        padded = pad(bucket.values, (0, length * node_size - numel))
        shard = self._inside.reduce_scatter(padded.view(node_size, length))
        residual_of_shard = None if residual is None else torch.empty_like(shard)
        # The bucket has no pieces, because a shard may end in the middle of a parameter.
        sharded = Bucket(index=bucket.index, values=shard, pieces=())
        compressor.sum_shares(sharded, residual_of_shard, self._across)
        if residual is not None and residual_of_shard is not None:
            residual.zero_()
            own = residual[self._inside.rank * length :][:length]
            own.copy_(residual_of_shard[: own.numel()])
        bucket.values.copy_(self._inside.all_gather(shard).view(-1)[:numel])


class Leaders:
    """The first rank of each node gets the node's sum, exchanges it across the nodes, and broadcasts the
    result.

    One link of a node is used, for all of the values; in return the bucket stays whole, as a compressor
    of matrices needs it. The leader keeps the residual of the exchange.
    """

    def __init__(self, inside: Link, across: Link) -> None:
        self._inside = inside
        self._across = across

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, compressor: Compressor) -> None:
        self._inside.reduce(bucket.values, 0)
        if self._inside.rank == 0:
            compressor.sum_shares(bucket, residual, self._across)
        elif residual is not None:
            residual.zero_()
        self._inside.broadcast(bucket.values, 0)
