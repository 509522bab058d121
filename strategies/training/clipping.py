"""Clipping by the global norm if no rank has all gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.collectives.link import Link
from strategies.devices import device_of

EPSILON = 1e-6
"""The number that torch's own clipping adds to the norm."""
PIECE = 2**18
"""Values that are converted to double precision at a time, 2 MiB: a complete gradient would take twice its
size."""


@torch.no_grad()
def clip_shards(
    gradients: Sequence[tuple[Tensor, int]], max_norm: float, link: Link, device: torch.device
) -> Tensor:
    """Scale gradients down so that their norm over all ranks is at most `max_norm`; collective.

    Returns the norm that they had, a scalar in double precision.

    `gradients` are this rank's, each with the number of ranks of `link` that have the same; `device` is one
    that the link can send from. It does what `torch.nn.utils.clip_grad_norm_` does, except that the sum has
    another order, and is in double precision.
    """
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, int]]] = defaultdict(list)
    for gradient, copies in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        if device_of(values.device).asynchronous:
            alike[values.device, values.dtype].append((values, copies))
        else:
            squares += (_square(values) / copies).to(device)
    for group in alike.values():
        squares += _squares_at_once(group).to(device)
    link.all_reduce(squares)
    norm = squares.sqrt()[0]
    # The host reads no number: on a GPU it would wait for the whole backward pass.
    factor = torch.fmin(torch.full_like(norm, max_norm) / (norm + EPSILON), torch.ones_like(norm))
    for gradient in _scaled_at_once(gradients, factor):
        # torch would compute a value without a dimension in double precision.
        (gradient if gradient.dim() else gradient.view(1)).mul_(factor.to(gradient.device))
    return norm


def _scaled_at_once(gradients: Sequence[tuple[Tensor, int]], factor: Tensor) -> list[Tensor]:
    """Scale the gradients that kernels for many tensors take, and return the others."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    others = []
    for gradient, _ in gradients:
        if not gradient.is_sparse and device_of(gradient.device).asynchronous:
            alike[gradient.device, gradient.dtype].append(gradient)
        else:
            others.append(gradient)
    for (device, dtype), group in alike.items():
        torch._foreach_mul_(group, factor.to(device, torch.promote_types(dtype, torch.float32)))
    return others


def _squares_at_once(group: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the sum of the squares of all values in double precision, each tensor's divided by its copies.

    The tensors have one device and data type, and a few kernels process all of them. Kernels of CUDA add up
    in double precision without a converted copy; on CPU torch would make a copy of each tensor.
    """
    norms = torch._foreach_norm([values for values, _ in group], 2, dtype=torch.float64)
    # The copies are numbers: torch would wait for the device if it copied a tensor of them to it.
    squares = torch._foreach_div(torch._foreach_mul(norms, norms), [float(copies) for _, copies in group])
    return torch.stack(squares).sum()


def _square(values: Tensor) -> Tensor:
    """Return the sum of the squares in double precision, a scalar; a piece at a time."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for piece in torch.split(values.flatten(), PIECE):
        total += piece.double().square().sum()
    return total
