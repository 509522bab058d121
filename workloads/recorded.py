"""Initial values that are drawn again: a model is built on the meta device, and filled a tensor at a time.

A builder draws from one generator, so that what a tensor gets depends on all that was drawn before it. The
recorder has every draw done when the builder asks for it, into memory that is given back at once, and keeps
the state that the generator had before. From that state the same values are drawn where they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from results.errors import BenchError

_ATEN = torch.ops.aten
_MADE = {_ATEN.zeros.default: 0.0, _ATEN.ones.default: 1.0}
_WRITTEN = (_ATEN.zero_.default, _ATEN.fill_.Scalar)
_DRAWN = (_ATEN.uniform_.default, _ATEN.normal_.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """Operation that gave all elements of a tensor their values."""

    into: Callable[[Tensor], object]
    state: Tensor | None
    """State of the generator before it; None: it draws no numbers."""
    storage: torch.UntypedStorage
    """Storage of the tensor, kept so that no other one gets its address."""

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
        """Give a parameter or buffer of the module its values on `device`, in place; one that has them
        stays as it is."""
        write = self._writes.pop(tensor, None)
        if write is None:
            return
        values = write.values(tensor).to(device)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, requires_grad=tensor.requires_grad)
        swap_tensors(tensor, values)  # type: ignore[no-untyped-call]


class DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, in a `torch.device("meta")` context, the operations that give tensors their values.

    The CPU's generator is afterwards where it would be had the model been built on the CPU. A builder writes
    complete tensors by `zero_`, `fill_`, `uniform_` and `normal_`, or makes them of zeros or ones; any other
    operation raises BenchError.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, _Write] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        if func in (*_WRITTEN, *_DRAWN):
            tensor, *rest = args
            self._keep(func, tensor, _into(func, *rest, **(kwargs or {})), drawn=func in _DRAWN)
            # Not called: on the meta device it writes nothing, and torch imports its compiler for it.
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
                f"a model that is built unit by unit has whole tensors on the meta device written, and "
                f"{func} writes {tuple(tensor.shape)} on {tensor.device}"
            )
        state = torch.default_generator.get_state() if drawn else None
        write = _Write(into=into, state=state, storage=storage)
        if drawn:
            into(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        self._writes[storage._cdata] = write

    def values_of(self, module: nn.Module) -> InitialValues:
        """Return the values of all parameters and buffers of `module`.

        Raises BenchError for one that was given none, or that has them in another order or shares them.
        """
        found: dict[Tensor, _Write] = {}
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            write = self._writes.pop(tensor.untyped_storage()._cdata, None)
            if write is None or not _is_whole(tensor):
                raise BenchError(f"a model that is built unit by unit gives {name} no values of its own")
            found[tensor] = write
        return InitialValues(found)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether the tensor has all values of its storage, row by row."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _into(
    func: OpOverload, *rest: object, generator: object = None, **others: Any
) -> Callable[[Tensor], object]:
    if generator is not None:
        raise BenchError(f"a model that is built unit by unit has a generator of its own for {func}")
    return lambda values: func(values, *rest, **others)
