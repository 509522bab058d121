"""Build a workload from its text: a freshly initialised module with its loss and its data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from results.errors import UsageError
from workloads.catalog import WORKLOADS, facts, shape_of
from workloads.recorded import DrawRecorder
from workloads.shape import Shape
from workloads.source import module_file, noting_opens, split_positional
from workloads.workload import Workload


def build_workload(text: str, *, source_folder: Path | None = None, by_unit: bool = False) -> Workload:
    """Build the workload that `text` names, with its module on the CPU or on the device of a `torch.device`
    context.

    The initial parameters follow only from `torch.manual_seed`. `by_unit`: a model that can be built unit by
    unit is on the meta device, with its `initial` values, which are the same. A `py:` workload is imported
    from `source_folder` (default: the working folder). Raises SpecError for a text that names nothing, and
    UsageError for a user's function that cannot be imported or returns something else.
    """
    spec = WORKLOADS.parse(text)
    known = facts(spec)
    if known.own_code:
        return _call(known.builder, folder=(source_folder or Path.cwd()).resolve())
    return build(shape_of(spec), by_unit=by_unit)


def import_builder(text: str, *, source_folder: Path | None = None) -> None:
    """Import the module that builds the workload, without building it. Raises as `build_workload`."""
    spec = WORKLOADS.parse(text)
    known = facts(spec)
    if known.own_code:
        folder = (source_folder or Path.cwd()).resolve()
        with noting_opens(known.builder, folder):
            _import(split_positional(known.builder)[0], folder=folder)
    else:
        importlib.import_module(shape_of(spec).facts().builder.partition(":")[0])


def build(shape: Shape, *, by_unit: bool = False) -> Workload:
    """Build the workload of this shape by its family's builder; `by_unit` as in `build_workload`."""
    known = shape.facts()
    module, _, function = known.builder.partition(":")
    made: Callable[[Shape], Workload] = getattr(importlib.import_module(module), function)
    if not by_unit or not known.by_unit:
        return made(shape)
    with torch.device("meta"), DrawRecorder() as recorder:
        workload = made(shape)
    return replace(workload, initial=recorder.values_of(workload.module))


def _call(positional: str, *, folder: Path) -> Workload:
    name, function = split_positional(positional)
    with noting_opens(positional, folder):
        module = _import(name, folder=folder)
        build = getattr(module, function, None)
        if not callable(build):
            raise UsageError(f"workload py:{positional}: {module.__file__} has no function {function!r}")
        workload = build()
    if not isinstance(workload, Workload):
        raise UsageError(
            f"workload py:{positional}: {function}() returned {type(workload).__name__},"
            " not a workloads.Workload(module=..., loss=..., synthetic=...)"
        )
    return workload


def _import(name: str, *, folder: Path) -> ModuleType:
    expected = module_file(name, folder)
    if str(folder) not in sys.path:
        # First and for good, as for a script: a model may import its neighbours as late as in forward().
        sys.path.insert(0, str(folder))
    if name not in sys.modules:
        # A file that was written after its folder was last listed would not be found.
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None:
            raise UsageError(f"workload py:{name} cannot be imported: {error}") from error
        if f"{name}.".startswith(f"{error.name}."):
            raise _taken(name, expected) from error
        raise UsageError(
            f"workload py:{name} imports {error.name!r}, which is neither in the folder {folder} nor"
            " installed: the model needs code from elsewhere; put it beside the study file or install it"
        ) from error
    if module.__file__ is None or Path(module.__file__).resolve() != expected.resolve():
        raise _taken(name, expected)
    return module


def _taken(name: str, expected: Path) -> UsageError:
    top = name.partition(".")[0]
    where = getattr(sys.modules.get(top), "__file__", None) or "elsewhere"
    return UsageError(
        f"workload py:{name}: another {top!r} ({where}) is loaded already,"
        f" so that {expected} cannot be imported; rename your file or folder"
    )
