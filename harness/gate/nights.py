"""Nights: the studies of `bench matrix --fresh`, one at a time on a host, and what a regression sets off."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.launchers.jobs import job_statuses
from harness.machine.processes import temporary_folder
from harness.plan.naming import fresh_studies
from results.errors import NightBusyError, StudyBusyError
from results.files import study_lock
from results.store import Study


@contextmanager
def night(base: str, runs: Path) -> Iterator[None]:
    """Be the only night on this host that measures into `runs`, and the only one of `base` with live jobs.

    Raises NightBusyError, SchedulerError if a scheduler does not say whether jobs are live.
    """
    lock = runs / f".night-{platform.node()}"
    with ExitStack() as stack:
        try:
            stack.enter_context(study_lock(lock))
        except StudyBusyError as error:
            raise NightBusyError(
                f"another night measures on this host ({lock}): both would be slower; nothing was started, "
                f"start the next one when it has ended"
            ) from error
        for path in fresh_studies(base, runs):
            if live := _live_jobs(path):
                raise NightBusyError(
                    f"the night {path.name} still has live jobs ({live}): nothing was started; wait "
                    f"(bench status {path}), or end them with bench cancel {path}"
                )
        yield


def _live_jobs(root: Path) -> str:
    """Ids of the live jobs of a study, joined by commas."""
    return ", ".join(status.job.job_id for status in job_statuses(Study(root)) if status.is_live)


def require_ended(root: Path) -> None:
    """Refuse to keep a study while its runs still come: a night is kept once, and never changed.

    Raises StudyBusyError if a bench works on it or a job of it is live, SchedulerError if nobody knows.
    """
    if os.access(root, os.W_OK):
        with study_lock(root):
            pass
    if live := _live_jobs(root):
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
