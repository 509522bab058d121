"""`signsgd`: one bit a value and one scale a shard, with error feedback."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from results.spec import Spec
from strategies.compression.facts import FEEDBACK, CompressorFacts
from strategies.compression.promise import CompressorPromise, ScaledSigns, WireBytes
from strategies.compression.two_stage import SCALE_BYTES, TwoStage, scales_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS = 8


class ScaledSignFacts(CompressorFacts):
    """Scaled signs, shard by shard."""

    name = "signsgd"
    help = "one bit an element and a scale, in two stages"
    options = MappingProxyType({"feedback": FEEDBACK})
    compressor = "strategies.compression.signsgd:ScaledSign"
    need = "all-to-all"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        def size(values: int, ranks: int, before: int) -> int:
            # A shard for every rank, and the sum of its own: a bit a value, and 4 bytes of the scale.
            return (ranks + 1) * (math.ceil(values / (ranks * 8)) + 4)

        return WireBytes(of=size), ScaledSigns(unit=8)


class ScaledSign(TwoStage):
    """C(x) = mean |x| * sign(x), shard by shard; sign(0) is +1, as a bit has no third value.

    The scale makes it a contraction, |C(x) - x|^2 = |x|^2 - |x|_1^2 / d over d values, which feedback needs
    (Karimireddy et al. 2019, arXiv:1901.09847); without feedback signs fail to converge on simple convex
    functions (the same, section 3). Bernstein et al. 2018 (arXiv:1802.04434) sum up votes instead of
    scaled signs.
    """

    def __init__(self, *, feedback: bool) -> None:
        super().__init__(unit=_BITS, feedback=feedback)

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> ScaledSign:
        return cls(feedback=spec.flag("feedback"))

    def encode(self, shards: Tensor, filled: Tensor) -> Tensor:
        """Encode packed signs, then the scale. Bit i of a byte is its i-th value: 1 is plus."""
        import torch

        scales = shards.abs().sum(dim=1).div_(filled.clamp(min=1)).unsqueeze(1)
        bits = (shards >= 0).view(torch.uint8).view(len(shards), -1, _BITS)
        packed = (bits << _places(shards.device)).sum(dim=-1, dtype=torch.uint8)
        return torch.cat([packed, scales.view(torch.uint8)], dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        byte = torch.arange(256, dtype=torch.int32, device=codes.device).unsqueeze(1)
        # (256, 8) of +-1.0: the signs that each byte encodes, as a lookup table.
        signs_of_bytes = ((byte >> _places(codes.device)) & 1).float() * 2 - 1
        signs = F.embedding(codes[:, :-SCALE_BYTES].int(), signs_of_bytes)
        return signs.flatten(1).mul_(scales_of(codes[:, -SCALE_BYTES:]))


def _places(device: torch.device) -> Tensor:
    """Return the place of each value's bit in its byte: 0..7."""
    import torch

    return torch.arange(_BITS, dtype=torch.uint8, device=device)
