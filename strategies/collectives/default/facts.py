"""`default` without torch."""

from __future__ import annotations

from strategies.collectives.facts import CollectiveFacts


class Default(CollectiveFacts):
    """All ranks at once."""

    name = "default"
    help = "the backend's own all-reduce"
    route = "strategies.collectives.default.route:route"
