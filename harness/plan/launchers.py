"""The launchers there are, by name. None of them is imported here: `--help` lists them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from results.errors import UsageError
from results.extensions import Extension, extensions
from results.launch import JobVariables

DEFAULT = "local"
GROUP = "bench.launchers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEntry:
    """One launcher as `--launcher` knows it."""

    name: str
    home: str
    """`module:class` of its `harness.launchers.launcher.Launcher`, imported when it is first used."""
    help: str
    """What it does, after its name: `submits jobs`."""
    job_variables: JobVariables | None = None
    """Of the jobs that its scheduler starts; None: it has none, or their numbers are not recorded."""
    extension: Extension | None = None
    """Of a launcher that another package adds by an entry point."""


_ENTRIES: dict[str, LauncherEntry] = {}


def register(name: str, home: str, help: str, *, job_variables: JobVariables | None = None) -> None:
    """Add a launcher, before the command line is made. Raises UsageError for a name that is taken."""
    if name in _ENTRIES:
        raise UsageError(f"two launchers are called {name}: {_ENTRIES[name].home} and {home}; rename one")
    _ENTRIES[name] = LauncherEntry(name=name, home=home, help=help, job_variables=job_variables)


register("local", "harness.launchers.local:LocalLauncher", "runs here")
register(
    "slurm",
    "harness.launchers.slurm.launcher:SlurmLauncher",
    "submits jobs to Slurm",
    job_variables=JobVariables(scheduler="slurm", job="SLURM_JOB_ID", restarts="SLURM_RESTART_COUNT"),
)
register("kubernetes", "harness.launchers.kubernetes.launcher:KubernetesLauncher", "writes manifests of jobs")
register("manual", "harness.launchers.manual:ManualLauncher", "prints the command for each host")


def launcher_entries() -> dict[str, LauncherEntry]:
    """All of them by name: those that are registered, then those of other packages.

    Raises ExtensionError for a name that two packages have.
    """
    added = {
        name: LauncherEntry(name=name, home=one.point.value, help=f"is of {one.package}", extension=one)
        for name, one in extensions(GROUP, _ENTRIES).items()
    }
    return _ENTRIES | added


def launcher_names() -> tuple[str, ...]:
    """All names, in the order of `launcher_entries`."""
    return tuple(launcher_entries())


def launcher_entry(name: str) -> LauncherEntry:
    """The entry of a name. Raises UsageError if there is none, with the names that there are."""
    entries = launcher_entries()
    if name not in entries:
        raise UsageError(f"there is no launcher {name!r}; --launcher is one of {', '.join(entries)}")
    return entries[name]


def job_variables() -> tuple[JobVariables, ...]:
    """Of every scheduler that a launcher has."""
    found = (entry.job_variables for entry in _ENTRIES.values())
    return tuple(one for one in found if one is not None)


def own_launchers() -> tuple[LauncherEntry, ...]:
    """Those of no other package."""
    return tuple(entry for entry in launcher_entries().values() if entry.extension is None)


def launchers_help(entries: Iterable[LauncherEntry] | None = None) -> str:
    """These in a line; None: all of them."""
    told = launcher_entries().values() if entries is None else entries
    return ", ".join(f"{entry.name} {entry.help}" for entry in told)
