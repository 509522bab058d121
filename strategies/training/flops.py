"""Count the FLOPs of a computation, and name what they lack: an operator without a formula would count 0.

A multiply-add is 2 FLOPs. As torch's counter does, count products of matrices, convolutions and attention.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

_ATEN = torch.ops.aten
_PRODUCTS = frozenset("addmm attention bmm conv convolution linear matmul mm rnn".split())
"""Parts of the names of operators that are never free, whatever else their names say."""
_FREE = frozenset(
    (
        # Norms, activations, losses, and element-wise operators without torch's tag.
        "norm renorm softmax dropout masked loss entropy add sub mul div divide neg abs relu rrelu prelu elu "
        "celu selu gelu silu mish glu sigmoid tanh hardsigmoid hardtanh hardswish hardshrink softshrink "
        "softplus threshold where xlogy complex polar cross isin isinf isnan "
        # Reductions.
        "sum nansum mean var std prod max min amax amin aminmax all any argmax argmin median nanmedian mode "
        "count logsumexp trace cumsum cumprod cummax cummin logcumsumexp segment "
        # Look-ups, order, copies and layout.
        "embedding index scatter gather select slice diagonal diag take put nonzero unique bucketize "
        "searchsorted sort topk kthvalue bincount histc histogram tril triu to clone copy alias lift detach "
        "pin set resize reshape view narrow split cat stack chunk repeat interleave flip roll rot pad padded "
        "shuffle unshuffle unfold im2col col2im coo coalesce coalesced quantize dequantize pool unpool "
        "upsample sampler "
        # Factories and random numbers.
        "empty zero zeros ones full fill new bernoulli multinomial normal uniform exponential geometric "
        "cauchy binomial poisson gamma dirichlet rand randint random randn randperm"
    ).split()
)
"""Parts of the names of ATen's operators that count 0 on purpose."""
_ELSEWHERE = ("c10d", "_c10d_functional", "prim", "profiler")
"""Namespaces of operators that communicate, or only ask and note."""
_FORMULA = "torch.utils.flop_counter.register_flop_formula"


