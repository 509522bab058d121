"""Which objects a trainer takes into its checkpoints."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from results.errors import UsageError

_LENGTHS = ("T_max", "T_0", "total_iters", "total_steps", "step_size")


def require_attachable(name: str, each: Any, optimizer: Optimizer) -> None:
    """Raises UsageError, with the fix, for what cannot be saved, and for a schedule that cannot work."""
    if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
        raise UsageError(
            f"{name} ({type(each).__name__}) has no state_dict and load_state_dict, so that no run could go "
            f"on from it: for a loader use torchdata's StatefulDataLoader, else an object with both methods"
        )
    if isinstance(each, LRScheduler):
        _require_schedule(name, each, optimizer)


def _require_schedule(name: str, schedule: LRScheduler, optimizer: Optimizer) -> None:
    if schedule.optimizer is not optimizer:
        raise UsageError(
            f"{name} ({type(schedule).__name__}) is of another optimizer: make it with trainer.optimizer"
        )
    for part in getattr(schedule, "_schedulers", [schedule]):
        for length in _LENGTHS:
            if (steps := getattr(part, length, None)) is not None and steps < 1:
                raise UsageError(
                    f"{name} ({type(part).__name__}) has no steps ({length}={steps}): give it the number of "
                    f"times that its step() is called"
                )
