"""The launchers by name. `--help` lists them, so this module imports none of them."""

from __future__ import annotations

from collections.abc import Mapping

from results.extensions import Extension, extensions
from results.features import LauncherPlace, joined
from results.launch import JobVariables

DEFAULT = "local"
OWN = {
    DEFAULT: LauncherPlace("harness.launchers.local:LocalLauncher", "runs here"),
    **joined(lambda one: one.launchers),
}
"""The launchers of bench itself."""
OWN_HELP = {name: one.help for name, one in OWN.items()}


def added_launchers() -> Mapping[str, Extension]:
    """The launchers of other packages. Raises ExtensionError for a name that two packages have."""
    return extensions("launcher", OWN)


def launcher_help() -> dict[str, str]:
    """All launchers, first the launchers of bench, each with the words that follow its name in --help.

    Raises ExtensionError as `added_launchers` does.
    """
    return OWN_HELP | {name: f"is of {one.package}" for name, one in added_launchers().items()}


def job_variables() -> tuple[JobVariables, ...]:
    """The variables of every scheduler that a launcher has."""
    return tuple(JobVariables(**one.jobs) for one in OWN.values() if one.jobs)


def in_a_line(launchers: Mapping[str, str]) -> str:
    """These launchers with their words."""
    return ", ".join(f"{name} {words}" for name, words in launchers.items())
