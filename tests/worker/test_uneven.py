"""`bench check` notes a loss that differs from a mean over samples, and finds a short last batch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from data_requests import a_request
from torch import Tensor, nn
from torch.nn import functional as F

from harness.worker.check import read_epoch, uneven
from results.errors import UsageError
from workloads import DataShare, Workload


def samples() -> tuple[Tensor, Tensor]:
    """The tokens of the last two samples are padding, but for the first one of each."""
    targets = torch.arange(12).view(4, 3) % 5
    targets[2:, 1:] = -100
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)), targets


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(3), nn.Dropout())


def of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def of_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return (each.sum(dim=1) / (targets >= 0).sum(dim=1)).mean()


def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
    return of_samples(outputs + torch.randn(outputs.shape), targets)


def test_a_batch_is_held_against_its_halves() -> None:
    x, y = samples()
    for loss, said in ((of_tokens, True), (of_samples, False), (noisy, False)):
        workload = Workload(module=model(), loss=loss, data=[(x, y)])
        assert (uneven(workload, (x, y), 4) is not None) is said
        assert workload.module.training
    # Three samples have no halves.
    workload = Workload(module=model(), loss=of_tokens, data=[(x, y)])
    assert uneven(workload, (x[:3], y[:3]), 3) is None


def test_an_epoch_is_read_to_its_last_batch() -> None:
    def opened(share: DataShare) -> Iterable[Tensor]:
        return torch.zeros(70, 1).split(share.micro_batch)

    workload = Workload(module=model(), step=lambda model, batch: model(batch), data=opened)
    request = a_request(workload, micro_batch=8, replicas=1)
    with pytest.raises(UsageError, match="a batch of 6 samples, and 8 were asked for"):
        read_epoch(request)
