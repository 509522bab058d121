"""Ids of cells as they were on the day they were first measured: a change here orphans users' runs."""

from __future__ import annotations

import hashlib

import pytest
from builders import plan_of


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (
            {
                "workload": "resnet18-32px",
                "optimizer": "sgd:lr=0.01",
                "strategy": "single,ddp",
                "gpus": "1..2",
            },
            ["resnet18-32px-single-g001-b8-db9d9e57c8f13d19", "resnet18-32px-ddp-g002-b8-6da74c5e09c086f8"],
        ),
        (
            {
                "workload": "gpt-nano",
                "optimizer": "adamw",
                "strategy": "ddp:bucket_mb=1",
                "gpus": 256,
                "precision": "bf16",
                "accumulation": 4,
                "clip_norm": 1.0,
                "seed": 3,
                "budget": "1m",
            },
            ["gpt-nano-ddp-bucket-mb-1.0-g256-b2-111ddc9d2004a907"],
        ),
        (
            {
                "workload": "resnet50:px=160",
                "optimizer": "sgd:momentum=0.0:lr=1",
                "strategy": "ddp",
                "gpus": 8,
                "device": "cuda",
                "memory_format": "channels_last",
                "compile": True,
                "activation_checkpointing": True,
            },
            ["resnet50-px-160-ddp-g008-b8-6dbfcd34e1679c7e"],
        ),
    ],
)
def test_the_ids_of_old_studies_stay(options, ids) -> None:
    assert [cell.id for cell in plan_of(batch_size=8, **options).cells] == ids


@pytest.mark.parametrize(
    ("options", "prefix", "text"),
    [
        (
            {"workload": "mlp", "gpus": 1, "strategy": "single", "batch_size": 8, "optimizer": "adamw"},
            "mlp-single-g001-b8",
            '{"backend":"gloo","dataset":"synthetic","device":"cpu","gpus":1,"micro_batch":8,'
            '"optimizer":"adamw","strategy":"single","workload":"mlp"}',
        ),
        (
            {
                "workload": "mlp",
                "gpus": 2,
                "strategy": "ddp",
                "batch_size": 8,
                "optimizer": "adamw",
                "accumulation": 4,
                "clip_norm": 1,
                "precision": "bf16",
                "budget": "1m",
            },
            "mlp-ddp-g002-b2",
            '{"accumulation":4,"backend":"gloo","clip_norm":1.0,"dataset":"synthetic","device":"cpu","gpus":2,'
            '"micro_batch":2,"optimizer":"adamw","precision":"bf16","steps":{"budget_s":60.0},'
            '"strategy":"ddp","workload":"mlp"}',
        ),
    ],
)
def test_an_id_is_the_hash_of_the_fields_that_are_not_default(options, prefix, text) -> None:
    (cell,) = plan_of(**options).cells
    assert cell.id == f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def test_a_default_that_is_written_out_does_not_rename_a_cell() -> None:
    call = {"workload": "mlp", "gpus": 1, "strategy": "single", "batch_size": 8}
    spelled = {"target": float("0.02"), "budget": "20s", "quads": 5, "seed": 0, "precision": "fp32"}
    assert plan_of(**call).cells[0].id == plan_of(**call, **spelled).cells[0].id
