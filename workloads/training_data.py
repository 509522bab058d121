"""Data of a training run: batches without end that continue from a position, and the held-out samples.

A position is an epoch and the number of its samples that all replicas together have taken: it is valid for
any number of replicas and any micro-batch. Samples form one sequence without end, epoch after epoch; the k-th
batch of R replicas with micro-batches of m takes the next R m samples, of which replica r takes every R-th,
starting with the r-th. So each sample is taken once in each epoch, by one replica, whatever interrupts the
run; a batch may have the last samples of one epoch and the first of the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import lru_cache
from itertools import chain, islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Subset, default_collate

from results.cell import SYNTHETIC
from results.errors import UsageError
from workloads.batch import Batch
from workloads.data import (
    WORKERS_FOR_A_ROW,
    DataRequest,
    as_is,
    checked,
    own_data,
    require_readable,
    samples_for,
    synthetic_pool,
)
from workloads.datasets.facts import DATASETS, Own
from workloads.workload import is_dataset


class TrainingData(ABC, Iterator[Batch]):
    """One replica's micro-batches, on its device, without end; `Trainer.attach` takes it."""

    def __init__(self, request: DataRequest, *, samples_per_epoch: int | None = None) -> None:
        self._request = request
        self.samples_per_epoch = samples_per_epoch
        """The samples of an epoch; None: not known before they are read, or the data have no epochs."""
        self.epoch = 0
        """The number of ended epochs. An epoch of unknown length ends when the next batch is asked for."""
        self.samples = 0
        """The number of samples that all replicas have taken since the start of the run."""
        self._within = 0
        """The number of samples of this epoch that all replicas have taken."""
        self._batches: Iterator[Batch] | None = None

    @property
    def together(self) -> int:
        """The number of samples in one batch of all replicas."""
        return self._request.replicas * self._request.micro_batch

    @property
    def epochs(self) -> float:
        """The number of epochs so far, with the finished part of this one if its length is known."""
        return self.epoch + (self._within / self.samples_per_epoch if self.samples_per_epoch else 0.0)

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._draw()
        return self._request.place(next(self._batches))

    @abstractmethod
    def _draw(self) -> Iterator[Batch]:
        """Yield batches on the CPU from the position on; the position moves past each batch before it is
        yielded."""

    def _advance(self, samples: int) -> None:
        self.samples += samples
        self._within += samples
        if self.samples_per_epoch is not None:
            ended, self._within = divmod(self._within, self.samples_per_epoch)
            self.epoch += ended

    def state_dict(self) -> dict[str, Any]:
        """Return the position: only numbers, the same on all replicas, except the replica's own `loader`."""
        return {
            "epoch": self.epoch,
            "within": self._within,
            "samples": self.samples,
            "of": self.samples_per_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, of this or another number of replicas.

        Raises UsageError if it is in data of another length.
        """
        if state["of"] != self.samples_per_epoch:
            raise UsageError(
                f"the position is in data of {_length(state['of'])}, and these have "
                f"{_length(self.samples_per_epoch)}: resume with the same data, or begin a new run"
            )
        self.epoch, self._within, self.samples = state["epoch"], state["within"], state["samples"]
        self._batches = None


def _length(samples: int | None) -> str:
    return "unknown length" if samples is None else f"{samples} samples"


class _Synthetic(TrainingData):
    """Repeats the batches of a measured run, without epochs."""

    def __init__(self, request: DataRequest) -> None:
        super().__init__(request)
        self._pool = synthetic_pool(request)

    def _draw(self) -> Iterator[Batch]:
        while True:
            batch = self._pool[self.samples // self.together % len(self._pool)]
            self._advance(self.together)
            yield batch


class _Dealt(TrainingData):
    """Samples by their index: an epoch is a permutation that follows from the seed and its number."""

    def __init__(self, request: DataRequest, data: Any, *, own: bool) -> None:
        """`own`: data of a user, which are collated and checked; bench's data sets give complete batches."""
        super().__init__(request, samples_per_epoch=len(data))
        if len(data) < self.together:
            raise UsageError(
                f"dataset {request.dataset} has {len(data)} samples to train on, fewer than one batch of "
                f"{request.micro_batch} for each of {request.replicas} replicas; use a smaller batch or more "
                f"data"
            )
        self._data, self._own = data, own

    def _draw(self) -> Iterator[Batch]:
        return checked(self._loaded(), self._request) if self._own else self._loaded()

    def _loaded(self) -> Iterator[Batch]:
        request = self._request
        loader: DataLoader[Batch] = DataLoader(
            self._data,
            batch_sampler=self._indices(),
            num_workers=request.workers,
            collate_fn=None if self._own else as_is,
            pin_memory=request.device.type == "cuda",
            # Without a separate one, it would draw from the generator that dropout uses.
            generator=request.generator(),
        )
        for batch in loader:
            self._advance(self.together)
            yield batch

    def _indices(self) -> Iterator[list[int]]:
        """Yield the indices of this replica's batches from the position on, without end."""
        request, length = self._request, len(self._data)
        orders = lru_cache(maxsize=2)(self._order)
        start = self.epoch * length + self._within
        while True:
            end = start + self.together
            places = (divmod(n, length) for n in range(start + request.replica, end, request.replicas))
            yield [orders(epoch)[within] for epoch, within in places]
            start = end

    def _order(self, epoch: int) -> list[int]:
        """Return the order of an epoch of torch's DistributedSampler: a training run begins with the batches
        of a measured run, if it holds out no samples."""
        generator = torch.Generator().manual_seed(self._request.seed + epoch)
        order: list[int] = torch.randperm(len(self._data), generator=generator).tolist()
        return order


class _Reopened(TrainingData):
    """Data that are read from the start in each epoch.

    They resume from their own state, if they have one, or are read again up to the position.
    """

    def __init__(self, request: DataRequest, *, samples_per_epoch: int | None = None) -> None:
        super().__init__(request, samples_per_epoch=samples_per_epoch)
        self._opened: Any = None
        self._kept: Any = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        kept = self._opened.state_dict() if _has_state(self._opened) else self._kept
        return state if kept is None else state | {"loader": {"state": kept, "of": self._share}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        kept = state.get("loader")
        self._kept = kept["state"] if kept is not None and kept["of"] == self._share else None
        self._opened = None

    @property
    def _share(self) -> list[int]:
        """The owner of the state: the state of another replica, or of other batches, does not fit this
        one."""
        return [self._request.replica, self._request.replicas, self._request.micro_batch]

    def _from_position(self, opened: Any, already: int) -> Iterator[Any]:
        """Iterate over `opened` from the position on, after `already` items."""
        self._opened = opened
        if self._kept is not None and _has_state(opened):
            opened.load_state_dict(self._kept)
            self._kept = None
            return iter(opened)
        return islice(iter(opened), already, None)

    def _next_epoch(self) -> None:
        """Begin the next epoch. Raises UsageError if this one had no samples."""
        if not self._within:
            request = self._request
            raise UsageError(
                f"data= gave nothing to replica {request.replica} of {request.replicas} in epoch "
                f"{self.epoch} (batches of {request.micro_batch}): an epoch is never empty"
            )
        self.epoch, self._within = self.epoch + 1, 0


def _has_state(opened: object) -> bool:
    return hasattr(opened, "state_dict") and hasattr(opened, "load_state_dict")


class _Row(_Reopened):
    """An iterable of samples: each replica reads all of them and keeps its own."""

    def __init__(self, request: DataRequest, data: Iterable[Any]) -> None:
        super().__init__(request, samples_per_epoch=len(data) if isinstance(data, Sized) else None)
        if request.workers:
            raise UsageError(WORKERS_FOR_A_ROW)
        self._data = data

    def _draw(self) -> Iterator[Batch]:
        return checked(self._rows(), self._request)

    def _rows(self) -> Iterator[Batch]:
        request = self._request
        samples = self._from_position(self._data, self._within)
        while True:
            own = []
            for place in range(self.together):
                sample, samples = self._sample(samples)
                if place % request.replicas == request.replica:
                    own.append(sample)
            yield default_collate(own)

    def _sample(self, samples: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
        """Return the next sample, and the iterator over the samples after it."""
        for sample in samples:
            self._advance(1)
            return sample, samples
        if self.samples_per_epoch is None:
            self._next_epoch()
        samples = self._from_position(self._data, 0)
        for sample in samples if self._within == 0 else ():
            self._advance(1)
            return sample, samples
        raise UsageError(
            f"data= has a length of {_length(self.samples_per_epoch)}, and epoch {self.epoch} ended after "
            f"{self._within}: an epoch is as long as __len__ says, and never empty"
        )


class _Function(_Reopened):
    """Batches that a user's function opens for each epoch; their number is not known in advance."""

    def _draw(self) -> Iterator[Batch]:
        return checked(self._epochs(), self._request)

    def _epochs(self) -> Iterator[Batch]:
        while True:
            opens = cast(Any, own_data(self._request))
            opened = opens(self._request.share(epoch=self.epoch))
            for batch in self._from_position(opened, self._within // self.together):
                self._advance(self.together)
                yield batch
            self._next_epoch()


def open_training(request: DataRequest) -> TrainingData:
    """Open the batches of a training run, from its beginning on; worker processes, if any, end with it.

    Real data are dealt as the module docstring says, without the samples of `held_out`. Raises UsageError if
    the data set does not fit the workload or has less than one batch for each replica.
    """
    facts = DATASETS.facts(request.dataset)
    if facts.takes is None:
        return _Synthetic(request)
    if facts.takes != Own.takes:
        samples = samples_for(request, facts)
        return _Dealt(request, Subset(samples, samples.split()[0]), own=False)
    data = own_data(request)
    require_readable(data)
    if is_dataset(data):
        return _Dealt(request, data, own=True)
    return _Function(request) if callable(data) else _Row(request, data)


def require_epochs(request: DataRequest) -> None:
    """Raise UsageError if training in epochs is asked for data without epochs."""
    if DATASETS.facts(request.dataset).takes is None:
        raise UsageError(
            f"{SYNTHETIC} data have no epochs: ask for a number of steps (--steps 1000), or for real data "
            f"(--dataset)"
        )


class HeldOut(Iterable[Batch]):
    """A replica's share of the held-out samples; each iteration is one pass over it.

    All replicas have the same number of batches, the last of which may be smaller, or larger by one sample. A
    pass raises UsageError if there are fewer samples than replicas.
    """

    def __init__(self, request: DataRequest, opens: Callable[[], Iterable[Batch]]) -> None:
        """`opens` begins a pass, of batches on the CPU."""
        self._request, self._opens = request, opens

    def __iter__(self) -> Iterator[Batch]:
        return map(self._request.place, self._opens())


def held_out(request: DataRequest) -> HeldOut | None:
    """Return the data that this replica validates on, or None if no samples are held out.

    Samples of a Dataset are read when they are needed, and only by their replica.
    """
    facts = DATASETS.facts(request.dataset)
    if facts.takes is None:
        return None
    if facts.takes != Own.takes:
        samples = samples_for(request, facts)
        _, kept = samples.split()
        if not kept:
            return None
        return HeldOut(request, lambda: map(samples.__getitems__, _shared(iter(kept), request)))
    data = request.workload.held_out
    return None if data is None else HeldOut(request, _own_held_out(data, request))


def _own_held_out(data: Any, request: DataRequest) -> Callable[[], Iterable[Batch]]:
    require_readable(data, "held_out=")
    if is_dataset(data):
        return lambda: (
            default_collate([data[index] for index in own])
            for own in _shared(iter(range(len(data))), request)
        )
    if callable(data):
        return lambda: cast(Iterable[Batch], data(request.share()))
    return lambda: map(default_collate, _shared(iter(data), request))


def _shared(row: Iterator[Any], request: DataRequest) -> Iterator[list[Any]]:
    """Deal samples to the replicas in turn, in batches.

    The last samples, if they are fewer than the replicas, go into the batch before.
    """
    replicas = request.replicas
    together = replicas * request.micro_batch
    taken = list(islice(row, together))
    if len(taken) < replicas:
        raise UsageError(
            f"{len(taken)} samples are held out, and each of {replicas} replicas needs one: hold out more"
        )
    while taken:
        ahead = list(islice(row, replicas))
        if len(ahead) < replicas:
            taken, ahead = taken + ahead, []
        yield taken[request.replica :: replicas]
        taken = list(islice(chain(ahead, row), together)) if ahead else []
