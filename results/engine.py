"""Engines: packages that train, and that need not be installed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A package that a name of a catalog needs. Nothing of it is imported here."""

    package: str
    """The name of the distribution and of its module."""
    release: str
    """The beginning of the versions whose internals bench knows, such as `0.19.`."""
    install: str
    """The command that installs it."""

    @property
    def code(self) -> str:
        """The version of its code, as `PACKAGE VERSION`."""
        return f"{self.package} {_version(self.package) or 'not installed'}"

    @property
    def missing(self) -> str | None:
        """Why it cannot be used here, with the command that installs it; None if it can."""
        why = _missing(self.package, self.release)
        return None if why is None else f"{why}; install it: {self.install}"


def _version(package: str) -> str | None:
    from importlib import metadata  # 30 ms that `bench --help` does not need

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _missing(package: str, release: str) -> str | None:
    from importlib import metadata

    found = _version(package)
    if found is None:
        return f"{package} is not installed"
    if not found.startswith(release):
        return f"{package} {found} is installed, and bench works with {release}*"
    needed = metadata.requires(package) or []
    # A requirement with a marker is of an extra, or of another system.
    names = [re.split(r"[^\w.-]", one)[0] for one in needed if ";" not in one]
    lacking = [name for name in names if _version(name) is None]
    if find_spec(package) is None:
        lacking = [f"its own module {package}"]
    return f"{package} {found} is installed in part, without {', '.join(lacking)}" if lacking else None


forget_engines = _missing.cache_clear
"""Look again at what is installed, for a process that installs packages."""
