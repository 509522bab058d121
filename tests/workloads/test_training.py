"""The presets learn from real data: their loss curves mean something."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from statistics import fmean

import pytest
import torch

from workloads.data import DataRequest, open_batches
from workloads.datasets.samples import stdlib_text


def losses(request: DataRequest, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    workload = request.workload
    curve = []
    for inputs, targets in islice(open_batches(request), steps):
        loss = workload.loss(workload.module(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def test_the_mlp_learns_the_digits(ask) -> None:
    torch.manual_seed(0)
    request = ask("mlp", "digits", micro_batch=128)
    optimizer = torch.optim.SGD(request.workload.module.parameters(), lr=0.05, momentum=0.9)
    curve = losses(request, optimizer, 60)
    assert curve[0] == pytest.approx(math.log(10), rel=0.1)
    assert fmean(curve[-10:]) < 0.3


@pytest.mark.slow
def test_gpt_nano_learns_the_text(ask) -> None:
    torch.manual_seed(0)
    request = ask("gpt-nano", "text")
    optimizer = torch.optim.AdamW(request.workload.module.parameters(), lr=1e-3)
    curve = losses(request, optimizer, 80)
    assert curve[0] == pytest.approx(math.log(256), rel=0.05)
    content = stdlib_text()
    shares = [count / len(content) for count in Counter(content).values()]
    # The entropy of single bytes (3.3 nats): below it lies only what the bytes before tell.
    assert fmean(curve[-20:]) < -sum(share * math.log(share) for share in shares)


@pytest.mark.slow
@pytest.mark.long
def test_resnet18_32px_learns_the_digits_at_its_defaults(ask) -> None:
    torch.manual_seed(0)
    request = ask("resnet18-32px", "digits", micro_batch=8)
    optimizer = torch.optim.SGD(request.workload.module.parameters(), lr=0.002, momentum=0.9)
    curve = losses(request, optimizer, 40)
    assert fmean(curve[-10:]) < 0.6 * fmean(curve[:5])
