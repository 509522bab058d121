"""torchdata's StatefulDataLoader as a user's own loader: a run continues in the middle of its epoch."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from data_requests import a_request_of
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from workloads import DataShare
from workloads.training_data import TrainingData, open_training

loaders = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install torchdata"
)
# torchdata 0.11 calls a function that torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Noisy(Dataset[Tensor]):
    """24 samples with noise from a separate generator, whose state the loader keeps."""

    def __init__(self, share: DataShare) -> None:
        self._generator = torch.Generator().manual_seed(1000 * share.epoch + share.replica)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand((), generator=self._generator).item()])

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


def opened(replica: int, workers: int) -> TrainingData:
    def opens(share: DataShare) -> Iterable[Tensor]:
        data = Noisy(share)
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, num_replicas=share.replicas, rank=share.replica, seed=share.seed
        )
        sampler.set_epoch(share.epoch)
        return loaders.StatefulDataLoader(
            data, batch_size=share.micro_batch, sampler=sampler, num_workers=workers
        )

    return open_training(a_request_of(opens, replica=replica, seed=3))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_samples_and_the_noise_that_it_would_have_had(workers) -> None:
    seen: list[float] = []
    for replica in range(2):
        whole = opened(replica, workers)
        # Six batches of 2 samples an epoch: to the middle of the first.
        before = list(islice(whole, 3))
        kept = io.BytesIO()
        torch.save(whole.state_dict(), kept)
        kept.seek(0)
        after = list(islice(whole, 7))
        resumed = opened(replica, workers)
        # As a checkpoint is read: nothing is unpickled but numbers, texts and tensors.
        resumed.load_state_dict(torch.load(kept, weights_only=True))
        assert torch.equal(torch.stack(list(islice(resumed, 7))), torch.stack(after))
        seen += torch.stack([*before, *after[:3]])[..., 0].flatten().tolist()
    # An epoch has each sample once.
    assert sorted(seen) == list(range(24))
