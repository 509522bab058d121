"""Live scalars for TensorBoard: what `--tensorboard` asks for, written between blocks and never inside one.

Each rank writes its own event file. The scalars of a timed step are its row in the rank record. The
number of a step counts from the first of the warm-up, of which the record has only the losses.
Durations are in milliseconds, and event files hold single precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from results.record import StepColumns

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TIMES = ("step", "data", "forward", "backward", "optimizer")
"""Columns `NAME_ns` of a rank record: the tags `time/NAME_ms`."""
NEVER_S = 10**9
"""Seconds after which the writer's thread writes by itself: never, as each block's end flushes."""


class Scalars:
    """Writes the steps of each block."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is for the event files; None: nobody asked for scalars, and none are written."""
        self.absent: dict[str, str] = {}
        """The reason under `tensorboard` if it does not write, or no longer does."""
        self._steps = 0
        self._writer: SummaryWriter | None = None
        if folder is None:
            return
        try:
            # Takes a package that is not installed everywhere, and a while.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), flush_secs=NEVER_S)
        except (ImportError, OSError) as error:
            self.absent = {"tensorboard": f"{error}; is the package tensorboard installed here?"}

    def write(self, columns: StepColumns) -> None:
        """Write the next steps, in order; they are in the file when this returns."""
        first, self._steps = self._steps, self._steps + len(columns.step_ns)
        self._add(
            (
                first + i,
                ({} if loss is None else {"loss": loss})
                | {f"time/{name}_ms": getattr(columns, f"{name}_ns")[i] / 1e6 for name in TIMES},
            )
            for i, loss in enumerate(columns.loss)
        )

    def point(self, step: int, values: Mapping[str, float]) -> None:
        """Write values by their tags at a step of a training run; they are in the file when this returns."""
        self._add([(step, values)])

    def _add(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        if self._writer is None:
            return
        try:
            for step, values in rows:
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, step)
            self._writer.flush()
        except Exception as error:
            # A full disk, say. Scalars are an extra: the run is good without.
            self._writer, self.absent = None, {"tensorboard": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
