"""The optimizers that there are."""

from __future__ import annotations

from results.registry import Registry
from strategies.optimizers.adamw import AdamW
from strategies.optimizers.facts import OptimizerFacts
from strategies.optimizers.sgd import Sgd

OPTIMIZERS: Registry[OptimizerFacts] = Registry("optimizer", (Sgd, AdamW))
