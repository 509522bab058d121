"""Names that other packages add by entry points: listed from metadata, imported when they are asked for."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from results import files
from results.errors import ExtensionError
from results.version import VERSION

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.metadata import EntryPoint

GROUPS = MappingProxyType(
    {
        "strategy": "bench.strategies",
        "compression": "bench.compressors",
        "collective": "bench.collectives",
        "workload": "bench.workloads",
        "launcher": "bench.launchers",
        "section": "bench.sections",
        "command": "bench.commands",
        "kind": "bench.kinds",
    }
)
"""Groups of entry points by the noun for one member."""
OWN = "bench"
"""The package of the names that features add."""
CODE = frozenset((".py", ".so", ".pyd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h"))
"""Suffixes of a package's code: Python, compiled modules, and sources that are compiled when they are
used."""


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
        noun = next(noun for noun, group in GROUPS.items() if group == self.group)
        return f"{noun} {self.name!r} of the package {self.package} {self.version}"

    @property
    def own(self) -> bool:
        """Whether a feature of bench adds it."""
        return self.package == OWN

    def load(self) -> Any:
        """Import the object that the entry point names.

        Raises ExtensionError if it cannot be imported, or if its import is the first in this process to
        import torch, which planning and reporting must not do.
        """
        had_torch = "torch" in sys.modules
        with self.told(f"cannot be imported from {self.point.value}"):
            found = self.point.load()
        if "torch" in sys.modules and not had_torch:
            raise ExtensionError(
                f"{self}: importing {self.point.value} imports torch, and planning must not: import torch in "
                f"the module of the model, or inside of functions that run on a rank"
            )
        return found

    @contextmanager
    def told(self, failure: str) -> Iterator[None]:
        """Raise ExtensionError, which names the package and the `failure`, for any error in the block."""
        try:
            yield
        except ExtensionError:
            raise
        except Exception as error:
            # The code of another package may raise anything.
            raise _failed(f"{self} {failure}", self, error) from error

    def require_place(self, attribute: str, place: object) -> None:
        """Raise ExtensionError if an attribute does not name code of a rank as `package.module:name`.

        The module is not imported: its source must contain the name.
        """
        module, _, name = str(place).partition(":")
        if not all(part.isidentifier() for part in (name, *module.split("."))):
            found = "must be package.module:name"
        elif (spec := _spec(module)) is None:
            found = f"module {module} does not exist"
        elif _lacks(spec, name):
            found = f"{module} has no {name}"
        else:
            return
        raise ExtensionError(f"{self}: its {attribute} is {place!r}, and {found}: repair the package")

    def wrong(self, found: object, needed: str) -> ExtensionError:
        """Return the error for an entry point that loaded `found`, although its entry-point group requires
        `needed`."""
        return ExtensionError(
            f"{self}: {self.point.value} is {found!r}, and must be {needed}: repair the package"
        )

    @property
    def code(self) -> str:
        """The version of the extension's code, as `PACKAGE VERSION HASH` with the `package_hash`."""
        return f"{self.package} {self.version} {package_hash(self)}"


def extensions(noun: str, built_in: Collection[str] = ()) -> Mapping[str, Extension]:
    """The extensions of one noun of `GROUPS`, of other packages and of features, by name.

    They are not imported. Raises ExtensionError for a name of two packages, and for one that is `built_in`.
    """
    found: dict[str, Extension] = {}
    for one in (*_of_features(noun), *_every()):
        if one.group != GROUPS[noun]:
            continue
        if one.name in built_in and not one.own:
            raise ExtensionError(
                f"{one} has a name of bench's own: give it another name, or uninstall the package: "
                f"pip uninstall {one.package}"
            )
        if one.name in found:
            raise ExtensionError(
                f"two packages have a {noun} {one.name!r}, {found[one.name].package} and "
                f"{one.package}: uninstall one of them, or give one another name in its entry points"
            )
        found[one.name] = one
    return found


