"""The stages that a plan reckons with are those that the workers cut."""

from __future__ import annotations

import pytest
from builders import a_cell

from results.parts import ModelParts
from strategies.catalog import STRATEGIES
from strategies.pipeline.facts import Pipeline
from strategies.pipeline.stages import Twin, cut_model
from workloads.build import build_workload
from workloads.catalog import WORKLOADS, facts

WIDE = ("resnet18-32px", "resnet50")
"""Those that have eight blocks and more."""
CASES = [
    *((workload, stages) for workload in ("gpt-nano", "llama-nano", *WIDE) for stages in (2, 4)),
    *((workload, 8) for workload in WIDE),
]


@pytest.mark.parametrize(("workload", "stages"), CASES)
def test_a_plan_and_a_worker_cut_alike(workload: str, stages: int) -> None:
    built = build_workload(workload)
    worker = cut_model(built.module, Twin(built.module), built.layout, ranks=stages, stages=stages)
    parts = facts(WORKLOADS.parse(workload)).parts
    assert isinstance(parts, ModelParts)
    cell = a_cell(
        workload=workload, strategy="pipeline:1f1b", gpus=stages, micro_batch=4, model_parallel=stages
    )
    pipeline = Pipeline(STRATEGIES.parse(cell.strategy))
    planned = [stage for stages_of_rank in pipeline.stages(cell, parts) for stage in stages_of_rank]
    assert [stage.blocks for stage in planned] == list(worker.runs)
