"""`fp16` and `bf16`: gradients are summed in half as many bytes.

What a rank loses by rounding its own share is its `residual`. The sums inside of the all-reduce are rounded
too, at most once a rank; that error is in no rank's `residual`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor
from strategies.exchange.buckets import Bucket

_LARGEST = torch.finfo(torch.float16).max
_UNIT_ROUNDOFF = torch.finfo(torch.float16).eps / 2
_GREATEST_SCALE = 2.0**125
"""With it the smallest number of fp16, 2^-24, is 2^-149, that of fp32: to unscale is always exact."""


class Bf16(Compressor):
    """The range of fp32 with 8 bits of it: nothing overflows, and nothing needs a scale."""

    def __init__(self) -> None:
        super().__init__(feedback=False)

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        _sum_rounded(bucket.values, residual, wire, torch.bfloat16)


class Fp16(Compressor):
    """11 bits of fp32 in a narrow range, which a power of two per bucket, agreed on by all ranks, fits to it.

    No sum overflows, and of small values as many as possible survive, at any number of ranks. Infinities and
    NaN go through unscaled, for the loss scaler to see.
    """

    def __init__(self) -> None:
        super().__init__(feedback=False)

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        scale = _agreed_scale(bucket.values, wire)
        bucket.values.mul_(scale)
        _sum_rounded(bucket.values, residual, wire, torch.float16)
        bucket.values.div_(scale)
        if residual is not None:
            residual.div_(scale)


def _sum_rounded(values: Tensor, residual: Tensor | None, wire: Wire, dtype: torch.dtype) -> None:
    rounded = values.to(dtype)
    if residual is not None:
        torch.sub(values, rounded, out=residual)
    wire.all_reduce(rounded)
    values.copy_(rounded)


def _agreed_scale(values: Tensor, wire: Wire) -> Tensor:
    """The largest power of two with which no sum of all ranks' values overflows: a scalar, fp64.

    p values of magnitude at most m, rounded to fp16 and then added up in any order, with a rounding each
    time, stay within p m (1 + u)^p, u = 2^-11 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
    ed., section 4.2).
    """
    low, high = torch.aminmax(values)
    largest = torch.maximum(high, -low).float().view(1)
    # Whether a maximum of NaN and a number is NaN differs between backends.
    largest.nan_to_num_(nan=math.inf, posinf=math.inf)
    wire.largest(largest)
    room = _LARGEST / (wire.size * (1 + _UNIT_ROUNDOFF) ** wire.size)
    ratio = (room / largest[0].double()).clamp(max=_GREATEST_SCALE)
    mantissa, _ = torch.frexp(ratio)
    # Without its mantissa, in [1/2, 1), the ratio is a power of two, exactly.
    return torch.where(largest[0].isfinite(), ratio / (2 * mantissa), 1.0)
