"""A workload: a model with its loss and its data. What this package builds, and what a user's own model
file (`--workload py:MODULE:FUNCTION`) returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from results.layout import ModelLayout

Batch = tuple[Tensor, Tensor]
"""Inputs and targets of some samples, the sample first in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """A model that sorts images into classes: inputs float32 (n, *shape), targets int64 (n,)."""

    kind: ClassVar = "images"
    shape: tuple[int, ...]
    """(channels, px, px), or (pixels,) where the image is flattened."""
    classes: int

    def synthetic(self, generator: torch.Generator, samples: int) -> Batch:
        """Normally distributed pixels with random classes, on the CPU."""
        images = torch.randn(samples, *self.shape, generator=generator, device="cpu")
        return images, torch.randint(self.classes, (samples,), generator=generator, device="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInput:
    """A model that predicts the next token: inputs and targets int64 (n, length), shifted by one."""

    kind: ClassVar = "tokens"
    length: int
    vocabulary: int

    def synthetic(self, generator: torch.Generator, samples: int) -> Batch:
        """Random tokens, each the target of the one before, on the CPU."""
        size = (samples, self.length + 1)
        tokens = torch.randint(self.vocabulary, size, generator=generator, device="cpu")
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its loss and its data; the module is on the CPU, in training mode, freshly initialised."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    """Outputs of the module and targets of a batch, to the mean loss over its samples."""
    synthetic: Callable[[torch.Generator, int], Batch]
    """A batch of so many random samples on the CPU, drawn from the generator alone."""
    unit: Literal["images", "tokens", "samples"] = "samples"
    """What throughput counts."""
    units_per_sample: int = 1
    layout: ModelLayout = field(default_factory=ModelLayout)
    input: ImageInput | TokenInput | None = None
    """What real data are shaped to; None: the workload runs on synthetic data alone."""
