"""Engines: packages that train, and that need not be installed.

`engines.yaml` in the working folder, or the file that the variable BENCH_ENGINES names, has the interpreter
in which the cells of an engine run:

    python: {horovod: .venv-horovod/bin/python}

`python -m results.engine PACKAGE RELEASE` prints the state of an engine in an interpreter.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from results.errors import UsageError

FILE = "engines.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A package that a name of a catalog needs. Nothing of it is imported here."""

    package: str
    """The name of the distribution and of its package of modules."""
    module: str
    """The module that its strategy imports."""
    release: str
    """The version whose internals bench knows."""
    install: str
    """The command that installs it."""
    device_variable: str | None = None
    """The environment variable that has the kind of device, if its import reads one."""

    @property
    def python(self) -> str | None:
        """The interpreter that its cells run in; None: this one. Raises UsageError for an invalid file."""
        named = _interpreters().get(self.package)
        return None if named == sys.executable else named

    @property
    def code(self) -> str:
        """The version of its code, as `PACKAGE VERSION`."""
        return f"{self.package} {self._found.version or 'not installed'}"

    @property
    def missing(self) -> str | None:
        """Why it cannot be used here, with the command that installs it; None if it can."""
        why = self._found.missing
        return None if why is None else f"{why}; install it: {self.install}"

    @property
    def _found(self) -> Found:
        python = self.python
        return found(self.package, self.release) if python is None else _asked(self, python)

    def load(self, device: str) -> Any:
        """Import its module, for a kind of device. Raises UsageError if it is missing, or in part."""
        if self.missing is not None:
            raise UsageError(f"{self.package}: {self.missing}")
        if self.device_variable is not None:
            os.environ.setdefault(self.device_variable, device)
        try:
            return import_module(self.module)
        except Exception as error:  # half of an installation may raise anything
            why = f"{self.code} cannot be imported ({type(error).__name__}: {error})"
            raise UsageError(f"{why}; install it: {self.install}") from error


class Found(msgspec.Struct, frozen=True):
    """The state of an engine in one interpreter."""

    version: str | None
    missing: str | None
    """Why it cannot be used there; None if it can."""
    python: str
    torch: str | None


class EnginesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `engines.yaml`."""

    python: dict[str, str]
    """The interpreter of each engine, by its package; a relative path begins at the file's folder."""


@cache
def _interpreters() -> Mapping[str, str]:
    from results.strict_yaml import FileKind  # yaml, which `bench --help` does not need

    named = os.environ.get("BENCH_ENGINES")
    path = Path(named or FILE)
    if not named and not path.exists():
        return {}
    kind = FileKind(
        type=EnginesFile,
        name="engines file",
        example="python: {PACKAGE: .venv-engine/bin/python}",
        advice="correct BENCH_ENGINES",
    )
    # A link is not resolved: the Python of a virtual environment is one.
    pythons = kind.read(path).python
    return {package: str(path.parent.absolute() / python) for package, python in pythons.items()}


@cache
def _asked(engine: Engine, python: str) -> Found:
    """Ask another interpreter, which must have the Python and the torch of this one."""
    home = Path(__file__).parents[1]
    question = [python, "-m", "results.engine", engine.package, engine.release]
    surroundings = {**os.environ, "PYTHONPATH": str(home), "PYTHONSAFEPATH": "1"}
    here = found(engine.package, engine.release)
    try:
        done = subprocess.run(question, capture_output=True, timeout=60, check=True, env=surroundings)
        there = msgspec.json.decode(done.stdout, type=Found)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        why = f"its interpreter {python} ({FILE}) does not run bench: {error}"
        return msgspec.structs.replace(here, version=None, missing=why)
    if (there.python, there.torch) != (here.python, here.torch):
        why = (
            f"its interpreter {python} has Python {there.python} and torch {there.torch}, and bench runs "
            f"with Python {here.python} and torch {here.torch}: only cells with the same ones are compared"
        )
        return msgspec.structs.replace(there, missing=why)
    return there


@cache
def found(package: str, release: str) -> Found:
    """Return the state of an engine in this interpreter."""
    return Found(_version(package), _missing(package, release), platform.python_version(), _version("torch"))


def _version(package: str) -> str | None:
    from importlib import metadata  # 30 ms that `bench --help` does not need

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _missing(package: str, release: str) -> str | None:
    from importlib import metadata

    found = _version(package)
    if found is None:
        return f"{package} is not installed"
    if found.partition("+")[0] != release:
        return f"{package} {found} is installed, and bench works with {release}"
    needed = metadata.requires(package) or []
    # A requirement with a marker is of an extra, or of another system.
    names = [re.split(r"[^\w.-]", one)[0] for one in needed if ";" not in one]
    lacking = [name for name in names if _version(name) is None]
    if find_spec(package) is None:
        lacking = [f"its own module {package}"]
    return f"{package} {found} is installed in part, without {', '.join(lacking)}" if lacking else None


def forget_engines() -> None:
    """Look again at what is installed, for a process that installs packages."""
    for answer in (found, _asked, _interpreters):
        answer.cache_clear()


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(found(*sys.argv[1:])))
