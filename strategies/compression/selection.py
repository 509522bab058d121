"""Select the elements of a bucket to send: indices of the largest, found in one of three ways.

All take values (n,) and 1 <= k <= n, and return exactly k different indices (int64, in no order), so that all
ranks send the same number. NaN counts as larger than infinity: a value that is not finite is always sent.
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
"""The share of the values in the sample that gives the threshold (Lin et al. 2018, arXiv:1712.01887, section
5)."""
_AIM = 1.3
"""Expected number of candidates, as a multiple of k: with the r-th largest of a random sample as the
threshold, it has a relative standard deviation of about 1 / sqrt(r)."""
_LEAST_RANK = 50
_CACHED = 1 << 18
"""Elements that are processed at a time on CPU, so that they stay in its cache."""


def exact(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest magnitudes."""
    return torch.topk(values.abs(), k, sorted=False).indices


def sampled(values: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return the k largest of the values over a threshold, which comes from a random sample.

    These are the k largest of all if at least k are over the threshold. If fewer are (by chance, or because
    the others are zero), the lowest other indices make up the number. If a sample saves no time, this calls
    `exact`. On CUDA it waits for the device, as the next operation depends on the number of candidates.
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
        # The lowest indices that are not candidates make up the number.
        free = torch.ones(k, dtype=torch.bool, device=candidates.device)
        free[candidates[candidates < k]] = False
        return torch.cat([candidates, free.nonzero()[: k - candidates.numel(), 0]])
    return candidates[exact(values.index_select(0, candidates), k)]


def block(values: Tensor, k: int) -> Tensor:
    """Return the index of the largest magnitude in each of k nearly equal blocks."""
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
        """Return the first index of each block: (count,), int64."""
        return torch.arange(self.first, self.first + self.count * self.length, self.length, device=device)


def equal_blocks(n: int, k: int) -> Iterator[BlockRange]:
    """Divide n elements into k blocks whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(n, k)
    if longer:
        yield BlockRange(first=0, count=longer, length=length + 1)
    yield BlockRange(first=longer * (length + 1), count=k - longer, length=length)


def _at_least(values: Tensor, threshold: Tensor) -> Tensor:
    """Return the indices of all magnitudes of at least `threshold`, in order; also of NaN, never of zero."""
    kind = torch.finfo(values.dtype)
    threshold = threshold.clamp(min=kind.smallest_normal * kind.eps)  # the smallest subnormal number
    return torch.cat(
        [
            (magnitudes < threshold).logical_not_().nonzero()[:, 0].add_(first)
            for first, magnitudes in _magnitudes(values[:, None])
        ]
    )


def _magnitudes(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield |rows| in groups of rows, with the index of the first row, in a buffer that each group
    overwrites.

    On CPU a new vector for all magnitudes would cost more, by its page faults, than the rest of the work.
    """
    count, length = rows.shape
    step = max(1, _CACHED // length) if device_of(rows.device).kind == "cpu" else count
    buffer = rows.new_empty(min(step, count), length)
    for first in range(0, count, step):
        some = rows[first : first + step]
        yield first, torch.abs(some, out=buffer[: len(some)])
