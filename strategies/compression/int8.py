"""`int8`: a byte a value and a scale a block, rounded at random so that the mean error is zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from results.spec import Option, Spec
from strategies.compression.base import State
from strategies.compression.facts import FEEDBACK, CompressorFacts
from strategies.compression.promise import CompressorPromise, UnbiasedLevels, WireBytes
from strategies.compression.streams import generator_of
from strategies.compression.two_stage import SCALE_BYTES, TwoStage, scales_of

if TYPE_CHECKING:
    from torch import Tensor


SMALLEST_STEP = 2.0**-126
"""The smallest normal number of fp32, for a block of zeros too: no division by zero occurs, and no step is
subnormal."""


class Int8Facts(CompressorFacts):
    """Its rounding is unbiased, so that it does not need feedback."""

    name = "int8"
    help = "8 bits with a scale a block, stochastically rounded, in two stages"
    options = MappingProxyType(
        {
            "block": Option(
                kind="int", default=256, minimum=8, maximum=65536, help="values that share one scale"
            ),
            "feedback": replace(FEEDBACK, default=False),
        }
    )
    compressor = "strategies.compression.int8:Int8"
    need = "all-to-all"

    @property
    def promises(self) -> tuple[CompressorPromise, ...]:
        block = self.spec.integer("block")

        def size(values: int, ranks: int, before: int) -> int:
            # A shard for every rank, and the sum of its own: a byte a value, and 4 of each block's step.
            return (ranks + 1) * math.ceil(values / (ranks * block)) * (block + 4)

        return WireBytes(of=size), UnbiasedLevels(block=block, levels=127, smallest_step=SMALLEST_STEP)


LARGEST = 127
"""Codes are -127..127: symmetric, so that a gradient and its negative are treated alike."""


class Int8(TwoStage):
    """Blocks of values share a step, max |x| / 127; a value is rounded up or down to a multiple of the step.

    The probability of rounding up makes the expectation the value itself, floor(x / step + u) with u uniform
    in [0, 1): unbiased, so that it does not need feedback (QSGD, Alistarh et al. 2017, arXiv:1610.02132,
    where the step follows from the norm). The error of a stage is less than a step. A block with a value that
    is not finite has no finite value afterwards.
    """

    def __init__(self, *, block: int, seed: int, rank: int, feedback: bool) -> None:
        """`block` values share a step. Ranks draw different random numbers, or their errors would add up."""
        super().__init__(unit=block, feedback=feedback)
        self._key = seed, rank
        self._calls = 0

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> Int8:
        return cls(block=spec.integer("block"), seed=seed, rank=rank, feedback=spec.flag("feedback"))

    def encode(self, shards: Tensor, filled: Tensor) -> Tensor:
        """Encode block after block: its codes, then its step."""
        import torch

        blocks = shards.view(len(shards), -1, self.unit)
        steps = blocks.abs().amax(dim=-1, keepdim=True).div_(LARGEST).clamp_(min=SMALLEST_STEP)
        levels = self._uniform(blocks).addcdiv_(blocks, steps).floor_()
        # In single precision 127 + u may be rounded to 128.
        codes = levels.clamp_(-LARGEST, LARGEST).to(torch.int8)
        return torch.cat([codes.view(torch.uint8), steps.view(torch.uint8)], dim=-1).flatten(1)

    def decode(self, codes: Tensor) -> Tensor:
        import torch

        blocks = codes.view(len(codes), -1, self.unit + SCALE_BYTES)
        levels, steps = blocks[..., : self.unit].view(torch.int8), scales_of(blocks[..., self.unit :])
        return levels.float().mul_(steps).flatten(1)

    def _uniform(self, like: Tensor) -> Tensor:
        """Draw numbers in [0, 1) from a key of this call: the number of calls is the only state."""
        import torch

        own = generator_of(like.device, *self._key, self._calls)
        self._calls += 1
        return torch.rand(like.shape, generator=own, device=like.device)

    def state_dict(self) -> State:
        return {"calls": self._calls}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._calls = cast(int, state["calls"])
