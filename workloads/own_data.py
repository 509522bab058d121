"""Batches of a workload's own data: a Dataset, samples in a row, or a function that opens a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from results.errors import StoreError, UsageError
from workloads.batch import Batch, samples_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShare:
    """Which part of the data a replica is given, and in which pieces."""

    replica: int
    replicas: int
    micro_batch: int
    """Samples of a batch."""
    seed: int
    workers: int = 0
    """Processes that prepare batches; 0: the rank itself."""
    epoch: int = 0
    """Of a training run: epochs before this one. A measured run leaves it 0."""


WORKERS_FOR_A_ROW = (
    "workers= is for a Dataset with __getitem__ and __len__: samples in a row are read by the rank"
)

Data = Iterable[Any] | Callable[[DataShare], Iterable[Batch]]
"""A torch Dataset (`__getitem__` and `__len__`), samples in a row that can be read again, or a function that
opens an epoch of batches."""


def is_dataset(data: object) -> bool:
    """Whether samples are read by their index; an IterableDataset has a `__getitem__` that only raises."""
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def require_readable(data: object, name: str = "data=") -> None:
    """Raise UsageError, with what to give, for data that are for one replica, or that can be read once."""
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{name} is a DataLoader, which does not know which replica it is for: give its Dataset, or a "
            f"function of a workloads.DataShare that opens a DataLoader"
        )
    if isinstance(data, Iterator):
        raise UsageError(
            f"{name} is an iterator, which can be read once: give a Dataset, an iterable that begins anew, "
            f"or a function of a workloads.DataShare that opens an epoch"
        )


def own_batches(
    data: Data,
    share: DataShare,
    generator: torch.Generator,
    *,
    pinned: bool,
    count_samples: Callable[[Batch], int] = samples_of,
) -> Iterator[Batch]:
    """A replica's batches on the CPU, epoch after epoch without end.

    A Dataset is dealt anew in each epoch (a seeded permutation), no sample to two replicas, and what does not
    fill a batch is left out. Of samples in a row each replica takes every `replicas`-th. What a function
    opens is its own business. Raises UsageError for data without a batch for each replica, for a batch of
    another number of samples, and for whatever the data raise.
    """
    require_readable(data)
    if is_dataset(data):
        return checked(_dealt(data, share, generator, pinned=pinned), share, count_samples)
    opened = data if callable(data) else lambda share: _in_a_row(data, share)
    return checked(_reopened(opened, share), share, count_samples)


def _dealt(data: Any, share: DataShare, generator: torch.Generator, *, pinned: bool) -> Iterator[Batch]:
    each = len(data) // share.replicas
    if each < share.micro_batch:
        raise UsageError(
            f"data= has {len(data)} samples: {each} for each of {share.replicas} replicas is less than a "
            f"batch of {share.micro_batch}; use a smaller batch or more data"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=share.replicas, rank=share.replica, seed=share.seed, drop_last=True
    )
    loader = DataLoader(
        data,
        batch_size=share.micro_batch,
        sampler=sampler,
        num_workers=share.workers,
        pin_memory=pinned,
        drop_last=True,
        persistent_workers=share.workers > 0,
        # Its own, or each epoch would draw from the generator that dropout uses.
        generator=generator,
    )
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def _in_a_row(data: Iterable[Any], share: DataShare) -> Iterator[Batch]:
    if share.workers:
        raise UsageError(WORKERS_FOR_A_ROW)
    own = islice(iter(data), share.replica, None, share.replicas)
    while len(samples := list(islice(own, share.micro_batch))) == share.micro_batch:
        yield default_collate(samples)


def _reopened(opened: Callable[[DataShare], Iterable[Batch]], share: DataShare) -> Iterator[Batch]:
    given = 0
    for epoch in count():
        before = given
        for batch in opened(share):
            given += 1
            yield batch
        if given == before:
            what = f"nothing more after {given} batches" if epoch else "no batch at all"
            raise UsageError(
                f"data= gave {what} to replica {share.replica} of {share.replicas} (batches of "
                f"{share.micro_batch}): an epoch is opened when the one before has ended, and is never empty"
            )


def checked(
    batches: Iterator[Batch], share: DataShare, count_samples: Callable[[Batch], int]
) -> Iterator[Batch]:
    """The batches, with errors in words of the contract."""
    for number in count():
        try:
            batch = next(batches)
        except UsageError:
            raise
        except Exception as error:
            # Whatever a user's data raise; of a worker process the last line says what.
            said = (str(error).strip().splitlines() or [""])[-1]
            kind = "" if said.startswith(("Error", type(error).__name__)) else f"{type(error).__name__}: "
            where = f"batch {number} of replica {share.replica}"
            # A file that cannot be read now may be read later.
            failure = StoreError if isinstance(error, OSError) else UsageError
            raise failure(f"data= failed at {where}: {kind}{said}") from error
        found = count_samples(batch)
        if found != share.micro_batch:
            last = "; a DataLoader leaves out a smaller last batch with drop_last=True"
            raise UsageError(
                f"data= gave replica {share.replica} a batch of {found} samples, and {share.micro_batch} "
                f"were asked for: all ranks use equally many, the sample first in each tensor"
                f"{last if found < share.micro_batch else ''}; for other batches give the workload a "
                f"samples_of(batch)"
            )
        yield batch
