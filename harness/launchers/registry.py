"""Launchers by name, imported when they are asked for."""

from __future__ import annotations

from inspect import isabstract

from harness.launchers.launcher import Launcher
from harness.plan.launchers import launcher_entry, own_launchers
from results.registry import load


def launcher(name: str) -> Launcher:
    """The launcher of this name. Raises UsageError for an unknown name, with the known ones, and
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
    """All that are registered, in their order. One of another package is only imported by its name."""
    return [launcher(entry.name) for entry in own_launchers()]
