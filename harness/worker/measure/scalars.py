"""Live scalars for TensorBoard: what `--tensorboard` asks for, written between blocks and never inside one.

Each rank writes its own event file; the scalars of a step are those of its row in the rank record, and the
number of a step counts from the first of the warm-up. Durations are in milliseconds, and event files hold
single precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from results.record import StepColumns

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TIMES = ("step", "data", "forward", "backward", "optimizer")
"""Columns `NAME_ns` of a rank record: the tags `time/NAME_ms`."""
NEVER_S = 10**9
"""The writer's thread wakes to write after so long; until then it does when a block has ended."""


class Scalars:
    """Writes the steps of each block."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is where event files go; None: nothing is written, and nothing was asked for."""
        self.absent: dict[str, str] = {}
        """Why it does not write, or no longer does."""
        self._steps = 0
        self._writer: SummaryWriter | None = None
        if folder is not None:
            self._open(folder)

    def write(self, columns: StepColumns) -> None:
        """The next steps, in order; they are in the file when this returns."""
        first, self._steps = self._steps, self._steps + len(columns.step_ns)
        if self._writer is None:
            return
        try:
            _write(self._writer, columns, first)
        except Exception as error:
            # A full disk, say. Scalars are an extra: the run is good without.
            self._writer, self.absent = None, {"tensorboard": f"{type(error).__name__}: {error}"}

    def point(self, step: int, values: Mapping[str, float]) -> None:
        """Values by their tags at one step of a training run; they are in the file when this returns."""
        if self._writer is None:
            return
        try:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)
            self._writer.flush()
        except Exception as error:
            self._writer, self.absent = None, {"tensorboard": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, folder: Path) -> None:
        try:
            # Takes a package that is not installed everywhere, and a while.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), flush_secs=NEVER_S)
        except (ImportError, OSError) as error:
            self.absent = {"tensorboard": f"{error}; is the package tensorboard installed here?"}


@contextmanager
def live_scalars(folder: Path | None) -> Iterator[Scalars]:
    """Scalars that are closed in the end."""
    scalars = Scalars(folder)
    try:
        yield scalars
    finally:
        scalars.close()


def _write(writer: SummaryWriter, columns: StepColumns, first: int) -> None:
    for i, loss in enumerate(columns.loss):
        if loss is not None:
            writer.add_scalar("loss", loss, first + i)
        for name in TIMES:
            milliseconds = getattr(columns, f"{name}_ns")[i] / 1e6
            writer.add_scalar(f"time/{name}_ms", milliseconds, first + i)
    writer.flush()
