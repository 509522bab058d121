"""From the name of a launcher to the launcher, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from harness.launchers.launcher import JobLauncher, Launcher
from harness.plan.launchers import launcher_entry, launcher_names
from results.errors import SchedulerError


def launcher(name: str) -> Launcher:
    """The launcher of this name. Raises UsageError if there is none, with the names that there are."""
    module, _, attribute = launcher_entry(name).home.partition(":")
    found = getattr(import_module(module), attribute)()
    assert isinstance(found, Launcher)
    return found


def launchers() -> list[Launcher]:
    """All of them, in the order of the registry."""
    return [launcher(name) for name in launcher_names()]


def job_launcher(name: str) -> JobLauncher:
    """The launcher that has made a job. Raises SchedulerError if there is none of this name here."""
    found = launcher(name) if name in launcher_names() else None
    if not isinstance(found, JobLauncher):
        makers = [each.name for each in launchers() if isinstance(each, JobLauncher)]
        raise SchedulerError(
            f"a job of the study was made by the launcher {name!r}, and there is none here that makes jobs "
            f"under this name ({', '.join(makers)} do): install it, or close the jobs: bench cancel --forget"
        )
    return found
