"""A user's own files that decide the work: a model, a text.

This module does not import the user's code: a machine that plans may lack torch, or packages that the model
imports.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from results.errors import SpecError, UsageError

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_HASHED_BYTES, _MOST_FILES = 64 * 2**20, 100
_opened: dict[tuple[str, Path], set[str]] = {}
"""The files that were opened while a workload was built, by its positional and folder."""
_opened_by_import: dict[str, set[str]] = {}
"""The files that were opened while a module in the same folder was imported, by the path of its source."""
_OURS = ("results", "workloads", "strategies", "slurm", "reports", "harness")


def split_positional(positional: str) -> tuple[str, str]:
    """Split a `py:` workload's positional. Raises SpecError if it is not MODULE:FUNCTION."""
    if not _FORM.fullmatch(positional):
        raise SpecError(
            f"workload py:{positional} is not py:MODULE:FUNCTION, such as py:mypackage.mymodule:build"
        )
    module, _, function = positional.partition(":")
    return module, function


def module_file(module: str, folder: Path) -> Path:
    """Return the file that importing `module` from `folder` would load. Raises SpecError if it is missing."""
    top, _, _ = module.partition(".")
    if top in _OURS or top in sys.stdlib_module_names:
        raise SpecError(f"workload py:{module}: the name {top!r} is taken; rename your file or folder")
    path = folder.joinpath(*module.split("."))
    candidates = (path / "__init__.py", path.with_name(path.name + ".py"))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise SpecError(
        f"workload py:{module}: looked for {looked}, found neither;"
        " the module is found from the folder of the study file, or of the call"
    )


def source_hash(positional: str, folder: Path) -> str:
    """Return 16 hex digits of a hash over the source of a `py:` workload.

    The source is its module (or its entire package) and all modules in `folder` that it imports, directly or
    indirectly.

    Raises SpecError if the text is not MODULE:FUNCTION, a file is missing or is not Python, or the
    function is not there.
    """
    module, function = split_positional(positional)
    _require(function, module_file(module, folder))
    digest = hashlib.sha256()
    for path in sorted(_sources(module, folder), key=lambda path: path.relative_to(folder).as_posix()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(_content(path)).digest())
    return digest.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """Return 16 hex digits of a hash over a data file. Raises UsageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UsageError(
            f"cannot read the data file {path}: {error.strerror}; give a readable file"
        ) from error


@contextmanager
def noting_opens(positional: str, folder: Path) -> Iterator[None]:
    """Record the files in `folder` that are opened for reading within the context, for `opened_files`.

    A module is imported once, by the first of several workloads: files that it opens then are recorded for
    the module. Python's functions that open files are wrapped within the context. An audit hook would see
    more files, but cannot be removed, and would slow down the timed steps.
    """
    found = _opened.setdefault((positional, folder), set())
    open_file, open_descriptor = io.open, os.open

    def note(path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - resolving would follow links
            if name.startswith(f"{folder}/"):
                importing = _importing(folder)
                noted_for = found if importing is None else _opened_by_import.setdefault(importing, set())
                noted_for.add(name.removeprefix(f"{folder}/"))

    def noted(path: Any, mode: str = "r", *others: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+"):
            note(path)
        return open_file(path, mode, *others, **named)

    def noted_descriptor(path: Any, flags: int, *others: Any, **named: Any) -> int:
        if not flags & (os.O_WRONLY | os.O_RDWR):
            note(path)
        return open_descriptor(path, flags, *others, **named)

    # Path.open calls io.open.
    builtins.open = io.open = noted  # type: ignore[assignment]
    os.open = noted_descriptor
    try:
        yield
    finally:
        builtins.open = io.open = open_file
        os.open = open_descriptor


def _importing(folder: Path) -> str | None:
    """Return the source in `folder` that this thread is importing, the innermost of several."""
    frame = inspect.currentframe()
    while frame is not None:
        source = frame.f_code.co_filename
        if frame.f_code.co_name == "<module>" and source.startswith(f"{folder}/"):
            return source
        frame = frame.f_back
    return None


def opened_files(positional: str, folder: Path) -> dict[str, str]:
    """Return hashes of the files that a `py:` workload opened in `folder` while this process built it, by
    path.

    A file of more than `_HASHED_BYTES` has its size instead. Files that its modules opened when they were
    imported count, whichever workload imported them. Sources, hidden folders and installed packages are left
    out. Of more than `_MOST_FILES`, which are a data set, only the first by name count.
    """
    sources = _sources(split_positional(positional)[0], folder)
    opened = [_opened.get((positional, folder), set())]
    opened += [_opened_by_import.get(str(source), set()) for source in sources]
    found = {}
    for name in sorted(set().union(*opened)):
        path, parts = folder / name, Path(name).parts
        installed = "site-packages" in parts or any(part.startswith((".", "__")) for part in parts)
        if not installed and path.suffix not in (".py", ".pyc", ".so") and path.is_file():
            size = path.stat().st_size
            found[name] = file_hash(path) if size <= _HASHED_BYTES else f"{size} bytes"
            if len(found) == _MOST_FILES:
                break
    return found


def imported_distributions(positional: str, folder: Path) -> dict[str, str]:
    """Return versions of the installed distributions that the source of a `py:` workload imports, by name."""
    module, _ = split_positional(positional)
    names = {name for path in _sources(module, folder) for name in _imports(path)} - {*_OURS}
    found = {each for name in names - sys.stdlib_module_names for each in _installed().get(name, ())}
    return {name: metadata.version(name) for name in sorted(found)}


@cache
def _installed() -> Mapping[str, list[str]]:
    """Return the distributions of each module. To read the metadata of 120 takes half a second."""
    return metadata.packages_distributions()


def _sources(module: str, folder: Path) -> set[Path]:
    found: set[Path] = set()
    waiting = [module.partition(".")[0]]
    seen = set(waiting)
    while waiting:
        # A top-level module or package that is from elsewhere has no files in `folder`.
        top = waiting.pop()
        files = set((folder / top).rglob("*.py"))
        if (folder / f"{top}.py").is_file():
            files.add(folder / f"{top}.py")
        found |= files
        new = {name for path in files for name in _imports(path)} - seen
        seen |= new
        waiting += new
    return found


def _imports(path: Path) -> Iterator[str]:
    """Yield the top-level names that a file imports anywhere; relative imports stay in their own package."""
    try:
        tree = ast.parse(_content(path))
    except (SyntaxError, ValueError):
        return  # The file is still hashed: a package may contain files that this Python cannot parse.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}; a py: workload's source is hashed") from error


def _require(function: str, path: Path) -> None:
    try:
        names = set(_names(ast.parse(_content(path), filename=str(path))))
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"{path} is not Python: {error}; a py: workload's source is read first") from error
    if function not in names and "*" not in names:
        known = ", ".join(sorted(name for name in names if not name.startswith("_"))) or "nothing"
        raise SpecError(f"workload py: {path} has no {function!r}; it has: {known}")


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield names that a module may bind: top-level definitions, imports and assignments, also in
    branches."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.alias):
                yield part.asname or part.name
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id
            elif isinstance(part, ast.FunctionDef):
                yield part.name
