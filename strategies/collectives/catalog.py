"""The catalog of collectives, and how the route of one is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from results.registry import Registry, load
from strategies.collectives.facts import CollectiveFacts

if TYPE_CHECKING:
    from results.spec import Spec
    from strategies.collectives.link import Link
    from strategies.collectives.route import Route

COLLECTIVES: Registry[CollectiveFacts] = Registry(
    "collective",
    {
        "default": "strategies.collectives.default:Default",
        "ring": "strategies.collectives.ring:RingFacts",
        "tree": "strategies.collectives.tree:TreeFacts",
        "hierarchical": "strategies.collectives.hierarchical:Hierarchical",
    },
    base=CollectiveFacts,
)


def build_route(text: str, link: Link, *, node_size: int) -> Route:
    """Build the route that `text` names, over all ranks of `link`, of which each node has `node_size` in a
    row.

    Collective if it creates groups. Raises SpecError for an unknown collective.
    """
    facts = COLLECTIVES.facts(text)
    route: Callable[[Spec, Link, int], Route] = load(facts.route)
    return route(facts.spec, link, node_size)
