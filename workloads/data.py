"""Endless batches on the device, of synthetic or real data, the same for the same seed and replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from results.cell import SYNTHETIC
from results.errors import UsageError
from workloads.batch import Batch, placed
from workloads.datasets.facts import DATASETS, DatasetFacts, Own
from workloads.datasets.samples import Images, Windows
from workloads.own_data import Data, DataShare, own_batches
from workloads.workload import Workload

POOL = 4
"""Synthetic batches made beforehand and then given in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """Which batches: one replica's share of a data set."""

    workload: Workload
    dataset: str
    """Spec text."""
    micro_batch: int
    replica: int
    replicas: int
    seed: int
    device: torch.device
    memory_format: torch.memory_format = torch.contiguous_format
    """Of tensors with four dimensions; others are contiguous."""
    source_folder: Path | None = None
    """What the path of a user's text is relative to; None: the working folder."""


def open_batches(request: DataRequest) -> Iterator[Batch]:
    """Micro-batches on the request's device, without end; worker processes, if any, end with the iterator.

    Everything is drawn from generators of its own, so that torch's global random state stays as it is and
    one process can open the batches of every replica. Real data are dealt anew each epoch (a seeded
    permutation), no sample to two replicas; what does not fill a batch is left out. Raises UsageError if
    the data set does not fit the workload or has less than one batch for each replica.
    """
    facts = DATASETS.facts(request.dataset)
    if facts.takes is None:
        return cycle(synthetic_pool(request))
    if facts.takes == Own.takes:
        return _own(request)
    loader, sampler = _loader(request, facts)
    return _epochs(request, loader, sampler)


def synthetic_pool(request: DataRequest) -> list[Batch]:
    """The synthetic batches that a replica is given in turn. Raises UsageError if the workload draws none."""
    draw = request.workload.synthetic
    if draw is None:
        raise UsageError(
            f"the workload draws no {SYNTHETIC} samples, and has data of its own: add --dataset {Own.name}"
        )
    generator = torch.Generator().manual_seed(seed_of(request.seed, request.replica))
    batches = (draw(generator, request.micro_batch) for _ in range(POOL))
    return [placed_for(request, batch) for batch in batches]


def seed_of(seed: int, replica: int) -> int:
    """32 bits (all that torch's CPU generator uses) that differ for neighbouring seeds and replicas."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{replica}".encode()).digest()[:4], "big")


def placed_for(request: DataRequest, batch: Batch) -> Batch:
    """The batch on the request's device, in its memory format."""
    return placed(batch, request.device, request.memory_format)


def own_data(request: DataRequest) -> Data:
    """The workload's own data. Raises UsageError if it has none."""
    if request.workload.data is None:
        raise UsageError(
            f"dataset {request.dataset} does not fit: the workload has no data= of its own; use {SYNTHETIC}, "
            f"which fits all"
        )
    return request.workload.data


def share_of(request: DataRequest, *, epoch: int = 0) -> DataShare:
    """What a function that opens the workload's own data is told."""
    return DataShare(
        replica=request.replica,
        replicas=request.replicas,
        micro_batch=request.micro_batch,
        seed=request.seed,
        workers=DATASETS.facts(request.dataset).spec.integer("workers"),
        epoch=epoch,
    )


def _own(request: DataRequest) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed_of(request.seed, request.replica))
    pinned = request.device.type == "cuda"
    batches = own_batches(
        own_data(request),
        share_of(request),
        generator,
        pinned=pinned,
        count_samples=request.workload.count,
    )
    return (placed_for(request, batch) for batch in batches)


def _epochs(
    request: DataRequest, loader: DataLoader[Batch], sampler: DistributedSampler[Batch]
) -> Iterator[Batch]:
    for epoch in count():
        sampler.set_epoch(epoch)
        for batch in loader:
            yield placed_for(request, batch)


def _loader(request: DataRequest, facts: DatasetFacts) -> tuple[DataLoader[Batch], DistributedSampler[Batch]]:
    dataset = samples_for(request, facts)
    share = len(dataset) // request.replicas
    if share < request.micro_batch:
        raise UsageError(
            f"dataset {facts.spec.text} has {len(dataset)} samples: {share} for each of {request.replicas} "
            f"replicas is less than a batch of {request.micro_batch}; use a smaller batch or more data"
        )
    sampler: DistributedSampler[Batch] = DistributedSampler(
        dataset,
        num_replicas=request.replicas,
        rank=request.replica,
        seed=request.seed,
        drop_last=True,
    )
    workers = facts.spec.integer("workers")
    loader = DataLoader(
        dataset,
        batch_size=request.micro_batch,
        sampler=sampler,
        num_workers=workers,
        collate_fn=as_is,
        pin_memory=request.device.type == "cuda",
        drop_last=True,
        persistent_workers=workers > 0,
        # Its own, or each epoch would draw from the generator that dropout uses.
        generator=torch.Generator().manual_seed(seed_of(request.seed, request.replica)),
    )
    return loader, sampler


def as_is(batch: object) -> object:
    """The data sets give whole batches already."""
    return batch


def samples_for(request: DataRequest, facts: DatasetFacts) -> Images | Windows:
    """The samples of a data set of real data. Raises UsageError if it does not fit the workload."""
    takes = request.workload.input
    if takes is None or takes.kind != facts.takes:
        kind = "no real data (its input is None)" if takes is None else takes.kind
        raise UsageError(
            f"dataset {facts.spec.text} does not fit: the workload takes {kind}; use {SYNTHETIC}, which fits "
            f"all"
        )
    samples: Images | Windows = facts.read(takes, request.source_folder or Path.cwd())
    return samples
