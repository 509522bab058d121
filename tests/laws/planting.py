"""Cells that the tests of the proof train, and short ways to plant a defect on a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from harness.worker.proof import proof

Fields = dict[str, Any]
"""Type of the fixtures `proofs` and `whole_runs`."""
Planted = AbstractContextManager[object]

MLP: Fields = {"workload": "mlp", "micro_batch": 4, "optimizer": "sgd:lr=0.05"}
WIDE: Fields = MLP | {"workload": "py:proof_models:wide"}
NORMED: Fields = MLP | {"workload": "py:proof_models:normed"}
GPT: Fields = {"workload": "py:proof_models:gpt", "micro_batch": 1, "optimizer": "adamw:lr=0.001"}

GRADIENT = "gradient of .* differs from the serial simulation"
UPDATE = "update differs from the serial simulation"
STATE = "optimizer state of .* differs from the replayed one"
REPLICAS = "replicas differ after the update"


def wrapped(owner: object, name: str, wrong: Callable[..., Any]) -> Planted:
    """Replace a function or method by `wrong`, whose first argument is the original."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *arguments, **named: wrong(original, *arguments, **named))


def after(owner: object, name: str, change: Callable[[Any], object]) -> Planted:
    """Call `change` with the object after each call of its method."""

    def wrong(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> Any:
        result = original(self, *arguments, **named)
        change(self)
        return result

    return wrapped(owner, name, wrong)


def gradients_times(factor: float) -> Callable[[Any], None]:
    """Return a change that multiplies the gradients of a trainer, or of its model."""

    def multiply(trained: Any) -> None:
        for parameter in getattr(trained, "model", trained).parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    return multiply


def no_time(rank: int, size: int) -> Planted:
    """Allow the simulations of the first steps no time, so that no step is simulated."""
    return patch.object(proof, "LONGEST_S", 0.0)
