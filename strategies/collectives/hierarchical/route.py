"""`hierarchical`: a sum inside of each node, the compressor across the nodes, and out to all ranks again.

Links inside of a node are fast and links between nodes are not, so that what costs time there is worth
compressing, and the rest is not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from results.spec import Spec
from strategies.collectives.link import Link
from strategies.collectives.route import Flat, Route
from strategies.compression.base import Compressor
from strategies.compression.none.compressor import Dense
from strategies.exchange.buckets import Bucket


def route(spec: Spec, link: Link, node_size: int) -> Route:
    """Over nodes of `node_size` ranks in a row."""
    return build_hierarchical(link, node_size=node_size, via=spec.word("via"))


def build_hierarchical(link: Link, *, node_size: int, via: str) -> Route:
    """The route over nodes of `node_size` ranks in a row; the last may be smaller if `via` is leaders.

    Collective: groups are made, the same on all ranks. Nodes of one rank have nothing inside of them, and
    one node has nothing across: then all ranks are summed at once, and in one node nothing is compressed.
    """
    if node_size >= link.size:
        return OneNode(link)
    if node_size == 1:
        return Flat(link)
    nodes = [range(first, min(first + node_size, link.size)) for first in range(0, link.size, node_size)]
    # Ranks of equal place in their nodes.
    rails = [range(place, link.size, node_size) for place in range(node_size)]
    inside, across = link.split(nodes), link.split(rails)
    if via == "leaders":
        return Leaders(inside, across)
    assert link.size % node_size == 0, "shards need equal nodes"
    return Shards(inside, across)


class OneNode:
    """All ranks are on one node, and there is no slow link to compress for."""

    def __init__(self, link: Link) -> None:
        self._inside = link

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, compressor: Compressor) -> None:
        Dense().sum_shares(bucket, residual, self._inside)


class Shards:
    """Every rank gets its node's sum of one shard, exchanges it across the nodes, and gathers the others.

    All links between nodes are used at once, each for 1 / node size of the values. What a shard's exchange
    does not send is kept by the rank of the shard. Gloo has no reduce-scatter: it sums the whole vector.
    """

    def __init__(self, inside: Link, across: Link) -> None:
        self._inside = inside
        self._across = across

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, compressor: Compressor) -> None:
        numel, node_size = bucket.values.numel(), self._inside.size
        length = -(-numel // node_size)
        padded = pad(bucket.values, (0, length * node_size - numel))
        shard = self._inside.reduce_scatter(padded.view(node_size, length))
        kept = None if residual is None else torch.empty_like(shard)
        # No pieces: where a shard ends says nothing of the parameters.
        compressor.sum_shares(Bucket(index=bucket.index, values=shard, pieces=()), kept, self._across)
        if residual is not None and kept is not None:
            residual.zero_()
            own = residual[self._inside.rank * length :][:length]
            own.copy_(kept[: own.numel()])
        bucket.values.copy_(self._inside.all_gather(shard).view(-1)[:numel])


class Leaders:
    """The first rank of each node gets the node's sum, exchanges it across the nodes, and hands it out.

    One link of a node is used, for all of the values; in return the bucket stays whole, as a compressor
    of matrices needs it. What the exchange does not send is kept by the leader.
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
