"""From the name of a launcher to the launcher, imported when it is asked for."""

from __future__ import annotations

from inspect import isabstract

from harness.launchers.launcher import JobLauncher, Launcher
from harness.plan.launchers import launcher_entry, launcher_names, own_launchers
from results.errors import SchedulerError
from results.registry import load


def launcher(name: str) -> Launcher:
    """The launcher of this name. Raises UsageError if there is none, with the names that there are, and
    ExtensionError if another package adds it and it cannot be imported."""
    entry = launcher_entry(name)
    if entry.extension is None:
        found = load(entry.home)()
        assert isinstance(found, Launcher)
        return found
    made = entry.extension.load()
    needed = f"a class derived from {Launcher.__module__}.Launcher whose name is {name!r}"
    if not (isinstance(made, type) and issubclass(made, Launcher) and made.name == name):
        raise entry.extension.wrong(made, needed)
    if isabstract(made):
        methods = ", ".join(sorted(made.__abstractmethods__))
        raise entry.extension.wrong(made, f"{needed} and that implements {methods}")
    return made()


def launchers() -> list[Launcher]:
    """All that are registered, in their order. One of another package is imported by its name alone."""
    return [launcher(entry.name) for entry in own_launchers()]


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
