"""Packages that are installed for a test: a folder on the path with the metadata of a distribution in it.

And modules of no package, which a test loads by path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType


def install(
    folder: Path, package: str, points: Mapping[str, Mapping[str, str]], *, version: str = "1.0"
) -> None:
    """Write what pip writes for a package: `points` are its entry points, by group and name.

    The modules that they name are the caller's; `folder` has to be on the path.
    """
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in named.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def first_on_the_path(folder: Path) -> str:
    """PYTHONPATH of a process that imports from `folder`, and else what this one's children do."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def module_at(path: Path) -> ModuleType:
    """Run a file as a module, which its dataclasses look up by name."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
