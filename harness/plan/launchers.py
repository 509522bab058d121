"""The launchers by name. `--help` lists them, so this module imports none of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from results import features
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
    """Words that follow its name in --help, such as `submits jobs`."""
    job_variables: JobVariables | None = None
    """Variables of the jobs that its scheduler starts; None without a scheduler or recorded job numbers."""
    extension: Extension | None = None
    """The package and entry point that add the launcher; None for a launcher of bench."""


_ENTRIES: dict[str, LauncherEntry] = {}


def register(name: str, home: str, help: str, *, job_variables: JobVariables | None = None) -> None:
    """Add a launcher, before the command line is made. Raises UsageError for a name that is taken."""
    if name in _ENTRIES:
        raise UsageError(f"two launchers are called {name}: {_ENTRIES[name].home} and {home}; rename one")
    _ENTRIES[name] = LauncherEntry(name=name, home=home, help=help, job_variables=job_variables)


register("local", "harness.launchers.local:LocalLauncher", "runs here")
for _name, _one in features.launchers().items():
    register(
        _name,
        _one.place,
        _one.help,
        job_variables=None
        if _one.scheduler is None
        else JobVariables(scheduler=_one.scheduler, job=_one.job_variable, restarts=_one.restarts_variable),
    )


def launcher_entries() -> dict[str, LauncherEntry]:
    """All launchers by name: first the registered ones, then launchers of other packages.

    Raises ExtensionError for a name that two packages have.
    """
    added = {
        name: LauncherEntry(name=name, home=one.point.value, help=f"is of {one.package}", extension=one)
        for name, one in extensions(GROUP, _ENTRIES).items()
    }
    return _ENTRIES | added


def launcher_entry(name: str) -> LauncherEntry:
    """The entry of a name. Raises UsageError with the known names if it is unknown."""
    entries = launcher_entries()
    if name not in entries:
        raise UsageError(f"there is no launcher {name!r}; --launcher is one of {', '.join(entries)}")
    return entries[name]


def job_variables() -> tuple[JobVariables, ...]:
    """The variables of every scheduler that a launcher has."""
    found = (entry.job_variables for entry in _ENTRIES.values())
    return tuple(one for one in found if one is not None)


def own_launchers() -> tuple[LauncherEntry, ...]:
    """The launchers of bench itself."""
    return tuple(entry for entry in launcher_entries().values() if entry.extension is None)


def launchers_help(entries: Iterable[LauncherEntry] | None = None) -> str:
    """One line about these launchers; None for all of them."""
    told = launcher_entries().values() if entries is None else entries
    return ", ".join(f"{entry.name} {entry.help}" for entry in told)
