"""Numerics of a step: the meaning of each precision name."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from results.cell import Precision
from results.errors import UsageError
from strategies.collectives.link import Link
from strategies.compression.base import State
from strategies.gradient_exchange import AuditableExchange

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}


def autocast(
    precision: Precision, device: torch.device, *, caches: bool = True
) -> AbstractContextManager[object]:
    """Return the context of forward and loss: autocast for `bf16`, `fp16` and `float8` (to bf16), none for
    `fp32` and `tf32`.

    `caches`: a weight is cast once, and the result is kept until the context ends.
    """
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=caches)


def require_bf16_parameters(module: nn.Module, device: torch.device) -> None:
    """Raise UsageError, with advice, for a model that torch cannot compute on `device` with parameters in
    bfloat16 and unchanged buffers."""
    for name, part in module.named_modules():
        if (
            device.type == "cpu"
            and isinstance(part, nn.modules.batchnorm._BatchNorm)
            and part.affine
            and part.track_running_stats
        ):
            raise UsageError(
                f"params=bf16: on CPU torch has no BatchNorm with parameters in bfloat16 and statistics in "
                f"float32, as {name} would be: leave params=bf16 out, autocast computes in bf16 as well"
            )


def loss_scaler(
    precision: Precision, device: torch.device, decided_over: Link | None = None
) -> torch.amp.GradScaler:
    """Return dynamic loss scaling for `fp16`, whose small gradients would be zero; else a scaler of factor 1.

    If ranks see different gradients (shards, stages), they agree over `decided_over`.
    """
    if decided_over is None or precision != "fp16":
        return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return AgreedScaler(device, decided_over)


class ScaledFeedback:
    """Keeps the residuals and other state of an exchange in step with a loss scaler.

    A step whose gradients overflow is left out: then the exchange resumes from its residuals before that
    step, as an infinity in them would overflow every later step. Residuals are in the units of scaled
    gradients, and change with the scale. All ranks do the same, as they all see the same sums.

    Each step copies the state of the exchange; with a disabled scaler it copies nothing.
    """

    def __init__(self, exchange: AuditableExchange | None, scaler: torch.amp.GradScaler) -> None:
        """`exchange`: None has no residuals."""
        self._exchange = exchange if scaler.is_enabled() else None
        self._scaler = scaler
        self._before: State = {}

    def begin(self) -> None:
        """Call before the gradients of a step are computed."""
        if self._exchange is not None:
            self._before, self._scale = self._exchange.state_dict(), self._scaler.get_scale()

    def end(self) -> None:
        """Call after the scaler's `update`, which lowers the scale of a step that was left out."""
        if self._exchange is None:
            return
        factor = self._scaler.get_scale() / self._scale
        if factor < 1:
            self._exchange.load_state_dict(self._before)
        if factor != 1:
            self._exchange.rescale(factor)
        self._before = {}


class AgreedScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks agree on leaving a step out, and on the factor."""

    def __init__(self, device: torch.device, link: Link) -> None:
        super().__init__(device.type)
        self._link = link
        self._on = device

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients. Returns, by device, a tensor that is above 0 if a gradient of any
        rank overflowed."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None:
                # Take the shard of a DTensor: torch would agree over the mesh of each DTensor on its own, in
                # collectives that do not reach shards that are offloaded.
                gradient = parameter.grad
                shard: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                shard = shard._values() if shard.is_sparse else shard
                alike[shard.device, shard.dtype].append(shard)
        found = torch.zeros(1, device=self._on)
        for (device, _), gradients in alike.items():
            overflowed = torch.zeros(1, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflowed, inv_scale.to(device))
            found += overflowed.to(self._on)
        self._link.largest(found)
        return {self._on: found}


def set_float32_math(precision: Precision) -> None:
    """`fp32` means IEEE single precision in matrix products and convolutions; `tf32` allows TensorFloat-32.

    The setting is for the process, not for a model. torch 2.11 to 2.13 has an older and a newer setting
    (`fp32_precision`), and raises an error if one is read after the other was set. Setting the older one sets
    both: user models read the older one, torch's compiler reads both.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
