"""Numerics of a step: what each precision name means, in one place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from results.cell import Precision
from strategies.collectives.link import Link

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward and loss: autocast for `bf16` and `fp16`, nothing for `fp32` and `tf32`."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(
    precision: Precision, device: torch.device, decided_over: Link | None = None
) -> torch.amp.GradScaler:
    """Dynamic loss scaling for `fp16`, whose small gradients would be zero; else a scaler of factor 1.

    Where ranks see different gradients (shards, stages), `decided_over` is who decides alike.
    """
    if decided_over is None or precision != "fp16":
        return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return AgreedScaler(device, decided_over)


class AgreedScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks leave a step out, and change the factor, all together or not at all."""

    def __init__(self, device: torch.device, link: Link) -> None:
        super().__init__(device.type)
        self._link = link
        self._on = device

    def _unscale_grads_(self, *arguments: Any, **named: Any) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients. Returns 1 for a device if a gradient of any rank overflowed."""
        own = super()._unscale_grads_(*arguments, **named)
        found = torch.zeros(1, device=self._on)
        for overflowed in own.values():
            found += overflowed.to(self._on)
        self._link.largest(found)
        return {self._on: found}


def set_float32_math(precision: Precision) -> None:
    """`fp32` means IEEE single precision in matrix products and convolutions; `tf32` allows TensorFloat-32.

    The setting is the process's, not the model's.
    """
    mode = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
