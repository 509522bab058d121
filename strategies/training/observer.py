"""The interface between training and measuring: the Trainer reports its phases, an observer may read a
clock."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from torch import Tensor


class Phase(StrEnum):
    """The parts of a step, in their order; with accumulation the first three repeat."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class StepObserver(Protocol):
    """An observer of every step of a Trainer, called on the thread and at the moment of each event."""

    def begins(self, phase: Phase) -> None:
        """Note that the previous phase has ended and this one begins."""

    def step_done(self, loss: Tensor) -> None:
        """Note that the step has ended; `loss` is the detached mean loss of its samples, a scalar on the
        device."""


class SilentObserver:
    """An observer that does nothing."""

    def begins(self, phase: Phase) -> None:
        return

    def step_done(self, loss: Tensor) -> None:
        return
