"""Files of projections of every version read to the same objects for ever."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from golden_laws import GoldenLaws

from harness.features.project.records import (
    PROJECTION,
    Lift,
    ProjectedSeries,
    ProjectedSize,
    Projection,
    Refusal,
    Span,
)

PROJECTED = Projection(
    digest="00aa",
    to=64,
    command="bench project runs/s --to 64",
    network="network.json of 2026-01-02",
    what_if=("inter_node_gbps=800",),
    series=(
        ProjectedSeries(
            workload="gpt-nano",
            label="ddp",
            kind="weak",
            batch=8,
            setting="",
            law="constant efficiency",
            skill=0.5,
            against="single on 1",
            sizes=(
                ProjectedSize(
                    gpus=32,
                    basis="projected",
                    step_ns=Span(value=2.0, low=1.0, high=3.0),
                    efficiency=Span(value=0.9),
                    samples_per_s=Span(value=5.0),
                    epoch_ns=Span(value=6.0),
                    usd_per_epoch=Span(value=7.0),
                    memory_bytes=8,
                    loss="exposed transfer",
                ),
                ProjectedSize(
                    gpus=64,
                    basis="refused",
                    refusal=Refusal(
                        kind="too far",
                        reason="more than 8 times",
                        lift=Lift(command="bench matrix", what="16 as well", gpu_hours=0.5, usd=1.5),
                    ),
                ),
            ),
            advice="16 GPUs measured; 32 projected, verify by",
            verify="bench matrix --gpus 32",
        ),
    ),
)


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    expected: ClassVar = {"projection-1": (PROJECTION, PROJECTED)}
