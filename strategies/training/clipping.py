"""Clipping by the global norm where no rank has all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.collectives.link import Link

EPSILON = 1e-6
"""What torch's own clipping adds to the norm."""
PIECE = 2**18
"""Values that are in double precision at a time, 2 MiB: of a whole gradient they would be twice its size."""


@torch.no_grad()
def clip_shards(
    gradients: Sequence[tuple[Tensor, int]], max_norm: float, link: Link, device: torch.device
) -> Tensor:
    """Scale gradients down so that the norm of all ranks' together is at most `max_norm`; collective.

    Returns the norm that they had, a scalar in double precision.

    `gradients` are this rank's, each with the number of ranks of `link` that have the same; `device` is one
    that the link reaches. As `torch.nn.utils.clip_grad_norm_` but for the order of the sum, which is in
    double precision.
    """
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient, copies in gradients:
        squares += (_square(gradient) / copies).to(device)
    link.all_reduce(squares)
    norm = squares.sqrt()[0]
    factor = min(1.0, max_norm / (norm.item() + EPSILON))
    for gradient, _ in gradients:
        gradient.mul_(factor)
    return norm


def _square(gradient: Tensor) -> Tensor:
    """The sum of its values' squares in double precision, a scalar."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for piece in torch.split(values.flatten(), PIECE):
        total += piece.double().square().sum()
    return total
