"""The names that options take, for `bench list` and for the completion of a shell."""

from __future__ import annotations

from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from workloads.catalog import WORKLOADS
from workloads.datasets.facts import DATASETS

CATALOGS = {
    catalog.kind: catalog
    for catalog in (WORKLOADS, DATASETS, STRATEGIES, COMPRESSIONS, COLLECTIVES, OPTIMIZERS)
}
"""By the option whose values they are."""