def _grouped_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Count a product for each group, or one whose rows, columns or sum the groups divide.

    All rows count, because offsets have no values on the meta device.
    """
    return 2 * (a[0] if len(a) == len(b) == 3 else 1) * a[-2] * a[-1] * b[-1]


def _added_flops(_: Sequence[int], a: Sequence[int], b: Sequence[int], **__: Any) -> int:
    return _grouped_flops(a, b)


def _trilinear_flops(*given: Any, unroll_dim: int = 1, **_: Any) -> int:
    """Count the two products of pairs of factors, one after another, by which torch computes it.

    A pair without a common dimension to sum over is multiplied by elements.
    """
    shapes = [list(factor) for factor in given[:3]]
    for shape, added in zip(shapes, given[3:6], strict=True):
        for dimension in sorted(added):
            shape.insert(dimension, 1)
    sums = set(given[6]) - {given[7] if len(given) > 7 else unroll_dim}

    def pair(left: list[int], right: list[int], over: set[int]) -> int:
        common = any(left[at] > 1 and right[at] > 1 for at in over)
        return 2 * prod(map(max, left, right)) if common else 0

    first = sums & set(given[5])
    both = list(map(max, *shapes[:2]))
    kept = [1 if at in first else size for at, size in enumerate(both)]
    return pair(shapes[0], shapes[1], first) + pair(kept, shapes[2], sums - first)


_FORMULAS = {
    "_grouped_mm": _grouped_flops,
    "_scaled_grouped_mm": _grouped_flops,
    "_scaled_grouped_mm_v2": _grouped_flops,
    "_trilinear": _trilinear_flops,
    "_scaled_mm_v2": _grouped_flops,
    "_int_mm": _grouped_flops,
    "addbmm": _added_flops,
    "addbmm_": _added_flops,
    "addmm_": _added_flops,
    "baddbmm_": _added_flops,
    "_addmm_activation": _added_flops,
    "mv": lambda matrix, *_, **__: 2 * prod(matrix),
    "addmv": lambda _, matrix, *__, **___: 2 * prod(matrix),
    "dot": lambda vector, *_, **__: 2 * prod(vector),
    "vdot": lambda vector, *_, **__: 2 * prod(vector),
    "affine_grid_generator": lambda *_, out_shape, **__: 2 * prod(out_shape) * (out_shape[-1] + 1),
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda gradient, q, k, v, *_, **__: sdpa_backward_flop_count(gradient, q, k, v)
    ),
}
"""Formulas that a version of torch may lack; its own, and those that a user registers, win."""


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(_ATEN, name, None)
    return (getattr(packet, overload) for overload in packet.overloads()) if packet else iter(())


@cache
def is_free(operator: Any) -> bool:
    """Return whether an operator counts 0 on purpose; an operator of another library never does."""
    if not isinstance(operator, OpOverload) or operator.namespace in _ELSEWHERE:
        return isinstance(operator, OpOverload)
    parts = {re.sub(r"\d+d?$", "", part) for part in operator._opname.split("_")}
    if operator.namespace != "aten" or parts & _PRODUCTS - ({"linear"} if "upsample" in parts else set()):
        return False
    return _makes_no_tensor(operator._schema) or _is_tagged(operator) or bool(parts & _FREE)


def _makes_no_tensor(schema: Any) -> bool:
    """Return whether an operator reads no tensor, or neither returns nor writes to one."""
    takes, gives = (
        any("Tensor" in str(each.type) for each in side) for side in (schema.arguments, schema.returns)
    )
    return not takes or not (gives or schema.is_mutable)


def _is_tagged(operator: OpOverload) -> bool:
    """Return whether torch tags an operator, or what it applies to a list, as element-wise or a view."""
    alike = _overloads(operator._opname.removeprefix("_foreach_").rstrip("_"))
    tagged = any(torch.Tag.pointwise in each.tags or each.is_view for each in alike)
    return tagged or torch.Tag.view_copy in operator.tags


def _is_outer(func: Any, given: list[Tensor], results: list[Tensor]) -> bool:
    """Return whether it multiplies elements to more than its factors have: most of a product of matrices by
    hand."""
    largest = max(each.numel() for each in given)
    return func._opname == "mul" and any(each.numel() > largest for each in results)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


class FlopCounter(TorchDispatchMode):
    """Counts FLOPs in its context, and names operators without a formula, and matrices that none reads.

    A matrix is followed through operators that read nothing but parameters (a cast, a transpose, a weight's
    norm) until an operator reads it with other values.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        formulas = {getattr(_ATEN, name, None): formula for name, formula in _FORMULAS.items()}
        missing = {packet: formulas[packet] for packet in formulas.keys() - flop_registry.keys() - {None}}
        self._counter = FlopCounterMode(display=False, custom_mapping=missing)
        self._uncounted: dict[str, None] = {}
        matrices = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.layout is torch.strided and sum(size > 1 for size in parameter.shape) > 1
        }
        self._unread = dict.fromkeys(matrices)
        # A weak reference keeps the address of a storage from being used again, and not its memory.
        self._origins: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}
        for name, parameter in matrices.items():
            self._follow(parameter, frozenset((name,)))

    def __enter__(self) -> Self:
        super().__enter__()
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)
        super().__exit__(*error)

    @property
    def total(self) -> int:
        return self._counter.get_total_flops()

    @property
    def uncounted(self) -> str | None:
        """The operators that were not counted, as the reason why FLOPs are unknown."""
        if not self._uncounted:
            return None
        return f"no formula counts the FLOPs of {', '.join(self._uncounted)}: give one by {_FORMULA}"

    @property
    def unread(self) -> str | None:
        """The matrices that no operator has read yet, as the reason why FLOPs are unknown."""
        if not self._unread:
            return None
        first, *others = self._unread
        more = f" and {len(others)} more" if others else ""
        return (
            f"no counted operator reads the matrix {first}{more}: a product by hand, or a kernel that is "
            f"called directly, counts 0, and a torch.library operator can have a formula ({_FORMULA})"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counted = getattr(func, "_overloadpacket", func) in self._counter.flop_registry
        free = not counted and is_free(func)
        if not counted and not free:
            self._uncounted[func.name()] = None
        self._read(func, _tensors((args, kwargs)), _tensors(result), free=free)
        return result

    def _read(self, func: Any, given: list[Tensor], results: list[Tensor], *, free: bool) -> None:
        """Follow the parameters that an operator has read to its results, or note that they were used."""
        origins = self._origins_of(given)
        names = frozenset[str]().union(*origins)
        only_parameters = all(own or each.numel() < 2 for own, each in zip(origins, given, strict=True))
        if free and names and only_parameters:
            for each in results:
                self._follow(each, names)
        elif names and not (free and _is_outer(func, given, results)):
            self._unread = {name: None for name in self._unread if name not in names}

    def _origins_of(self, given: list[Tensor]) -> list[frozenset[str]]:
        """Return the names of the matrices that each of the tensors was made of."""
        storages = (each.untyped_storage()._cdata for each in given)
        return [self._origins.get(storage, (None, frozenset()))[1] for storage in storages]

    def _follow(self, tensor: Tensor, names: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        _, known = self._origins.get(storage._cdata, (None, frozenset[str]()))
        self._origins[storage._cdata] = StorageWeakRef(storage), known | names
