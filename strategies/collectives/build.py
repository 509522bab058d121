"""From a collective's spec text to the route of the buckets."""

from __future__ import annotations

from collections.abc import Callable

from results.spec import Spec
from strategies.catalog import COLLECTIVES
from strategies.collectives.link import Link
from strategies.collectives.route import Flat, Route


def build_route(text: str, link: Link, *, node_size: int) -> Route:
    """The route that `text` names, over all ranks of `link`; `node_size` ranks are on a node, in order.

    Collective if it makes groups of its own. Raises SpecError for one that does not exist.
    """
    spec = COLLECTIVES.parse(text)
    return _BUILDERS[spec.name](spec, link, node_size)


Builder = Callable[[Spec, Link, int], Route]

_BUILDERS: dict[str, Builder] = {
    "default": lambda spec, link, node_size: Flat(link),
}
