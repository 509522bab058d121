"""From a collective's spec text to the route of the buckets."""

from __future__ import annotations

from collections.abc import Callable

from results.spec import Spec
from strategies.collectives.catalog import COLLECTIVES
from strategies.collectives.hierarchical import build_hierarchical
from strategies.collectives.link import Link
from strategies.collectives.ring import Ring
from strategies.collectives.route import Flat, Route
from strategies.collectives.tree import Tree


def build_route(text: str, link: Link, *, node_size: int) -> Route:
    """The route that `text` names, over all ranks of `link`; `node_size` ranks are on a node, in order.

    Collective if it makes groups of its own. Raises SpecError for one that does not exist.
    """
    spec = COLLECTIVES.parse(text)
    return _BUILDERS[spec.name](spec, link, node_size)


def _chunk_bytes(spec: Spec) -> int:
    return int(spec.number("chunk_mb") * 2**20)


Builder = Callable[[Spec, Link, int], Route]

_BUILDERS: dict[str, Builder] = {
    "default": lambda spec, link, node_size: Flat(link),
    "ring": lambda spec, link, node_size: Flat(Ring(link, chunk_bytes=_chunk_bytes(spec))),
    "tree": lambda spec, link, node_size: Flat(Tree(link, chunk_bytes=_chunk_bytes(spec))),
    "hierarchical": lambda spec, link, node_size: build_hierarchical(
        link, node_size=node_size, via=spec.word("via")
    ),
}
