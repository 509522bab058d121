"""When a night may be kept, and what a regression sets off."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from harness.launchers.nights import live_jobs
from harness.machine.processes import temporary_folder
from results.errors import StudyBusyError
from results.files import study_lock


def require_ended(root: Path) -> None:
    """Refuse to keep a study while its runs still come: a night is kept once, and never changed.

    Raises StudyBusyError if a bench works on it or a job of it is live, SchedulerError if nobody knows.
    """
    if os.access(root, os.W_OK):
        with study_lock(root):
            pass
    if live := live_jobs(root):
        raise StudyBusyError(f"{root} has live jobs ({live}): add it when they have ended")


def set_off(command: str, verdict: str) -> str | None:
    """Run a shell command line because of a regression. Returns an error as a sentence, or None.

    BENCH_VERDICT in its environment is the path of a file with `verdict`, which is removed after it.
    """
    try:
        # Background processes of the command do not keep the folder, and are not waited for.
        with temporary_folder("bench-verdict-") as (folder, _):
            path = folder / "verdict.json"
            path.write_text(verdict, encoding="utf-8")
            variables = {**os.environ, "BENCH_VERDICT": str(path)}
            told = subprocess.run(["sh", "-c", command], env=variables, check=False)
            code = told.returncode
    except OSError as error:
        return f"--on-regression {command!r} was not run: {error}; the verdict stands"
    if code == 0:
        return None
    return f"--on-regression {command!r} ended with exit code {code}; the verdict stands"
