"""`default`: the backend's own collectives."""

from __future__ import annotations

from results.spec import Spec
from strategies.collectives.link import Link
from strategies.collectives.route import Flat, Route


def route(spec: Spec, link: Link, node_size: int) -> Route:
    """All ranks at once."""
    return Flat(link)
