"""A few steps under torch's profiler, kept as a Chrome trace: what `--trace` asks for, after all measuring.

The steps train on from where measuring ended, and come after the parameters were hashed, so that no figure
of the run knows of them. All ranks take them, for a step is collective; those that were chosen are profiled.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from harness.worker.rank.control import Control
from results.files import write_once
from strategies.training.observer import Phase, SilentObserver
from strategies.training.trainer import Trainer
from workloads.batch import Batch

STEPS = 3
WARM_UP_STEPS = 1
"""Under the profiler, and not kept: its start takes time of its own."""


class PhaseMarks:
    """An observer that puts the phases of a step into the trace, as ranges with their names."""

    def __init__(self) -> None:
        self._range = ExitStack()

    def begins(self, phase: Phase) -> None:
        self._range.close()
        self._range.enter_context(record_function(phase.value))

    def step_done(self, loss: Tensor) -> None:
        self._range.close()


def traced_steps(
    trainer: Trainer, batches: Iterator[Batch], control: Control, *, keep: bool
) -> profile | None:
    """Take a few steps, or a whole period of the strategy if that is more. Collective.

    Returns what the profiler saw of all of them but the first, if this rank is to keep it.
    """
    steps = max(STEPS, trainer.model.period)
    profiler = _profiler(trainer, steps) if keep else None
    before, trainer.observer = trainer.observer, PhaseMarks() if keep else SilentObserver()
    with profiler or nullcontext():
        for number in range(WARM_UP_STEPS + steps):
            if number == WARM_UP_STEPS:
                # The others have waited for the profiler to begin; the wait is not to look like training.
                control.barrier()
            trainer.step(batches)
            if number + 1 in (WARM_UP_STEPS, WARM_UP_STEPS + steps):
                control.synchronize()
            if profiler is not None:
                profiler.step()
    trainer.observer = before
    return profiler


def write_trace(profiler: profile, path: Path) -> dict[str, str]:
    """Write the trace as JSON packed by gzip, which chrome://tracing and Perfetto open as it is.

    Returns why there is none (`trace`), or nothing.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            write_once(path, gzip.compress(plain.read_bytes(), compresslevel=6, mtime=0))
    except Exception as error:
        # A full disk, say. A trace is an extra: the run is good without.
        return {"trace": f"{type(error).__name__}: {error}"}
    return {}


def _profiler(trainer: Trainer, steps: int) -> profile:
    activities = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    window = schedule(wait=0, warmup=WARM_UP_STEPS, active=steps, repeat=1)
    return profile(activities=activities, schedule=window, record_shapes=True)
