"""How a training step is distributed: the strategies, and the one Trainer that drives them.

`strategies.catalog` says what there is without importing torch. For a training loop of
your own::

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
    "CheckpointWarning": "strategies.saving.checkpoints",
    "Resumed": "strategies.saving.checkpoints",
    "Saving": "strategies.saving.checkpoints",
    "BatchLoss": "strategies.training.loss",
    "ExchangeSettings": "strategies.gradient_exchange",
    "GradientExchange": "strategies.gradient_exchange",
    "ParallelModel": "strategies.training.parallel",
    "Phase": "strategies.training.observer",
    "ScaledFeedback": "strategies.training.precision",
    "SilentObserver": "strategies.training.observer",
    "StepObserver": "strategies.training.observer",
    "TrainSettings": "strategies.training.parallel",
    "Trainer": "strategies.trainer",
    "evaluate": "strategies.evaluation",
    "parallelize": "strategies.build",
}


def __getattr__(name: str) -> object:
    # Lazy: planning imports strategies.catalog, and must not pay for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
