"""Observers that time the phases of a step: by the host's clock on CPU, by events on streams of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor

from results.record import StepColumns
from strategies.devices import DeviceKind, Moment, device_of
from strategies.training.observer import Phase

_PHASES = tuple(Phase)


class StepClock(Protocol):
    """A StepObserver that hands out what it saw."""

    name: Literal["monotonic", "cuda-event"]

    def begins(self, phase: Phase) -> None: ...

    def step_done(self, loss: Tensor) -> None: ...

    def drain(self) -> StepColumns:
        """The steps since the last call; the device must have finished them."""
        ...


class MonotonicClock:
    """The host's monotonic clock: right where the work is done when a call returns, so on CPU."""

    name: Literal["monotonic", "cuda-event"] = "monotonic"

    def __init__(self) -> None:
        self._steps: list[list[tuple[Phase, int]]] = []
        self._marks: list[tuple[Phase, int]] = []
        self._ends: list[int] = []
        self._losses: list[Tensor] = []

    def begins(self, phase: Phase) -> None:
        self._marks.append((phase, time.perf_counter_ns()))

    def step_done(self, loss: Tensor) -> None:
        self._ends.append(time.perf_counter_ns())
        self._steps.append(self._marks)
        self._marks = []
        self._losses.append(loss)

    def drain(self) -> StepColumns:
        rows = [_row(marks, end) for marks, end in zip(self._steps, self._ends, strict=True)]
        losses = self._losses
        self._steps, self._ends, self._losses = [], [], []
        return _columns(rows, losses)


class EventClock:
    """Events on the current stream: no synchronisation while steps run."""

    name: Literal["monotonic", "cuda-event"] = "cuda-event"

    def __init__(self, device: DeviceKind) -> None:
        self._device = device
        self._steps: list[list[tuple[Phase, Moment]]] = []
        self._marks: list[tuple[Phase, Moment]] = []
        self._ends: list[Moment] = []
        self._losses: list[Tensor] = []

    def begins(self, phase: Phase) -> None:
        self._marks.append((phase, self._device.moment()))

    def step_done(self, loss: Tensor) -> None:
        self._ends.append(self._device.moment())
        self._steps.append(self._marks)
        self._marks = []
        self._losses.append(loss)

    def drain(self) -> StepColumns:
        rows = []
        for marks, end in zip(self._steps, self._ends, strict=True):
            first = marks[0][1]
            moments = [(phase, self._device.elapsed_ns(first, event)) for phase, event in marks]
            rows.append(_row(moments, self._device.elapsed_ns(first, end)))
        losses = self._losses
        self._steps, self._ends, self._losses = [], [], []
        return _columns(rows, losses)


def step_clock(device: torch.device) -> StepClock:
    on = device_of(device)
    return EventClock(on) if on.asynchronous else MonotonicClock()


def _row(marks: list[tuple[Phase, int]], end: int) -> dict[str, int]:
    """Durations of one step: each mark's phase lasts until the next mark, the last until the end."""
    row: dict[str, int] = dict.fromkeys(_PHASES, 0)
    ends = [at for _, at in marks[1:]] + [end]
    for (phase, at), until in zip(marks, ends, strict=True):
        row[phase] += until - at
    return {"step": end - marks[0][1], **row}


def _columns(rows: list[dict[str, int]], losses: list[Tensor]) -> StepColumns:
    values = [float(loss) for loss in torch.stack(losses).tolist()] if losses else []
    return StepColumns(
        step_ns=[row["step"] for row in rows],
        data_ns=[row[Phase.DATA] for row in rows],
        forward_ns=[row[Phase.FORWARD] for row in rows],
        backward_ns=[row[Phase.BACKWARD] for row in rows],
        optimizer_ns=[row[Phase.OPTIMIZER] for row in rows],
        loss=[value if math.isfinite(value) else None for value in values],
    )


class FirstStep:
    """Host time of a trainer's very first step, whose halves a proof takes apart; the device included."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        """`synchronize` waits for this rank's own device."""
        self._synchronize = synchronize
        self._over = False
        self.ns = 0

    @contextmanager
    def part(self) -> Iterator[None]:
        """Counts what is done in it, until the step is over."""
        if self._over:
            yield
            return
        start = time.perf_counter_ns()
        yield
        self._synchronize()
        self.ns += time.perf_counter_ns() - start

    def is_over(self) -> None:
        """The next part is another step's."""
        self._over = True


def joined_steps(first: StepColumns, second: StepColumns) -> StepColumns:
    """The steps of both, in order."""
    return StepColumns(
        **{name: getattr(first, name) + getattr(second, name) for name in StepColumns.__struct_fields__}
    )