def _of_features(noun: str) -> Iterator[Extension]:
    """Yield the members that features of bench add to the catalog of this noun."""
    from importlib.metadata import EntryPoint

    from results.features import features

    for feature in features().values():
        for name, place in feature.members.get(noun, {}).items():
            point = EntryPoint(name=name, value=place, group=GROUPS[noun])
            yield Extension(group=GROUPS[noun], name=name, package=OWN, version=VERSION, point=point)


@cache
def _every() -> tuple[Extension, ...]:
    """The members of all groups named `bench.*`, sorted. Reads the metadata of every installed package, which
    takes some milliseconds."""
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
    """Groups of entry points named `bench.*` that bench does not have, each with a package that uses it."""
    return {one.group: one.package for one in _every() if one.group not in GROUPS.values()}


def forget_packages() -> None:
    """Read the metadata again when it is next needed, for a process that installs packages."""
    _every.cache_clear()


def blamed(error: Exception) -> ExtensionError | None:
    """Return an error that names the package whose code has raised `error`, by the frames of its traceback;
    None if no package of an extension has a part in it."""
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        module = str(frame.f_globals.get("__name__"))
        for one in _every():
            if one.group in GROUPS.values() and module.partition(".")[0] in _modules(one):
                where = f"{Path(frame.f_code.co_filename).name}:{line}"
                return _failed(f"the package {one.package} {one.version} failed at {where}", one, error)
    return None


def _failed(failure: str, of: Extension, error: Exception) -> ExtensionError:
    return ExtensionError(
        f"{failure}: {type(error).__name__}: {error}; repair the package, or uninstall it: "
        f"pip uninstall {of.package}"
    )


def _spec(module: str) -> ModuleSpec | None:
    """Find a module. Only the packages around it are imported."""
    try:
        return util.find_spec(module)
    except ModuleNotFoundError:
        return None


def _lacks(spec: ModuleSpec, name: str) -> bool:
    """Return whether the source of a module says that it cannot have a name."""
    source = Path(spec.origin or "")
    names = rf"\b{name}\b|import \*|__getattr__"
    return source.suffix == ".py" and re.search(names, files.read(source).text) is None


def package_hash(extension: Extension) -> str:
    """16 hex digits over the code of the package that adds an entry point: the top-level module that the
    entry point names, and the others of its distribution.

    Raises ExtensionError if the first is not found. Nothing of it is imported.
    """
    top = extension.point.module.partition(".")[0]
    found = _files(top)
    if found is None:
        raise ExtensionError(
            f"{extension}: there is no module {top!r}; repair the package, or uninstall it: "
            f"pip uninstall {extension.package}"
        )
    others = sorted(_modules(extension) - {top})
    found += [(f"{other}/{name}", path) for other in others for name, path in _files(other) or ()]
    digest = hashlib.sha256()
    for name, path in found:
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(files.read(path).data).digest())
    return digest.hexdigest()[:16]


def _modules(extension: Extension) -> set[str]:
    """The top-level modules of a distribution: of its entry points, of `top_level.txt`, and of its installed
    files (an editable install has only a hook)."""
    found = {one.point.module.partition(".")[0] for one in _every() if one.package == extension.package}
    if extension.point.dist is not None:
        found |= set((extension.point.dist.read_text("top_level.txt") or "").split())
        installed = [path for path in extension.point.dist.files or () if path.suffix in CODE]
        found |= {path.parts[0].partition(".")[0] for path in installed}
    return {name for name in found if not name.startswith("__editable__")}


def _files(module: str) -> list[tuple[str, Path]] | None:
    """The code of a top-level module, each file with its name inside of it; None if the module does not
    exist."""
    spec = util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return [] if spec.origin is None else [(Path(spec.origin).name, Path(spec.origin))]
    return [
        (path.relative_to(folder).as_posix(), path)
        for folder in sorted(spec.submodule_search_locations)
        for path in sorted(Path(folder).rglob("*"))
        if path.suffix in CODE
    ]
