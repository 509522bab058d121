"""Numerics of a step: what each precision name means, in one place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from results.cell import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward and loss: autocast for `bf16` and `fp16`, nothing for `fp32` and `tf32`."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling for `fp16`, whose small gradients would be zero; else a scaler of factor 1."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def set_float32_math(precision: Precision) -> None:
    """`fp32` means IEEE single precision in matrix products and convolutions; `tf32` allows TensorFloat-32.

    The setting is the process's, not the model's.
    """
    mode = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
