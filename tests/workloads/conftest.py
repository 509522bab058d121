"""Shared by the tests of workloads: a user's folder, and data requests with everything else filled in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rank_builders
from data_requests import a_request

from workloads.build import build_workload
from workloads.data import DataRequest

MODEL = """
import torch
from torch import nn
from workloads import Workload


def build():
    return Workload(
        module=nn.Linear(3, 2),
        loss=nn.functional.mse_loss,
        synthetic=lambda generator, n: (torch.randn(n, 3, generator=generator), torch.zeros(n, 2)),
    )
"""
one_thread = rank_builders.one_thread


@pytest.fixture
def model_source() -> str:
    """The text of a small user's model: `build()` gives a linear layer of 3 x 2."""
    return MODEL


@pytest.fixture
def user_folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder for a user's modules; what was imported from it is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def ask() -> Callable[..., DataRequest]:
    """A request by workload text and data set; batches of 4 for replica 0 of 1 with seed 0 by default."""

    def make(text: str, dataset: str, **changes: object) -> DataRequest:
        return a_request(build_workload(text), dataset, **{"micro_batch": 4, "replicas": 1} | changes)

    return make
