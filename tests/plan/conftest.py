"""Shared by the tests of the plan: options to a request and to a plan, on a machine without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builders import a_cell, a_request

from harness.plan.expand import expand
from harness.plan.study_file import StudyFile
from results.cell import Cell
from results.plan import Plan, Request

MakeRequest = Callable[..., Request]
MakePlan = Callable[..., Plan]


@pytest.fixture
def request_of(tmp_path: Path) -> MakeRequest:
    def make(*, machine_has_cuda: bool = False, **options: object) -> Request:
        return a_request(
            StudyFile(**options),  # type: ignore[arg-type]
            machine_has_cuda=machine_has_cuda,
            source_folder=tmp_path,
        )

    return make


@pytest.fixture
def plan_of(request_of: MakeRequest) -> MakePlan:
    def make(*, earlier: tuple[Plan, ...] = (), limit: object = None, **options: object) -> Plan:
        request = request_of(**options)
        return expand(request, study="s", created_at="2026-01-01T00:00:00Z", earlier=earlier, limit=limit)  # type: ignore[arg-type]

    return make


@pytest.fixture
def cell_of() -> Callable[..., Cell]:
    """A cell of the MLP, which has the shortest arithmetic."""

    def make(**fields: object) -> Cell:
        base = {"strategy": "single", "gpus": 1, "micro_batch": 256, "optimizer": "sgd:lr=0.05"}
        return a_cell(**base | fields)

    return make
