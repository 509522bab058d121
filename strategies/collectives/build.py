"""From a collective's spec text to the route of the buckets."""

from __future__ import annotations

from collections.abc import Callable

from results.registry import load
from results.spec import Spec
from strategies.collectives.catalog import COLLECTIVES
from strategies.collectives.link import Link
from strategies.collectives.route import Route


def build_route(text: str, link: Link, *, node_size: int) -> Route:
    """The route that `text` names, over all ranks of `link`; `node_size` ranks are on a node, in order.

    Collective if it makes groups of its own. Raises SpecError for one that does not exist.
    """
    facts = COLLECTIVES.facts(text)
    route: Callable[[Spec, Link, int], Route] = load(facts.route)
    return route(facts.spec, link, node_size)
