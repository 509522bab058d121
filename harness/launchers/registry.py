"""Launchers by name, imported when they are asked for."""

from __future__ import annotations

from inspect import isabstract

from harness.launchers.launcher import Launcher
from harness.plan.launchers import OWN, added_launchers
from results.errors import UsageError
from results.registry import load


def launcher(name: str) -> Launcher:
    """The launcher of this name. Raises UsageError for an unknown name, with the known ones, and
    ExtensionError if another package adds it and it cannot be imported."""
    if name in OWN:
        found = load(OWN[name].place)()
        assert isinstance(found, Launcher)
        return found
    added = added_launchers()
    if name not in added:
        raise UsageError(f"there is no launcher {name!r}; --launcher is one of {', '.join([*OWN, *added])}")
    made = added[name].load()
    needed = f"a class derived from {Launcher.__module__}.Launcher whose name is {name!r}"
    if not (isinstance(made, type) and issubclass(made, Launcher) and made.name == name):
        raise added[name].wrong(made, needed)
    if isabstract(made):
        methods = ", ".join(sorted(made.__abstractmethods__))
        raise added[name].wrong(made, f"{needed} and that implements {methods}")
    return made()


def launchers() -> list[Launcher]:
    """All that are registered, in their order. One of another package is only imported by its name."""
    return [launcher(name) for name in OWN]
