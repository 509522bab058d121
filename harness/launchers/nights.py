"""Nights: the studies of `bench matrix --fresh`, one at a time on a host."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.launchers.jobs import job_statuses
from harness.plan.request import fresh_studies
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
            if live := live_jobs(path):
                raise NightBusyError(
                    f"the night {path.name} still has live jobs ({live}): nothing was started; wait "
                    f"(bench status {path}), or end them with bench cancel {path}"
                )
        yield


def live_jobs(root: Path) -> str:
    """Ids of the live jobs of a study, joined by commas."""
    return ", ".join(status.job.job_id for status in job_statuses(Study(root)) if status.is_live)
