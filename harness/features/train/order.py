"""The order of `bench train`: how long a cell is trained, what is kept, and when it ends early."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import msgspec

from results.errors import UsageError
from results.plan import Order
from workloads.shape import METRICS

MetricName = str
"""One of `METRICS`, or of the workload's own `metrics`."""
Schedule = Literal["none", "cosine"]
BatchRule = Literal["global", "rate"]

CHECKPOINT_EVERY = 200
"""Steps from one checkpoint to the next, unless another number is asked for."""
KEEP = 3
RESTARTS = 3
_TARGET = re.compile(r"(?P<metric>[A-Za-z]\w*)\s*(?P<sign><=|>=)\s*(?P<value>\S+)")


def larger_is_better(metric: MetricName) -> bool:
    """Whether a larger value is better, as for all metrics except names that end in `loss` or `error`."""
    return not metric.endswith(("loss", "error"))


@dataclass(frozen=True, slots=True)
class Target:
    """A value at which training ends."""

    metric: MetricName
    value: float

    def reached(self, found: float) -> bool:
        """Whether the metric is as good as the target; NaN is not."""
        return found >= self.value if larger_is_better(self.metric) else found <= self.value


def read_target(text: str) -> Target:
    """A target such as `val_accuracy>=0.97`. Raises UsageError for any other form or a wrong sign."""
    match = _TARGET.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--target {text!r}: write METRIC>=VALUE or METRIC<=VALUE with one of val_loss, "
            f"val_accuracy, loss and the workload's own metrics, such as 'val_accuracy>=0.97'"
        )
    metric = match["metric"]
    try:
        value = float(match["value"])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"--target {text!r}: {match['value']!r} is not a finite number; write {metric}<=2.0")
    wanted = ">=" if larger_is_better(metric) else "<="
    if match["sign"] != wanted:
        raise UsageError(
            f"--target {text!r}: a target for {metric} needs {wanted}; write {metric}{wanted}{value:g}"
        )
    return Target(metric, value)


def read_elastic(text: str) -> tuple[int, int]:
    """The nodes of `1:2`. Raises UsageError for any other form."""
    least, colon, most = text.partition(":")
    if not (colon and least.strip().isdecimal() and most.strip().isdecimal()):
        raise UsageError(f"--elastic {text!r}: write MIN:MAX nodes, such as 1:2")
    return int(least), int(most)


class TrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """How the cells of a plan are trained. One of `epochs` and `steps` is given."""

    epochs: int | None = None
    steps: int | None = None
    """Updates of the optimizer, from the first of the run on."""
    checkpoint_every: int = CHECKPOINT_EVERY
    """Steps from one checkpoint to the next."""
    keep: int = KEEP
    """The number of last checkpoints that are kept, in addition to the best one."""
    best: MetricName | None = None
    """The metric by which the best checkpoint is chosen; None: only the last ones are kept."""
    patience: int | None = None
    """Validations in a row without a better value after which training ends; None: it does not."""
    target: str | None = None
    """A bound such as `val_accuracy>=0.97`: training ends when a validation reaches it."""
    validate_every: int | None = None
    """Steps between validations; None: an epoch, or `checkpoint_every` for data without epochs."""
    schedule: Schedule = "none"
    """The schedule of the learning rate, over the ordered steps."""
    warmup_steps: int = 0
    """Steps in which a schedule raises the learning rate linearly from 0."""
    restarts: int = RESTARTS
    """How many failed launches one call may restart."""
    elastic: tuple[int, int] | None = None
    """The smallest and the largest number of nodes; None: all nodes of the cell, or none."""
    batch_rule: BatchRule = "global"
    """On fewer nodes: `global` keeps the global batch, `rate` scales the rate with the replicas."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            given = "neither was given" if self.epochs is None else "both were given"
            raise UsageError(f"give exactly one of --epochs N and --steps N: {given}")
        _require_positive(self)
        if self.target is not None:
            read_target(self.target)
        if self.schedule == "none" and self.warmup_steps:
            raise UsageError("--warmup-steps is a part of a schedule: add --schedule cosine, or leave it out")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise UsageError(
                f"--warmup-steps {self.warmup_steps} leaves nothing of {self.steps} steps: give fewer of them"
            )
        if self.elastic is not None and not 1 <= self.elastic[0] <= self.elastic[1]:
            least, most = self.elastic
            raise UsageError(
                f"--elastic {least}:{most}: write MIN:MAX nodes with 1 <= MIN <= MAX, such as 1:2"
            )

    @property
    def stored(self) -> Order:
        """The order as plans and launches store it."""
        return Order.of("trained", self)

    @property
    def goal(self) -> Target | None:
        return None if self.target is None else read_target(self.target)

    @property
    def watched(self) -> MetricName | None:
        """The metric that patience counts by: `best`, the target's, or the validation loss."""
        if self.patience is None:
            return None
        return self.best or (self.goal.metric if self.goal else "val_loss")

    @property
    def asked(self) -> dict[str, MetricName]:
        """The metrics that decide something, by the option that names each."""
        asked = {
            f"--target '{self.target}'": self.goal.metric if self.goal else None,
            f"--best {self.best}": self.best,
            f"--patience {self.patience}": self.watched,
        }
        return {flag: metric for flag, metric in asked.items() if metric is not None}

    @property
    def validates(self) -> bool:
        """Whether it needs held-out samples."""
        return any(metric != "loss" for metric in self.asked.values())

    def require_metrics(self, own: Collection[str]) -> None:
        """Raise UsageError for a metric that is neither one of `METRICS` nor of the workload's `own`."""
        for flag, metric in self.asked.items():
            if metric not in (*METRICS, *own):
                known = ", ".join((*METRICS, *own))
                raise UsageError(f"{flag}: unknown metric {metric!r}; metrics are {known}")

    def ends_as(self, other: TrainOrder) -> bool:
        """Whether training by `other` ends where training by this order does."""
        fields = ("epochs", "steps", "best", "patience", "target", "schedule", "warmup_steps")
        return all(getattr(self, name) == getattr(other, name) for name in fields)


def _require_positive(order: TrainOrder) -> None:
    for name in ("epochs", "steps", "checkpoint_every", "keep", "patience", "validate_every"):
        value = getattr(order, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is at least 1, not {value}")
    for name in ("warmup_steps", "restarts"):
        if getattr(order, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} is at least 0, not {getattr(order, name)}")
