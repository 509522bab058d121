"""`fp16` and `bf16`: gradients are sent and summed in half as many bytes.

The rounding error of a rank's own share is its `residual`. The sums within the all-reduce are rounded too, at
most once for each rank; that error is in no rank's `residual`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from strategies.compression.base import Compressor
from strategies.compression.facts import CompressorFacts
from strategies.compression.promise import CompressorPromise, Rounded, WireBytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.exchange.buckets import Bucket


class CastFacts(CompressorFacts):
    """Sums in half precision."""

    keeps_residual = False
    roundoff: ClassVar[float]
    """Unit roundoff of the type in which values are summed."""

    def law_tolerance(self, ranks: int) -> float:
        # Each of p - 1 sums rounds a partial sum, and the shares are rounded before.
        return 2 * ranks * self.roundoff


class Fp16Facts(CastFacts):
    """11 bits in a narrow range."""

    name = "fp16"
    help = "half precision, scaled so that no sum overflows"
    compressor = "strategies.compression.casts:Fp16"
    roundoff = 2.0**-11

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        # 4 bytes more: the largest value, by which ranks agree on a scale.
        return (WireBytes(of=lambda values, ranks, before: 2 * values + 4),)


class Bf16Facts(CastFacts):
    """8 bits in the range of full precision."""

    name = "bf16"
    help = "bfloat16: the range of full precision, 8 bits of it"
    compressor = "strategies.compression.casts:Bf16"
    roundoff = 2.0**-8

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        size = WireBytes(of=lambda values, ranks, before: 2 * values)
        return size, Rounded(roundoff=self.roundoff)


_LARGEST = 65504.0
"""The largest number of fp16."""
_GREATEST_SCALE = 2.0**125
"""The largest scale. With it the smallest number of fp16, 2^-24, becomes 2^-149, the smallest of fp32:
unscaling is always exact."""


class Bf16(Compressor):
    """Sums in bfloat16, which has the range of fp32 and 8 bits: no value overflows or needs a scale."""

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        import torch

        _sum_rounded(bucket.values, residual, wire, torch.bfloat16)


class Fp16(Compressor):
    """Sums in fp16, which has 11 bits and a narrow range, scaled by a power of two that ranks agree on.

    No sum overflows, and as many small values as possible survive, at any number of ranks. Infinities and NaN
    pass through unscaled, for the loss scaler to see.
    """

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        import torch

        scale = _agreed_scale(bucket.values, wire)
        bucket.values.mul_(scale)
        _sum_rounded(bucket.values, residual, wire, torch.float16)
        bucket.values.div_(scale)
        if residual is not None:
            residual.div_(scale)


def _sum_rounded(values: Tensor, residual: Tensor | None, wire: Wire, dtype: torch.dtype) -> None:
    import torch

    rounded = values.to(dtype)
    if residual is not None:
        torch.sub(values, rounded, out=residual)
    wire.all_reduce(rounded)
    values.copy_(rounded)


def _agreed_scale(values: Tensor, wire: Wire) -> Tensor:
    """Return the largest power of two with which no sum of all ranks' values overflows: a scalar, fp64.

    p values of magnitude at most m, rounded to fp16 and then added up in any order, with a rounding each
    time, stay within p m (1 + u)^p, u = 2^-11 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
    ed., section 4.2).
    """
    import torch

    low, high = torch.aminmax(values)
    largest = torch.maximum(high, -low).float().view(1)
    # Whether a maximum of NaN and a number is NaN differs between backends.
    largest.nan_to_num_(nan=math.inf, posinf=math.inf)
    wire.largest(largest)
    room = _LARGEST / (wire.size * (1 + Fp16Facts.roundoff) ** wire.size)
    ratio = (room / largest[0].double()).clamp(max=_GREATEST_SCALE)
    mantissa, _ = torch.frexp(ratio)
    # Without its mantissa, in [1/2, 1), the ratio is a power of two, exactly.
    return torch.where(largest[0].isfinite(), ratio / (2 * mantissa), 1.0)
