"""The values that data-parallel replicas share: the parameters and buffers of rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from results.errors import UsageError
from strategies.collectives.link import Link


@torch.no_grad()
def take_from_first(link: Link, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` by the values of rank 0, all in one message; collective.

    They are sent as bytes, whatever their data types. The widest come first, so that each is aligned for its
    type.
    """
    if not tensors:
        return
    tensors = sorted(tensors, key=lambda tensor: -tensor.element_size())
    if len(tensors) == 1 and tensors[0].is_contiguous():
        # One tensor is its own message: a large one is not copied.
        link.broadcast(tensors[0].view(-1).view(torch.uint8), 0)
        return
    message = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    link.broadcast(message, 0)
    if link.rank == 0:
        return
    offset = 0
    for tensor in tensors:
        part = message[offset : offset + tensor.nbytes]
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes


def require_one_order(module: nn.Module, link: Link, device: torch.device) -> None:
    """Raise UsageError on all ranks if they have other parameters and buffers, or have them in another order.

    Strategies match the tensors of ranks by their places: equal shapes would be exchanged as if they were one
    tensor. Collective; `device` is one that the link can send from.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    own = [f"{name} ({str(each.dtype).removeprefix('torch.')} {list(each.shape)})" for name, each in named]
    text = "\n".join(own).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:7])
    numbers = link.all_gather(torch.tensor([number, len(text)], device=device))
    if bool((numbers[:, 0] == number).all()):
        return
    padded = torch.zeros(int(numbers[:, 1].max()), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    every = [bytes(row.tolist()).rstrip(b"\0").decode().split("\n") for row in link.all_gather(padded).cpu()]
    rank = next(rank for rank, names in enumerate(every) if names != every[0])
    first, other = next(pair for pair in zip_longest(every[0], every[rank]) if pair[0] != pair[1])
    raise UsageError(
        f"rank 0 registers {first or 'nothing'} where rank {rank} registers {other or 'nothing'}: build the "
        f"same modules in the same order on every rank (a loop over a set has another order in each process: "
        f"use sorted(...))"
    )


Begin = Callable[[Iterable[Tensor]], None]
"""A function that gives parameters of a model their values, before they are split or sharded; collective."""


def take_values(link: Link, fill: Callable[[Tensor], None], tensors: Iterable[Tensor]) -> None:
    """Give tensors the initial values (`Setting.fill`) of rank 0, one after another; collective."""
    for tensor in tensors:
        fill(tensor)
        take_from_first(link, [tensor])


class Buffers:
    """The buffers of a module, looked up in every step, as a module may replace their tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (module.get_submodule(owner), name)
            for owner, _, name in (path.rpartition(".") for path, _ in module.named_buffers())
        ]

    def now(self) -> list[Tensor]:
        """Return the tensors that are buffers now, each once."""
        found = (getattr(owner, name) for owner, name in self._places)
        return [buffer for buffer in found if buffer is not None]
