"""Times of the phases of steps, and of the first step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from results.record import StepColumns
from strategies.devices import Moment, device_of
from strategies.training.observer import Phase


class StepClock:
    """An observer that times the phases of each step.

    On CPU it reads the host's clock, which is right where the work is done when a call returns. On a device
    with streams it records events on the current stream, so that nothing waits while steps run.
    """

    def __init__(self, device: torch.device) -> None:
        on = device_of(device)
        self.name = on.clock
        # On CPU the clock itself: a call in between would be a part of each phase.
        self._moment: Callable[[], Moment] = on.moment if on.asynchronous else time.perf_counter_ns
        self._elapsed_ns = on.elapsed_ns
        self._steps: list[list[tuple[Phase, Moment]]] = []
        self._marks: list[tuple[Phase, Moment]] = []
        self._ends: list[Moment] = []
        self._losses: list[Tensor] = []

    def begins(self, phase: Phase) -> None:
        self._marks.append((phase, self._moment()))

    def step_done(self, loss: Tensor) -> None:
        self._ends.append(self._moment())
        self._steps.append(self._marks)
        self._marks = []
        self._losses.append(loss)

    def drain(self) -> StepColumns:
        """Return the steps since the last call; the device must have finished them."""
        rows = [self._row(marks, end) for marks, end in zip(self._steps, self._ends, strict=True)]
        losses = torch.stack(self._losses).tolist() if self._losses else []
        self._steps, self._ends, self._losses = [], [], []
        return StepColumns(
            step_ns=[row["step"] for row in rows],
            data_ns=[row[Phase.DATA] for row in rows],
            forward_ns=[row[Phase.FORWARD] for row in rows],
            backward_ns=[row[Phase.BACKWARD] for row in rows],
            optimizer_ns=[row[Phase.OPTIMIZER] for row in rows],
            loss=[float(f"{loss:.9g}") if math.isfinite(loss) else None for loss in losses],
        )

    def _row(self, marks: list[tuple[Phase, Moment]], end: Moment) -> dict[str, int]:
        """Durations of one step: each mark's phase lasts until the next mark, the last until the end."""
        first = marks[0][1]
        starts = [self._elapsed_ns(first, at) for _, at in marks]
        step_ns = self._elapsed_ns(first, end)
        row: dict[str, int] = dict.fromkeys(Phase, 0)
        for (phase, _), start, until in zip(marks, starts, [*starts[1:], step_ns], strict=True):
            row[phase] += until - start
        return {"step": step_ns, **row}


class FirstStep:
    """The host time of a trainer's very first step, with the device's; a proof times its two halves
    separately."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        """`synchronize` waits for this rank's own device."""
        self._synchronize = synchronize
        self._over = False
        self.ns = 0

    @contextmanager
    def part(self) -> Iterator[None]:
        """Count the time of this context, until the step is over."""
        if self._over:
            yield
            return
        start = time.perf_counter_ns()
        yield
        self._synchronize()
        self.ns += time.perf_counter_ns() - start

    def is_over(self) -> None:
        """Count no further part, as it belongs to another step."""
        self._over = True


def joined_steps(first: StepColumns, second: StepColumns) -> StepColumns:
    """Join the steps of both, in order."""
    return StepColumns(
        **{name: getattr(first, name) + getattr(second, name) for name in StepColumns.__struct_fields__}
    )
