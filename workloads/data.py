"""Batches without end on the device, of synthetic, real or a workload's own data; they follow only from the
seed and the replica.

A workload's own data are a Dataset, an iterable of samples, or a function that opens a loader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.distributed import DistributedSampler

from results.cell import SYNTHETIC
from results.errors import StoreError, UsageError
from workloads.batch import Batch, placed
from workloads.datasets.facts import DATASETS, DatasetFacts, Own
from workloads.datasets.samples import Images, Windows
from workloads.workload import Data, DataShare, Workload, is_dataset

POOL = 4
"""The number of synthetic batches, which are drawn in advance and then repeated."""
WORKERS_FOR_A_ROW = (
    "workers= is for a Dataset with __getitem__ and __len__: the samples of an iterable are read by the rank"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """One replica's share of a data set."""

    workload: Workload
    dataset: str
    """Spec text of the data set."""
    micro_batch: int
    replica: int
    replicas: int
    seed: int
    device: torch.device
    memory_format: torch.memory_format = torch.contiguous_format
    """The format of tensors with four dimensions; other tensors are contiguous."""
    source_folder: Path | None = None
    """The folder to which the path of a user's text is relative; None: the working folder."""

    @property
    def workers(self) -> int:
        """The number of processes that prepare batches; 0: the rank itself."""
        return DATASETS.facts(self.dataset).spec.integer("workers")

    def generator(self) -> torch.Generator:
        """Return a new generator that follows from seed and replica, on the CPU."""
        return torch.Generator().manual_seed(seed_of(self.seed, self.replica))

    def share(self, *, epoch: int = 0) -> DataShare:
        """Return the argument of a function that opens the workload's own data."""
        return DataShare(
            replica=self.replica,
            replicas=self.replicas,
            micro_batch=self.micro_batch,
            seed=self.seed,
            workers=self.workers,
            epoch=epoch,
        )

    def place(self, batch: Batch) -> Batch:
        """Move the batch to the device, in the memory format."""
        return placed(batch, self.device, self.memory_format)


def open_batches(request: DataRequest) -> Iterator[Batch]:
    """Open micro-batches on the request's device, without end; worker processes, if any, end with the
    iterator.

    All random numbers come from separate generators, so that torch's global random state stays as it is and
    one process can open the batches of every replica. Real data and a user's Dataset are dealt anew each
    epoch (a seeded permutation), no sample to two replicas; samples that do not fill a batch are left out.
    From an iterable of samples each replica takes every `replicas`-th. A function decides what it opens.
    Raises UsageError if the data set does not fit the workload or has less than one batch for each replica;
    and, with the batches, for a batch of another number of samples, and for any error of a user's data.
    """
    facts = DATASETS.facts(request.dataset)
    if facts.takes is None:
        return cycle(synthetic_pool(request))
    if facts.takes != Own.takes:
        samples, name = samples_for(request, facts), f"dataset {facts.spec.text}"
        _require_batches(request, len(samples), name)
        batches = _dealt(request, samples, name, as_is)
    else:
        data = own_data(request)
        require_readable(data)
        if is_dataset(data):
            batches = checked(_dealt(request, data, "data="), request)
        else:
            opened = data if callable(data) else lambda share: _in_a_row(data, share)
            batches = checked(_reopened(opened, request.share()), request)
    return (request.place(batch) for batch in batches)


def synthetic_pool(request: DataRequest) -> list[Batch]:
    """Draw the synthetic batches of a replica. Raises UsageError if the workload draws no samples."""
    draw = request.workload.synthetic
    if draw is None:
        raise UsageError(
            f"the workload draws no {SYNTHETIC} samples, and has its own data: add --dataset {Own.name}"
        )
    generator = request.generator()
    return [request.place(draw(generator, request.micro_batch)) for _ in range(POOL)]


