"""Build a workload from its text: a freshly initialised module with its loss and its data.

A model can be built on the meta device, and then filled tensor by tensor. A builder draws from one generator,
so that the values of a tensor depend on all earlier draws. The recorder executes each draw of the builder,
into memory that is freed at once, and keeps the state of the generator before it. From that state the same
values are drawn again when they are needed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from results.errors import BenchError, UsageError
from workloads.catalog import WORKLOADS, facts, shape_of
from workloads.shape import Shape
from workloads.source import module_file, noting_opens, split_positional
from workloads.workload import Workload


def build_workload(text: str, *, source_folder: Path | None = None, by_unit: bool = False) -> Workload:
    """Build the workload that `text` names, with its module on the CPU or on the device of a `torch.device`
    context.

    The initial parameters follow only from `torch.manual_seed`. With `by_unit`, a model that can be built
    unit by unit stays on the meta device; `Workload.initial` later fills each tensor with the values that a
    normal build from the same seed would have. A `py:` workload is imported from `source_folder` (default:
    the working folder). Raises SpecError for a text that names nothing, and UsageError for a user's function
    that cannot be imported or returns something else.
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
        # The folder stays first in sys.path, as for a script: forward() may still import from it.
        sys.path.insert(0, str(folder))
    if name not in sys.modules:
        # Otherwise the import system, which caches the folder's listing, would miss a file written since.
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
            " installed: the model needs code from elsewhere; put it next to the study file or install it"
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


_ATEN = torch.ops.aten
_MADE = {_ATEN.zeros.default: 0.0, _ATEN.ones.default: 1.0}
_WRITTEN = (_ATEN.zero_.default, _ATEN.fill_.Scalar)
_DRAWN = (_ATEN.uniform_.default, _ATEN.normal_.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """The operation that gave all elements of a tensor their values."""

    into: Callable[[Tensor], object]
    state: Tensor | None
    """The state of the generator before it; None: it draws no numbers."""
    storage: torch.UntypedStorage
    """The storage of the tensor, kept so that no other storage gets its address."""

    def values(self, like: Tensor) -> Tensor:
        """Return the values in host memory, in the shape and type of `like`. The generator stays as it is."""
        values = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        before = torch.default_generator.get_state()
        if self.state is not None:
            torch.default_generator.set_state(self.state)
        self.into(values)
        torch.default_generator.set_state(before)
        return values


class InitialValues:
    """The initial values of a module on the meta device, each to be taken once."""

    def __init__(self, writes: dict[Tensor, _Write]) -> None:
        self._writes = writes

    def __call__(self, tensor: Tensor, device: torch.device) -> None:
        """Give a parameter or buffer of the module its values on `device`, in place, unless it has values."""
        write = self._writes.pop(tensor, None)
        if write is None:
            return
        values = write.values(tensor).to(device)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, requires_grad=tensor.requires_grad)
        swap_tensors(tensor, values)  # type: ignore[no-untyped-call]


class DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, in a `torch.device("meta")` context, the operations that give tensors their values.

    Afterwards the CPU's generator is in the state that building the model on the CPU would leave. A builder
    writes complete tensors by `zero_`, `fill_`, `uniform_` and `normal_`, or creates them as zeros or ones;
    any other operation raises BenchError.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, _Write] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        if func in (*_WRITTEN, *_DRAWN):
            tensor, *rest = args
            others = dict(kwargs or {})
            if others.pop("generator", None) is not None:
                raise BenchError(
                    f"a model that is built unit by unit must draw from the default "
                    f"generator, and passes another one to {func}"
                )
            self._keep(func, tensor, lambda values: func(values, *rest, **others), drawn=func in _DRAWN)
            # `func` is not called: on the meta device it writes nothing, and torch would import its compiler.
            return tensor
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise BenchError(f"a model that is built unit by unit cannot be given values by {func}")
        made = func(*args, **(kwargs or {}))
        if func in _MADE:
            self._keep(func, made, partial(_ATEN.fill_.Scalar, value=_MADE[func]))
        return made

    def _keep(
        self, func: OpOverload, tensor: Tensor, into: Callable[[Tensor], object], *, drawn: bool = False
    ) -> None:
        storage = tensor.untyped_storage()
        if not tensor.is_meta or not _is_whole(tensor):
            raise BenchError(
                f"a model that is built unit by unit must write complete tensors on the meta device, and "
                f"{func} writes {tuple(tensor.shape)} on {tensor.device}"
            )
        state = torch.default_generator.get_state() if drawn else None
        write = _Write(into=into, state=state, storage=storage)
        if drawn:
            into(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        self._writes[storage._cdata] = write

    def values_of(self, module: nn.Module) -> InitialValues:
        """Return the values of all parameters and buffers of `module`.

        Raises BenchError for a tensor without values, with values in another order, or with a shared storage.
        """
        found: dict[Tensor, _Write] = {}
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            write = self._writes.pop(tensor.untyped_storage()._cdata, None)
            if write is None or not _is_whole(tensor):
                raise BenchError(f"a model that is built unit by unit gives {name} no separate values")
            found[tensor] = write
        return InitialValues(found)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether the tensor has all values of its storage, row by row."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
