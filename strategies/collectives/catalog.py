"""The collectives that there are."""

from __future__ import annotations

from results.registry import Registry
from strategies.collectives.default.facts import Default
from strategies.collectives.facts import CollectiveFacts
from strategies.collectives.hierarchical.facts import Hierarchical
from strategies.collectives.ring.facts import RingFacts
from strategies.collectives.tree.facts import TreeFacts

COLLECTIVES: Registry[CollectiveFacts] = Registry(
    "collective",
    (Default, RingFacts, TreeFacts, Hierarchical),
    base=CollectiveFacts,
    group="bench.collectives",
)
