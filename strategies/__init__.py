"""The strategies that distribute a training step, and the Trainer that runs them.

`strategies.catalog` lists them without importing torch. For your own training loop::

    from strategies import ExchangeSettings, GradientExchange, Trainer, TrainSettings, parallelize
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies.build import parallelize
    from strategies.evaluation import evaluate
    from strategies.gradient_exchange import ExchangeSettings, GradientExchange
    from strategies.saving.checkpoints import CheckpointWarning, Resumed, Saving
    from strategies.trainer import Trainer
    from strategies.training.loss import BatchLoss
    from strategies.training.observer import Phase, SilentObserver, StepObserver
    from strategies.training.parallel import ParallelModel, TrainSettings
    from strategies.training.precision import ScaledFeedback

__all__ = [
    "BatchLoss",
    "CheckpointWarning",
    "ExchangeSettings",
    "GradientExchange",
    "ParallelModel",
    "Phase",
    "Resumed",
    "Saving",
    "ScaledFeedback",
    "SilentObserver",
    "StepObserver",
    "TrainSettings",
    "Trainer",
    "evaluate",
    "parallelize",
]

_HOMES = {
    "strategies.build": ("parallelize",),
    "strategies.evaluation": ("evaluate",),
    "strategies.gradient_exchange": ("ExchangeSettings", "GradientExchange"),
    "strategies.saving.checkpoints": ("CheckpointWarning", "Resumed", "Saving"),
    "strategies.trainer": ("Trainer",),
    "strategies.training.loss": ("BatchLoss",),
    "strategies.training.observer": ("Phase", "SilentObserver", "StepObserver"),
    "strategies.training.parallel": ("ParallelModel", "TrainSettings"),
    "strategies.training.precision": ("ScaledFeedback",),
}


def __getattr__(name: str) -> object:
    # Lazy: planning imports strategies.catalog, and must not pay for torch.
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'strategies' has no attribute {name!r}")
