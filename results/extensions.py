"""Names that other packages add by entry points: listed from metadata, imported when they are asked for."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from results.errors import ExtensionError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = MappingProxyType(
    {
        "bench.strategies": "strategy",
        "bench.compressors": "compression",
        "bench.workloads": "workload",
        "bench.launchers": "launcher",
        "bench.sections": "section",
    }
)
"""Groups of entry points, and what one of each is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One name that another package adds."""

    group: str
    name: str
    package: str
    """The distribution, as pip knows it."""
    version: str
    point: EntryPoint

    def __str__(self) -> str:
        return f"{GROUPS[self.group]} {self.name!r} of the package {self.package} {self.version}"

    def load(self) -> Any:
        """What the entry point names, imported now.

        Raises ExtensionError if it cannot be imported, or if its import brings torch into a process that
        had done without: planning and reporting do.
        """
        had_torch = "torch" in sys.modules
        try:
            found = self.point.load()
        except Exception as error:
            # Whatever the code of another package raises is told as that package's.
            raise ExtensionError(
                f"{self} cannot be imported from {self.point.value}: {type(error).__name__}: {error}; "
                f"repair the package, or uninstall it: pip uninstall {self.package}"
            ) from error
        if "torch" in sys.modules and not had_torch:
            raise ExtensionError(
                f"{self}: importing {self.point.value} imports torch, and planning must not: import torch in "
                f"the module of the model, or inside of functions that run on a rank"
            )
        return found

    def wrong(self, found: object, needed: str) -> ExtensionError:
        """The error for a `found` that is not what the group needs."""
        return ExtensionError(
            f"{self}: {self.point.value} is {found!r}, and must be {needed}: repair the package"
        )

    @property
    def code(self) -> str:
        """`PACKAGE VERSION HASH`: which code it is; the hash as `source_hash` makes it."""
        return f"{self.package} {self.version} {source_hash(self)}"


def extensions(group: str, built_in: Collection[str] = ()) -> Mapping[str, Extension]:
    """What other packages add to a group, by name; none of it is imported.

    Raises ExtensionError for a name of two packages, and for one that is `built_in`.
    """
    found: dict[str, Extension] = {}
    for one in _every():
        if one.group != group:
            continue
        if one.name in built_in:
            raise ExtensionError(
                f"{one} has a name of bench's own: give it another name, or uninstall the package: "
                f"pip uninstall {one.package}"
            )
        if one.name in found:
            raise ExtensionError(
                f"two packages have a {GROUPS[group]} {one.name!r}, {found[one.name].package} and "
                f"{one.package}: uninstall one of them, or give one another name in its entry points"
            )
        found[one.name] = one
    return found


@cache
def _every() -> tuple[Extension, ...]:
    """Of all groups that are called `bench.` something, sorted. Reads the metadata of every installed
    package, which takes some milliseconds."""
    from importlib.metadata import entry_points

    every = entry_points()
    # Every entry point of a distribution has `dist`.
    found = (
        Extension(
            group=group, name=point.name, package=point.dist.name, version=point.dist.version, point=point
        )
        for group in every.groups
        if group.startswith("bench.")
        for point in every.select(group=group)
        if point.dist is not None
    )
    return tuple(sorted(found, key=lambda one: (one.group, one.name, one.package)))


def stray_groups() -> Mapping[str, str]:
    """Groups of entry points that are called `bench.` something and are none of ours, with a package that
    has one."""
    return {one.group: one.package for one in _every() if one.group not in GROUPS}


def forget_packages() -> None:
    """Read the metadata anew when it is next asked for: for a process that installs packages."""
    _every.cache_clear()


def source_hash(extension: Extension) -> str:
    """16 hex digits over the source of the top-level module or package that an entry point names.

    Raises ExtensionError if it is not found. Nothing of it is imported.
    """
    from importlib.util import find_spec

    top = extension.point.module.partition(".")[0]
    spec = find_spec(top)
    if spec is None:
        raise ExtensionError(
            f"{extension}: there is no module {top!r}; repair the package, or uninstall it: "
            f"pip uninstall {extension.package}"
        )
    digest = hashlib.sha256()
    for name, path in _files(spec.origin, spec.submodule_search_locations):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(origin: str | None, folders: Collection[str] | None) -> Iterator[tuple[str, Path]]:
    """The files of a module, or of a package in its folders, each with its name inside of it."""
    if folders is None:
        assert origin is not None
        yield Path(origin).name, Path(origin)
        return
    for folder in sorted(folders):
        for path in sorted(Path(folder).rglob("*.py")):
            yield path.relative_to(folder).as_posix(), path