def seed_of(seed: int, replica: int) -> int:
    """Return 32 bits (as many as torch's CPU generator uses) that differ for neighbouring seeds and
    replicas."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{replica}".encode()).digest()[:4], "big")


def own_data(request: DataRequest) -> Data:
    """Return the workload's own data. Raises UsageError without such data."""
    if request.workload.data is None:
        raise UsageError(
            f"dataset {request.dataset} does not fit: the workload has no data=; use "
            f"{SYNTHETIC}, which fits all"
        )
    return request.workload.data


def require_readable(data: object, name: str = "data=") -> None:
    """Raise UsageError, with advice, for data that are for one replica, or that can be read only once."""
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{name} is a DataLoader, which does not know which replica it is for: give its Dataset, or a "
            f"function that takes a workloads.DataShare and returns a DataLoader for that replica"
        )
    if isinstance(data, Iterator):
        raise UsageError(
            f"{name} is an iterator, which can be read once: give a Dataset, an iterable that begins anew, "
            f"or a function of a workloads.DataShare that opens an epoch"
        )


def _require_batches(request: DataRequest, samples: int, name: str) -> None:
    share = samples // request.replicas
    if share < request.micro_batch:
        raise UsageError(
            f"{name} has {samples} samples: {share} for each of {request.replicas} replicas is less than a "
            f"batch of {request.micro_batch}; use a smaller batch or more data"
        )


def _dealt(request: DataRequest, dataset: Any, name: str, collate: Any = None) -> Iterator[Batch]:
    """Yield the batches of a Dataset, which is dealt anew in each epoch."""
    _require_batches(request, len(dataset), name)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=request.replicas, rank=request.replica, seed=request.seed, drop_last=True
    )
    loader = DataLoader(
        dataset,
        batch_size=request.micro_batch,
        sampler=sampler,
        num_workers=request.workers,
        collate_fn=collate,
        pin_memory=request.device.type == "cuda",
        drop_last=True,
        persistent_workers=request.workers > 0,
        # Without a separate one, each epoch would draw from the generator that dropout uses.
        generator=request.generator(),
    )
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def as_is(batch: object) -> object:
    """Return a batch as it is: bench's own data sets give complete batches already."""
    return batch


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


def checked(batches: Iterator[Batch], request: DataRequest) -> Iterator[Batch]:
    """Yield a user's batches; errors name the batch, and the rule for data that it breaks."""
    for number in count():
        try:
            batch = next(batches)
        except UsageError:
            raise
        except Exception as error:
            # Any error of a user's data; a worker process has the error in its last line.
            said = (str(error).strip().splitlines() or [""])[-1]
            kind = "" if said.startswith(("Error", type(error).__name__)) else f"{type(error).__name__}: "
            where = f"batch {number} of replica {request.replica}"
            # A file that cannot be read now may be read later.
            failure = StoreError if isinstance(error, OSError) else UsageError
            raise failure(f"data= failed at {where}: {kind}{said}") from error
        found, asked = request.workload.count(batch), request.micro_batch
        if found != asked:
            last = "; a DataLoader leaves out a smaller last batch with drop_last=True"
            raise UsageError(
                f"data= gave replica {request.replica} a batch of {found} samples, and {asked} were asked "
                f"for: all ranks use the same number, the sample first in each tensor"
                f"{last if found < asked else ''}; for other batches give the workload a samples_of(batch)"
            )
        yield batch


def samples_for(request: DataRequest, facts: DatasetFacts) -> Images | Windows:
    """Return the samples of a data set of real data. Raises UsageError if it does not fit the workload."""
    takes = request.workload.input
    if takes is None or takes.kind != facts.takes:
        kind = "no real data (its input is None)" if takes is None else takes.kind
        raise UsageError(
            f"dataset {facts.spec.text} does not fit: the workload takes {kind}; use {SYNTHETIC}, which fits "
            f"all"
        )
    samples: Images | Windows = facts.read(takes, request.source_folder or Path.cwd())
    return samples
