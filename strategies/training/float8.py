"""Products in float8: the linear layers of a model's blocks, by torch's scaled products.

As in torchao's recipe `rowwise` (torchao/float8/config.py), each row of activations and each output of a
weight is scaled to the range of e4m3, and each row of gradients to the range of e5m2, by a power of two that
follows from the row itself. As in its `rowwise_with_gw_hp`, the gradient of a weight is a product in
bfloat16: its sums are over tokens, whose number depends on how a batch is divided. So a row has the same
values with any other rows, in a micro-batch, in a microbatch of a pipeline and in a part of a sequence.

Everything is under autocast to bfloat16, which computes all other operators as it does without float8: the
embedding, the output layer, attention, norms, a router, and experts, whose products are grouped.
Parameters, their gradients and the optimizer stay what they are. A weight is scaled from its bfloat16 values,
all of which are on the rank that computes with it. Sums are in single precision (`use_fast_accum=False`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from results.errors import UsageError
from results.layout import ModelLayout
from strategies.training.layouts import layout_module

_HALF = torch.bfloat16
_POWER_OF_TWO = -(1 << 23)
"""The sign and the exponent of a number in single precision: of a positive one, the power of two below it."""
_LEAST = 1e-12
"""The smallest range that is scaled up to the range of a type: a row of zeros would divide by zero."""
MULTIPLE = 16
"""The inputs and outputs of a layer must be a multiple of this (torch, `_scaled_mm` on CUDA)."""


def scale_products(module: nn.Module, layout: ModelLayout, without: str | None = None) -> None:
    """Have the linear layers of every block of `layout` compute in float8 under autocast, in place.

    A layer stays the module that it is, with its parameters. It computes in bfloat16 if the number of its
    inputs or outputs does not divide by 16, or if the layout names layers that `tp` splits and not this one,
    such as a router. `without` is the name of a device that lacks such products. Raises UsageError for one,
    and if no layer of a block can compute in float8.
    """
    if without is not None:
        raise UsageError(f"{without} has no products in float8 (compute capability 8.9 has them): use bf16")
    parts = [part for name in layout.blocks for part in layout_module(module, name).modules()]
    split = {layout_module(module, each.name) for each in layout.splits} or set(parts)
    layers = [part for part in parts if type(part) is nn.Linear and part in split and not _odd(part)]
    if not layers:
        raise UsageError(
            f"--precision float8 needs blocks with linear layers whose inputs and outputs are multiples of "
            f"{MULTIPLE}, which this model lacks; use bf16"
        )
    for layer in layers:
        layer.__class__ = ScaledLinear


def _odd(layer: nn.Linear) -> bool:
    return bool(layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)


class ScaledLinear(nn.Linear):
    """A linear layer, (..., inputs) to (..., outputs), in float8 under autocast, and as usual elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        product: Tensor = _Product.apply(x.to(_HALF), self.weight.to(_HALF))  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(_HALF)


class _Product(torch.autograd.Function):
    """The product of rows (..., inputs) and a weight (outputs, inputs), both in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _scaled(x, weight, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            _scaled(gradient, weight.t(), torch.float8_e5m2) if of_x else None,
            rows.t() @ x.flatten(0, -2) if of_weight else None,
        )


def _scaled(rows: Tensor, columns: Tensor, type_of_rows: torch.dtype) -> Tensor:
    """Return `rows` (..., n) times the transpose of `columns` (m, n), both scaled along n."""
    left, left_scale = _quantised(rows.flatten(0, -2), type_of_rows)
    right, right_scale = _quantised(columns, torch.float8_e4m3fn)
    product = torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale.t(), out_dtype=_HALF, use_fast_accum=False
    )
    return product.view(*rows.shape[:-1], -1)


def _quantised(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values (rows, n) in float8, and what each row of them is to be multiplied by, (rows, 1)."""
    largest = values.abs().amax(1, keepdim=True).float().clamp(min=_LEAST)
    factor = torch.finfo(dtype).max / largest
    factor = factor.view(torch.int32).bitwise_and(_POWER_OF_TWO).view(torch.float32)
    return (values.float() * factor).to(dtype).contiguous(), factor.reciprocal()
