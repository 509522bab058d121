"""Messages of a model that no test machine holds, on 256 ranks: its tensors have shapes, and no memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest
import recorded_world
import torch
from builders import a_cell
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from results.parts import ModelParts
from strategies import Trainer, TrainSettings
from strategies.fsdp.shards import DeviceGrid
from strategies.predictions import traffic
from strategies.training.missing_gradients import UnlikeGradients
from workloads.llama import LlamaShape
from workloads.llama.model import build_llama

RANKS = 256
SHAPE = LlamaShape(
    layers=16,
    width=2048,
    heads=32,
    kv_heads=8,
    hidden=8192,
    context=16,
    vocabulary=128_256,
    seq=16,
    tied=True,
)
"""Llama 3.2 1B, for short sequences."""


@pytest.fixture
def shapes_alone(monkeypatch) -> Iterator[None]:
    """Make tensors without memory. What reads a value, which such tensors lack, is left out."""
    grid = DeviceGrid.__init__

    def with_values(*arguments: Any) -> None:
        with unset_fake_temporarily():
            grid(*arguments)

    monkeypatch.setattr(DeviceGrid, "__init__", with_values)
    monkeypatch.setattr(nn.Module, "to", lambda module, *_, **__: module)
    monkeypatch.setattr(Trainer, "_look_at", lambda *_: None)
    monkeypatch.setattr("strategies.build.require_one_order", lambda *_: None)
    for name in ("meet", "refuse"):
        monkeypatch.setattr(UnlikeGradients, name, lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("shapes_alone")
def test_the_closed_form_of_a_billion_parameters_on_256_ranks() -> None:
    """1,235,814,400 parameters, which with AdamW would be 18 GiB on one rank: every gathering and sum, in
    order, is in the closed form."""
    parts = SHAPE.parts()
    assert isinstance(parts, ModelParts)
    assert parts.values == 1_235_814_400
    cell = a_cell(workload="llama-1b", strategy="fsdp", gpus=RANKS, micro_batch=1, optimizer="adamw")
    gathered, summed = traffic(cell, parts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with unset_fake_temporarily():
        world = recorded_world.opened(RANKS - 1, RANKS)
        group, calls = world.__enter__()
    try:
        workload = build_llama(SHAPE)
        trainer = Trainer(
            workload.module,
            workload.loss,
            device=torch.device("cpu"),
            settings=TrainSettings(strategy="fsdp", optimizer="adamw"),
            layout=workload.layout,
            group=group,
        )
        batches = iter([workload.synthetic(torch.Generator().manual_seed(0), 1)] * 2)
        for _ in range(2):
            calls.clear()
            trainer.step(batches)
        found = [(call.operation, call.ranks, call.payload_bytes) for call in calls]
        group.reset()
    finally:
        with unset_fake_temporarily():
            world.__exit__(None, None, None)
    expected = [("all_gather", RANKS, piece.payload_bytes) for piece in gathered.pieces]
    assert [call for call in found if call[0] == "all_gather"] == expected
    sums = [("reduce_scatter", RANKS, piece.payload_bytes) for piece in summed.pieces]
    assert [call for call in found if call[0] == "reduce_scatter"] == sums
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 4 * parts.values / 4
