"""Data of a workload's own (`--dataset own`): dealt to replicas, read again, and refused in sentences."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from data_requests import CountedRow, Row
from data_requests import a_request_of as request
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from results.errors import StoreError, UsageError
from workloads import DataShare, Workload
from workloads.data import DataRequest, open_batches


class Squares(Dataset[dict[str, Tensor]]):
    """Ten samples; sample `broken` cannot be read."""

    def __init__(self, broken: int | None = None) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self._broken:
            raise OSError("sample 7 is torn")
        return {"n": torch.tensor(index), "square": torch.tensor(index**2)}


def numbers(asked: DataRequest, batches: int) -> list[list[int]]:
    return [batch["n"].tolist() for batch in islice(open_batches(asked), batches)]


@pytest.mark.parametrize("dataset", ["own", "own:workers=1"])
def test_a_dataset_is_dealt_to_the_replicas_anew_in_each_epoch(dataset) -> None:
    # 10 samples, 5 a replica: 2 batches of 2 in an epoch.
    both = [numbers(request(Squares(), dataset=dataset, replica=replica), 4) for replica in range(2)]
    for epoch in (slice(0, 2), slice(2, 4)):
        dealt = [number for one in both for batch in one[epoch] for number in batch]
        assert len(set(dealt)) == len(dealt) == 8
    assert both[0][:2] != both[0][2:]
    assert both[0] == numbers(request(Squares()), 4)
    assert both[0] != numbers(request(Squares(), seed=1), 4)


@pytest.mark.parametrize("row", [Row, CountedRow])
def test_replicas_take_consecutive_samples_in_turn_and_start_over(row) -> None:
    # Replica 1 has 1, 3, 5, 7, 9, of which 9 fills no batch.
    batches = islice(open_batches(request(row(10), replica=1)), 3)
    assert [batch.tolist() for batch in batches] == [[1, 3], [5, 7], [1, 3]]


def test_a_function_opens_each_epoch_for_its_share() -> None:
    opened: list[DataShare] = []

    def epoch(share: DataShare) -> Iterable[Tensor]:
        opened.append(share)
        return [torch.full((2, len(opened)), float(share.replica))]

    batches = list(islice(open_batches(request(epoch, dataset="own:workers=3", replica=1, seed=5)), 2))
    assert [tuple(batch.shape) for batch in batches] == [(2, 1), (2, 2)]
    assert set(opened) == {DataShare(replica=1, replicas=2, micro_batch=2, seed=5, workers=3)}


def two_epochs(data: Any, dataset: str) -> None:
    for replica in range(2):
        list(islice(open_batches(request(data, dataset=dataset, replica=replica)), 4))


def once(share: DataShare) -> Iterable[Tensor]:
    """Gives one batch, and never again."""
    given = len(GIVEN)
    GIVEN.append(share)
    return [] if given else [torch.zeros(2)]


GIVEN: list[DataShare] = []


@pytest.mark.parametrize(
    ("data", "dataset", "words"),
    [
        (lambda share: [], "own", "gave no batch at all to replica 0 of 2 (batches of 2)"),
        (once, "own", "gave nothing more after 1 batches to replica 0 of 2"),
        (Row(2), "own", "gave no batch at all"),
        (lambda share: [torch.zeros(3, 2)], "own", "a batch of 3 samples, and 2 were asked for: all ranks"),
        (Squares(broken=7), "own", "data= failed at batch "),
        (Squares(broken=7), "own:workers=1", "OSError: sample 7 is torn"),
        (lambda share: 1 / 0, "own", "data= failed at batch 0 of replica 0: ZeroDivisionError: division by"),
        (DataLoader(Squares()), "own", "give its Dataset, or a function that takes a workloads.DataShare"),
        (iter([torch.zeros(2)]), "own", "data= is an iterator, which can be read once"),
        (Row(10), "own:workers=1", "workers= is for a Dataset with __getitem__ and __len__"),
        ([0, 1, 2], "own", "data= has 3 samples: 1 for each of 2 replicas is less than a batch of 2"),
        (Squares(), "synthetic", "add --dataset own"),
    ],
)
def test_data_that_do_not_keep_the_contract_are_refused_in_a_sentence(data, dataset, words) -> None:
    # A file that cannot be read may be read later; the rest is refused again.
    with pytest.raises(StoreError if getattr(data, "_broken", None) else UsageError) as raised:
        two_epochs(data, dataset)
    assert words in str(raised.value)


def test_a_workload_without_data_and_without_synthetic_samples_is_refused() -> None:
    with pytest.raises(UsageError, match=r"synthetic\(generator, samples\), or data="):
        Workload(module=nn.Identity(), loss=nn.functional.mse_loss)
