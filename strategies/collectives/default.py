"""`default`: the backend's own collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from results.spec import Spec
from strategies.collectives.facts import CollectiveFacts
from strategies.collectives.route import Flat, Route

if TYPE_CHECKING:
    from strategies.collectives.link import Link


class Default(CollectiveFacts):
    """All ranks at once."""

    name = "default"
    help = "the backend's own all-reduce"
    route = "strategies.collectives.default:route"


def route(spec: Spec, link: Link, node_size: int) -> Route:
    """All ranks at once."""
    return Flat(link)
