"""Draw the samples that a replica must be given, by code that shares nothing with `workloads.data`, which
gives them.

The simulation of a step draws from here, so that a defect there, or in the code that asks it for a replica,
is only on one side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from harness.worker.rank.control import hash_number
from results.cell import Cell
from results.errors import UsageError
from workloads.batch import Batch, named_tensors
from workloads.catalog import WORKLOADS, facts
from workloads.datasets.facts import DATASETS, Own
from workloads.datasets.samples import Images, Windows
from workloads.workload import DataShare, ImageInput, TokenInput, Workload, is_dataset

SYNTHETIC_BATCHES = 4
"""Number of batches that are drawn from a replica's generator, and then given in turn for ever."""


class Draws(Iterator[Batch]):
    """A replica's micro-batches, counted as they are drawn, with the sampler that knows what each must be."""

    def __init__(self, batches: Iterator[Batch], sampler: Sampler) -> None:
        self._batches = batches
        self.sampler = sampler
        self.drawn = 0
        """Number of micro-batches so far."""
        self.shared: str | None = None
        """Warning that replicas read the same batches; None until a proof has seen it."""

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.drawn += 1
        return batch


class Sampler:
    """Draws any micro-batch of any replica of a cell, by its number."""

    def __init__(
        self, cell: Cell, workload: Workload, device: torch.device, source_folder: Path | None
    ) -> None:
        """Take paths of a user's text relative to `source_folder` (None: the working folder)."""
        self._cell, self._workload, self._device = cell, workload, device
        self._own_synthetic = own_synthetic(cell)
        self._folder = source_folder or Path.cwd()
        self._prints: dict[int, list[float]] = {}
        """Fingerprints of synthetic micro-batches, by replica."""
        self._rows: dict[int, _Row] = {}
        """Readers, by replica, of those own data of the workload that can only be read from the beginning."""

    def batches(self, replica: int, first: int, count: int) -> Iterator[Batch]:
        """Yield `count` micro-batches of a replica from number `first`, counted from 0, on the device."""
        pool = []
        if self._cell.synthetic:
            generator = _generator(f"{self._cell.seed}/{replica}")
            pool = [self._drawn(generator) for _ in range(SYNTHETIC_BATCHES)]
        for number in range(first, first + count):
            yield self._placed(pool[number % len(pool)] if pool else self._dealt(replica, number))

    def prints(self, replica: int, first: int, count: int) -> list[float]:
        """Return a fingerprint of each of the same micro-batches."""
        if not self._cell.synthetic:
            return [batch_print(batch) for batch in self.batches(replica, first, count)]
        if replica not in self._prints:
            pool = self.batches(replica, 0, SYNTHETIC_BATCHES)
            self._prints[replica] = [batch_print(batch) for batch in pool]
        known = self._prints[replica]
        return [known[number % len(known)] for number in range(first, first + count)]

    def unexpected(self, batches: Iterable[Batch], replica: int, first: int) -> Iterator[Batch]:
        """Yield micro-batches that the model has not learned, instead of a replica's from number `first` on.

        A model that has memorised its data has gradients that are hardly more than rounding, so they cannot
        be compared; with targets that it does not expect, gradients are as large as ever. The loss of a
        user's workload may refuse the targets of other samples: its `synthetic` draws new samples instead.
        """
        for number, batch in enumerate(batches, first):
            if self._own_synthetic:
                generator = _generator(f"{self._cell.seed}/{replica}/unexpected/{number}")
                yield self._placed(self._drawn(generator))
            elif self.reads_own:
                # Only the workload's own code can read its data, so other targets cannot be made for them.
                yield batch
            else:
                # Each sample gets the targets of the one before it; those of a single sample move by one.
                inputs, targets = batch
                yield inputs, targets.roll(1, dims=0 if len(targets) > 1 else -1)

    def _drawn(self, generator: torch.Generator) -> Batch:
        draw = self._workload.synthetic
        assert draw is not None, "the batches of this cell were opened before"
        return draw(generator, self._cell.micro_batch)

    def _dealt(self, replica: int, number: int) -> Batch:
        """Return a micro-batch of a data set.

        Each epoch is a permutation, drawn from seed and epoch, that is dealt sample by sample to the
        replicas; samples that do not fill a micro-batch of each are left out.
        """
        cell = self._cell
        if self.reads_own:
            return self._own(replica, number)
        if self._workload.input is None:
            raise UsageError(f"dataset {cell.dataset} needs a workload that takes images or tokens")
        samples = _samples(cell.dataset, cell.dataset_hash, self._workload.input, self._folder)
        return samples.__getitems__(self._indices(len(samples), replica, number))

    def _indices(self, samples: int, replica: int, number: int) -> list[int]:
        cell = self._cell
        share = samples // cell.replicas
        epoch, place = divmod(number, share // cell.micro_batch)
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(cell.seed + epoch))
        own = order[replica : share * cell.replicas : cell.replicas]
        return [int(index) for index in own[place * cell.micro_batch :][: cell.micro_batch]]

    def _own(self, replica: int, number: int) -> Batch:
        data: Any = self._workload.data
        if is_dataset(data):
            return default_collate([data[index] for index in self._indices(len(data), replica, number)])
        if replica not in self._rows:
            self._rows[replica] = _Row(data, self._cell, replica)
        return self._rows[replica].batch(number)

    @property
    def reads_own(self) -> bool:
        """Whether the micro-batches are the workload's own data."""
        return DATASETS.facts(self._cell.dataset).takes == Own.takes

    @property
    def obstacle(self) -> str | None:
        """Why a late micro-batch cannot be drawn by its number; None if it can."""
        if self.reads_own and not is_dataset(self._workload.data):
            return "the data are read from the beginning, and are not read again up to that step"
        return None

    def _placed(self, batch: Batch) -> Batch:
        def moved(leaf: Any) -> Any:
            if isinstance(leaf, Mapping):
                return self._placed(dict(leaf))
            if not isinstance(leaf, Tensor):
                return leaf
            last = leaf.dim() == 4 and self._cell.memory_format == "channels_last"
            there = leaf.to(self._device)
            return there.contiguous(memory_format=torch.channels_last) if last else there

        return pytree.tree_map(moved, batch)


