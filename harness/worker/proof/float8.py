"""Products in float8 as a simulation computes them: in single precision, of values rounded to float8.

No part of it is shared with what is checked, and it does not call torch's scaled products. Scales are powers
of two, so that a rounded value has at most four significant bits, and a product of two is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from results.layout import LinearSplit


def quantise_products(module: nn.Module, blocks: Sequence[str], splits: Sequence[LinearSplit] = ()) -> None:
    """Replace what the linear layers of the blocks compute under autocast; given splits, only those."""
    names = {split.name for split in splits}
    for name, layer in module.named_modules():
        inside = any(name.startswith(f"{block}.") or name == block for block in blocks)
        if type(layer) is nn.Linear and inside and (name in names or not names):
            if math.gcd(layer.in_features, layer.out_features) % 16 == 0:
                layer.__class__ = _Linear


def _rounded(values: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return values rounded to float8, with the largest along `dim` brought near the largest of the type."""
    wide = values.float()
    largest = wide.abs().amax(dim, keepdim=True).clamp(min=1e-12)
    _, exponent = torch.frexp(torch.finfo(dtype).max / largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    return (wide * scale).to(dtype).float() / scale


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        y: Tensor = _Rounded.apply(x.bfloat16(), self.weight.bfloat16())  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.bfloat16()


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            e4m3 = torch.float8_e4m3fn
            return F.linear(_rounded(x, -1, e4m3), _rounded(weight, 1, e4m3)).bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rounded = _rounded(gradient, -1, torch.float8_e5m2)
        of_x = (rounded @ _rounded(weight, 0, torch.float8_e4m3fn)).bfloat16()
        return of_x, gradient.flatten(0, -2).t() @ x.flatten(0, -2)
