"""Which elements of a bucket are sent: indices of the largest, by three ways of finding them.

All take values (n,) and 1 <= k <= n, and give exactly k different indices (int64, in no order), so that all
ranks send equally much. NaN counts as larger than infinity: what is not finite is sent, never kept quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from strategies.devices import device_of

Select = Callable[[Tensor, int, torch.Generator], Tensor]

_SAMPLED = 0.01
"""The share of the values that a threshold is taken from (Lin et al. 2018, arXiv:1712.01887, section 5)."""
_AIM = 1.3
"""Candidates aimed at, as a multiple of k: with the threshold the r-th largest of a random sample, their
number has a standard deviation of about 1 / sqrt(r) of it."""
_LEAST_RANK = 50
_CACHED = 1 << 18
"""Elements that are worked on at a time on CPU: they stay in its cache."""


def exact(values: Tensor, k: int) -> Tensor:
    """The k of the largest magnitude."""
    return torch.topk(values.abs(), k, sorted=False).indices


def sampled(values: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """The k largest among those over a threshold, which a random sample gives.

    These are the k largest of all if at least k are over the threshold. Where fewer are (by chance, or
    because the others are zero) the first indices that are left fill up. Where a sample saves nothing it is
    `exact`. On CUDA it waits for the device, as the number of candidates decides what comes next.
    """
    n = values.numel()
    aim = _AIM * k
    rank = max(_LEAST_RANK, round(_SAMPLED * aim))
    sample_size = round(rank * n / aim)
    if 2 * max(sample_size, aim) > n:
        return exact(values, k)
    places = torch.randint(n, (sample_size,), generator=generator, device=values.device)
    sample = values.index_select(0, places).abs()
    candidates = _at_least(values, sample.kthvalue(sample_size - rank + 1).values)
    if candidates.numel() < k:
        return _filled(candidates, k)
    return candidates[exact(values.index_select(0, candidates), k)]


def block(values: Tensor, k: int) -> Tensor:
    """The largest magnitude of each of k nearly equal blocks."""
    chosen = []
    for run in equal_blocks(values.numel(), k):
        rows = values[run.first : run.first + run.count * run.length].view(run.count, run.length)
        places = [magnitudes.argmax(1) for _, magnitudes in _magnitudes(rows)]
        chosen.append(run.starts(values.device).add_(torch.cat(places)))
    return torch.cat(chosen)


SELECTIONS: Mapping[str, Select] = MappingProxyType(
    {
        "exact": lambda values, k, generator: exact(values, k),
        "sampled": sampled,
        "block": lambda values, k, generator: block(values, k),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """`count` blocks of `length` elements, one after another from element `first`."""

    first: int
    count: int
    length: int

    def starts(self, device: torch.device) -> Tensor:
        """The first index of each block: (count,), int64."""
        return torch.arange(self.first, self.first + self.count * self.length, self.length, device=device)


def equal_blocks(n: int, k: int) -> Iterator[BlockRange]:
    """n elements as k blocks whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(n, k)
    if longer:
        yield BlockRange(first=0, count=longer, length=length + 1)
    yield BlockRange(first=longer * (length + 1), count=k - longer, length=length)


def _at_least(values: Tensor, threshold: Tensor) -> Tensor:
    """Indices of all magnitudes of at least `threshold`, in order; NaN is among them, zero never."""
    kind = torch.finfo(values.dtype)
    threshold = threshold.clamp(min=kind.smallest_normal * kind.eps)  # the smallest subnormal number
    return torch.cat(
        [
            (magnitudes < threshold).logical_not_().nonzero()[:, 0].add_(first)
            for first, magnitudes in _magnitudes(values[:, None])
        ]
    )


def _filled(candidates: Tensor, k: int) -> Tensor:
    """Fewer than k indices and the first others: of the first k places enough are left."""
    left = torch.ones(k, dtype=torch.bool, device=candidates.device)
    left[candidates[candidates < k]] = False
    return torch.cat([candidates, left.nonzero()[: k - candidates.numel(), 0]])


def _magnitudes(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Some whole rows at a time of |rows|, in a buffer that the next ones overwrite, and the first's index.

    On CPU the pages of a new vector as long as the values cost more than all that is done with it.
    """
    count, length = rows.shape
    step = max(1, _CACHED // length) if device_of(rows.device).kind == "cpu" else count
    buffer = rows.new_empty(min(step, count), length)
    for first in range(0, count, step):
        some = rows[first : first + step]
        yield first, torch.abs(some, out=buffer[: len(some)])
