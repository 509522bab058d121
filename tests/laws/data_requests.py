"""Requests for the data of a workload, and samples in a row, that tests of data share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from workloads import Workload
from workloads.data import DataRequest


def a_request(workload: Workload, dataset: str = "own", **changes: Any) -> DataRequest:
    """Batches of 2 for replica 0 of 2 on the CPU with seed 0, or what `changes` make of it."""
    filled: dict[str, Any] = {"micro_batch": 2, "replica": 0, "replicas": 2, "seed": 0}
    return DataRequest(workload=workload, dataset=dataset, device=torch.device("cpu"), **filled | changes)


def a_request_of(data: Any, dataset: str = "own", *, kept: Any = None, **changes: Any) -> DataRequest:
    """A request for a user's own data, of which `kept` are held out."""
    workload = Workload(module=nn.Identity(), data=data, held_out=kept)
    return a_request(workload, dataset, **changes)


class Row(IterableDataset[int]):
    """Samples in a row of unknown length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class CountedRow(Row):
    """A row that knows how many samples it has."""

    def __len__(self) -> int:
        return self.length
