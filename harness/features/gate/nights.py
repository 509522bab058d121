"""When a night may be kept, which nights a study or a folder has, and what a regression sets off."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.features.gate.records.baseline import Baseline
from harness.features.gate.records.history import read_nights
from harness.launchers.nights import live_jobs
from harness.machine.processes import temporary_folder
from harness.terminal.console import Console
from results.errors import StudyBusyError
from results.files import study_lock

if TYPE_CHECKING:
    from harness.reporting.reading import Reading


def require_ended(root: Path) -> None:
    """Refuse to keep a study while its runs still come: a night is kept once, and never changed.

    Raises StudyBusyError if a bench works on it or a job of it is live, SchedulerError if nobody knows.
    """
    if os.access(root, os.W_OK):
        with study_lock(root):
            pass
    if live := live_jobs(root):
        raise StudyBusyError(f"{root} has live jobs ({live}): add it when they have ended")


def nights_in(folder: Path, console: Console) -> dict[str, list[Baseline]]:
    """The nights of `read_nights`, with a warning for each file that is left out."""
    nights, damaged = read_nights(folder)
    for sentence in damaged:
        console.warn(sentence)
    return nights


def read_history(reading: Reading) -> Mapping[str, Sequence[Baseline]]:
    """The nights of `--history`, by machine, in the order of time.

    Nights name commits and settings that a redaction of the study does not know, so it leaves them out.
    """
    folder = reading.given.get("history")
    return {} if folder is None or reading.redact else nights_in(Path(folder), reading.console)


def nights_here() -> str | None:
    """The folder `history` here, if it has nights."""
    return "history" if any(Path("history").glob("*/*.json")) else None


def set_off(command: str, verdict: str, console: Console) -> None:
    """Run a shell command line because of a regression, and warn if it fails.

    BENCH_VERDICT in its environment is the path of a file with `verdict`, which is removed after it.
    """
    try:
        # Background processes of the command do not keep the folder, and are not waited for.
        with temporary_folder("bench-verdict-") as (folder, _):
            path = folder / "verdict.json"
            path.write_text(verdict, encoding="utf-8")
            variables = {**os.environ, "BENCH_VERDICT": str(path)}
            code = subprocess.run(["sh", "-c", command], env=variables, check=False).returncode
    except OSError as error:
        console.warn(f"--on-regression {command!r} was not run: {error}; the verdict stands")
        return
    if code:
        console.warn(f"--on-regression {command!r} ended with exit code {code}; the verdict stands")