class _Row:
    """Reads data that can only be read from the beginning a second time, and keeps the last batches."""

    def __init__(self, data: Any, cell: Cell, replica: int) -> None:
        self._data, self._cell, self._replica = data, cell, replica
        self._kept: dict[int, Batch] = {}
        self._batches = self._read()

    def _read(self) -> Iterator[tuple[int, Batch]]:
        cell, replicas = self._cell, self._cell.replicas
        share = DataShare(
            replica=self._replica, replicas=replicas, micro_batch=cell.micro_batch, seed=cell.seed
        )
        number = 0
        while True:
            if callable(self._data):
                epoch = iter(self._data(share))
            else:
                epoch = self._collated(
                    sample for place, sample in enumerate(self._data) if place % replicas == self._replica
                )
            before = number
            for batch in epoch:
                yield number, batch
                number += 1
            if number == before:
                raise UsageError(
                    f"data= is read twice to check a step, and gave replica {self._replica} nothing "
                    f"after {number} batches: open a new epoch at each call, not one iterator for all"
                )

    def _collated(self, samples: Iterator[Any]) -> Iterator[Batch]:
        size = self._cell.micro_batch
        while len(piece := list(islice(samples, size))) == size:
            yield default_collate(piece)

    def batch(self, number: int) -> Batch:
        while number not in self._kept:
            place, self._kept[place] = next(self._batches)
            self._kept.pop(place - 2 * self._cell.accumulation, None)
        return self._kept[number]


def own_synthetic(cell: Cell) -> bool:
    """Return whether a cell's batches come from the `synthetic` of a user's workload."""
    return cell.synthetic and facts(WORKLOADS.parse(cell.workload)).own_code


def _generator(key: str) -> torch.Generator:
    seed = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)
    return torch.Generator().manual_seed(seed)


def batch_print(batch: Batch) -> float:
    """Return a fingerprint of everything in a batch, bit for bit."""
    return hash_number(named_tensors(batch))


@lru_cache(maxsize=1)
def _samples(
    dataset: str, content: str | None, takes: ImageInput | TokenInput, folder: Path
) -> Images | Windows:
    """Read a data set once; `content` is the hash of a user's file."""
    samples: Images | Windows = DATASETS.facts(dataset).read(takes, folder)
    return samples
