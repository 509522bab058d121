"""Reduce-scatter that is under way: each rank's part of a sum over the ranks, by what is quickest there."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from strategies.collectives.link import Link
from strategies.devices import device_of


class Scattering(Protocol):
    """A sum under way; what it sums must stay as it is until `wait` has returned."""

    def wait(self) -> Tensor:
        """This rank's part, (n,); on CUDA the current stream waits for it."""


def start_reduce_scatter(link: Link, values: Tensor) -> Scattering:
    """Begin to sum `values`, (size * n,), over the ranks; part r of the sum is for rank r.

    Gloo, the backend of CPU ranks, runs its own as an all-reduce, which moves twice the bytes: there every
    rank gets the parts of all others as they are, and sums them when they are waited for.
    """
    on_host = device_of(values.device).kind == "cpu"
    return _Exchanged(link, values) if on_host else _Reduced(link, values)


class _Reduced:
    """By the backend."""

    def __init__(self, link: Link, values: Tensor) -> None:
        self._values = values
        self._summed = values.new_empty(values.numel() // link.size)
        self._work: Work = link.start_reduce_scatter(self._summed, values)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._summed


class _Exchanged:
    """By an all-to-all, and a sum in the order of ranks."""

    def __init__(self, link: Link, values: Tensor) -> None:
        self._values = values
        self._received = torch.empty_like(values)
        self._size = link.size
        self._work: Work = link.start_all_to_all(self._received, values)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received.view(self._size, -1).sum(0)
