"""The strategy `auto`: what it chooses, and that its arithmetic is that of the closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harness.plan import expand as expanding
from harness.plan.auto import COLUMNS, MIB, Choice, rows
from harness.plan.expand import choices
from harness.plan.predict import RESERVE_BYTES, SHARE, Devices, Surroundings
from results.cell import Cell
from results.errors import SpecError
from results.plan import Pattern, Plan
from strategies.catalog import group_layout
from strategies.footprint import footprint
from strategies.traffic import traffic
from workloads.activations import model_parts
from workloads.catalog import WORKLOADS

MakePlan = Callable[..., Plan]

HOST = Devices(cores=8, host_bytes=64 * 2**30)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 8 cores and 64 GiB, whatever this one is."""
    monkeypatch.setattr(expanding, "devices_here", lambda: HOST)


@pytest.fixture
def chosen(plan_of: MakePlan) -> Callable[..., list[str]]:
    def choose(**options: Any) -> list[str]:
        plan = plan_of(strategy="auto", **options)
        assert not plan.skips, plan.skips
        return [cell.strategy for cell in plan.cells]

    return choose


def weighed(plan: Plan) -> Choice:
    [(_, choice)] = choices(plan)
    return choice


def test_on_one_device_there_is_single_alone(chosen: Callable[..., list[str]]) -> None:
    assert chosen(workload="gpt-nano", gpus=1) == ["single"]


def test_replicas_where_they_fit(chosen: Callable[..., list[str]]) -> None:
    assert chosen(workload="gpt-nano", gpus="2,4") == ["ddp", "ddp"]


def test_shards_where_replicas_do_not_fit(plan_of: MakePlan) -> None:
    """GPT-2 small has 124,439,808 parameters, of which ddp has four: AdamW's two and the buckets.

    8 samples of T = 128: of a block 16 T d + T (h + 4) values, of the head T V + 2 T d + 2 T, and twice T V.
    """
    plan = plan_of(workload="gpt2-small:seq=128", gpus=4, strategy="auto", batch_size=8, memory_limit_mb=2000)
    [cell] = plan.cells
    assert cell.strategy.startswith(("fsdp", "scratch-fsdp"))
    t, d, v = 128, 768, 50257
    kept = 12 * (16 * t * d + 16 * t) + 3 * t * v + 2 * t * d + 2 * t
    need = round(4 * (4 * 124_439_808 + 8 * kept) / MIB)
    assert weighed(plan).reason == f"because ddp needs {need:,} MiB of 2,000"


def test_a_fast_link_gets_replicas_and_a_slow_one_stays_inside(plan_of: MakePlan) -> None:
    """On 8 in nodes of 4, with gradients of 475 MiB over 100 Mbit/s: sums of shards alone cross, or nothing
    but activations."""
    options = {
        "workload": "gpt2-small:seq=64",
        "gpus": 8,
        "strategy": "auto",
        "batch_size": 8,
        "node_size": 4,
    }
    slow = weighed(plan_of(link="100mbit", **options))
    by_name = {candidate.strategy: candidate for candidate in slow.candidates}
    assert "tp" not in by_name
    assert slow.chosen is not None
    assert slow.chosen.strategy.startswith(("hsdp", "pipeline"))
    assert by_name["hsdp"].sample_s < by_name["fsdp"].sample_s
    assert by_name["fsdp"].times.exposed > 10 * by_name["pipeline:1f1b:microbatches=8"].times.exposed
    fast = weighed(plan_of(link="100gbit", **options))
    assert fast.chosen is not None
    assert fast.chosen.strategy in ("ddp", "scratch-fsdp:stage=1")


def test_tensor_parallelism_stays_inside_a_node(plan_of: MakePlan) -> None:
    inside = weighed(plan_of(workload="gpt-nano", gpus=4, strategy="auto"))
    across = weighed(plan_of(workload="gpt-nano", gpus=4, strategy="auto", node_size=2))
    assert "tp" in [candidate.strategy for candidate in inside.candidates]
    assert "tp" not in [candidate.strategy for candidate in across.candidates]
    assert "fsdp:tp=2" in [candidate.strategy for candidate in across.candidates]
    assert "fsdp:tp=4" not in [name for name, _ in across.refused]


def test_nothing_fits_names_the_nearest_and_what_helps(plan_of: MakePlan) -> None:
    plan = plan_of(workload="gpt2-small", gpus=2, strategy="auto", batch_size=2, memory_limit_mb=100)
    [skip] = plan.skips
    assert plan.cells == ()
    assert skip.strategy == "auto"
    choice = weighed(plan)
    nearest = min(choice.candidates, key=lambda candidate: candidate.memory.total)
    needs = f"{nearest.memory.total / MIB:,.0f}"
    assert skip.reason.startswith(
        f"auto: nothing fits: the nearest, {nearest.strategy} needs {needs} MiB, and 31 of 100 may be planned"
    )
    assert "--activation-checkpointing" in skip.reason
    lighter = msgspec.structs.replace(nearest.cell, activation_checkpointing=True)
    parts = model_parts(WORKLOADS.parse("gpt2-small"))
    assert parts is not None
    assert footprint(lighter, parts).total > choice.around.room


def test_checkpointing_that_would_fit_is_said_so(plan_of: MakePlan) -> None:
    options = {"workload": "gpt2-small", "gpus": 2, "strategy": "auto", "batch_size": 2}
    [skip] = plan_of(memory_limit_mb=2600, **options).skips
    assert "with --activation-checkpointing" in skip.reason
    assert skip.reason.endswith("which fits")
    assert not plan_of(memory_limit_mb=2600, activation_checkpointing=True, **options).skips


def test_a_models_own_code_alone_knows_its_measures(plan_of: MakePlan, tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text("def build(): ...\n", encoding="utf-8")
    [skip] = plan_of(workload="py:mine:build", gpus=2, strategy="auto").skips
    assert skip.reason == "auto knows no measures of py:mine:build, whose own code has them: name a strategy"


def test_compressed_gradients_are_not_weighed(plan_of: MakePlan) -> None:
    [skip] = plan_of(workload="gpt-nano", gpus=2, strategy="auto", compression="bf16").skips
    assert skip.reason.startswith("auto weighs gradients that are exchanged as they are")


def test_what_is_chosen_joins_the_series_of_its_strategy(plan_of: MakePlan) -> None:
    """Cells and series are as if it had been named, and none is there twice."""
    named = plan_of(workload="gpt-nano", gpus="1,2,4", strategy="single,ddp")
    both = plan_of(workload="gpt-nano", gpus="1,2,4", strategy="single,ddp,auto")
    alone = plan_of(workload="gpt-nano", gpus="1,2,4", strategy="auto")
    assert {cell.id for cell in both.cells} == {cell.id for cell in named.cells}
    assert (both.series, both.skips) == (named.series, named.skips)
    assert {cell.id for cell in alone.cells} == {cell.id for cell in named.cells}
    assert not any("auto" in cell.strategy for cell in both.cells)


def test_the_choice_is_the_same_every_time(plan_of: MakePlan) -> None:
    options = {"workload": "gpt-nano,resnet18-32px", "gpus": "2,4", "strategy": "auto"}
    assert plan_of(**options).cells == plan_of(**options).cells
    assert [c.reason for _, c in choices(plan_of(**options))] == [
        c.reason for _, c in choices(plan_of(**options))
    ]


def test_strong_scaling_is_weighed_with_its_own_batches(plan_of: MakePlan) -> None:
    plan = plan_of(workload="gpt-nano", gpus="2,4", strategy="auto", batch_size=8, scaling="strong")
    assert [(cell.strategy, cell.micro_batch) for cell in plan.cells] == [("ddp", 16), ("ddp", 8)]
    assert [choice.chosen.cell for _, choice in choices(plan) if choice.chosen] == list(plan.cells)


def test_an_excluded_point_is_not_chosen_for(plan_of: MakePlan) -> None:
    plan = plan_of(workload="gpt-nano", gpus="2,4", strategy="auto", exclude=[Pattern(gpus=4)])
    assert [cell.gpus for cell in plan.cells] == [2]
    assert len(choices(plan)) == 1


def test_the_explanation_has_the_numbers_of_the_closed_forms(plan_of: MakePlan) -> None:
    choice = weighed(plan_of(workload="llama-nano", gpus=4, strategy="auto", batch_size=8))
    parts = model_parts(WORKLOADS.parse("llama-nano"))
    assert parts is not None
    told = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows(choice)}
    for candidate in choice.candidates:
        row, memory = told[candidate.strategy], footprint(candidate.cell, parts)
        sent = sum(term.wire_bytes for term in traffic(candidate.cell, parts))
        assert row["MiB"] == f"{memory.total / MIB:,.0f}"
        assert row["activations"] == f"{memory.activations / MIB:,.0f}"
        assert row["sent MiB"] == f"{sent / MIB:,.1f}"
    assert [row["verdict"] for row in told.values()].count("chosen") == 1
    assert told["single"]["verdict"] == "single runs on exactly 1"


def test_time_by_hand(plan_of: MakePlan) -> None:
    """ddp on 2, GPT nano, 4 samples at 50 GFLOP/s: 3 x 4 x forward FLOPs.

    L (24 T d^2 + 4 T^2 d) + 2 T d V = 4 (25,165,824 + 2,097,152) + 4,194,304 = 113,246,208. Gradients of
    3,358,720 bytes take 1 x that at 1 GB/s and 2 operations of 0.2 ms, less than two thirds of the step.
    """
    choice = weighed(plan_of(workload="gpt-nano", gpus=2, strategy="auto", batch_size=4))
    ddp = choice.candidates[0]
    assert ddp.times.compute == pytest.approx(3 * 4 * 113_246_208 / 50e9)
    parts = model_parts(WORKLOADS.parse("gpt-nano"))
    assert parts is not None
    # AdamW: parameters and two values of state read and written, gradients read.
    assert ddp.times.update == pytest.approx(7 * 4 * parts.values / 10e9)
    assert (ddp.times.exposed, ddp.times.bubble) == (0, 0)
    pipeline = next(c for c in choice.candidates if c.strategy == "pipeline:1f1b")
    assert pipeline.times.bubble == pytest.approx(pipeline.times.compute / 4)


def test_gradients_hide_behind_the_last_micro_batch_alone(plan_of: MakePlan) -> None:
    """ddp over 100 Mbit/s: 1 x the gradients' bytes at 12.5 MB/s and 2 operations of 0.2 ms, less two thirds
    of the computation, of half of it with two micro-batches."""
    parts = model_parts(WORKLOADS.parse("gpt-nano"))
    assert parts is not None
    sent = 4 * parts.values / 12.5e6 + 2 * 200e-6
    for accumulation in (1, 2):
        plan = plan_of(
            workload="gpt-nano",
            gpus=2,
            strategy="auto",
            link="100mbit",
            batch_size=8,
            accumulation=accumulation,
        )
        ddp = weighed(plan).candidates[0]
        hidden = 2 / 3 * ddp.times.compute / accumulation
        assert ddp.times.exposed == pytest.approx(sent - hidden)


@pytest.mark.parametrize(("limit", "room"), [(1000, 950 - 64), (None, None)])
def test_a_margin_is_left(limit: int | None, room: int | None) -> None:
    cell = Cell(
        workload="gpt-nano", dataset="synthetic", strategy="ddp", gpus=4, micro_batch=4, device="cpu",
        backend="gloo", optimizer="adamw", memory_limit_mb=limit,
    )  # fmt: skip
    around = Surroundings.of(cell, HOST, None)
    if room is None:
        assert around.memory == 64 * 2**30 // 4
        assert around.room == int(SHARE * around.memory) - RESERVE_BYTES["cpu"]
    else:
        assert around.room == room * MIB


def test_a_gpu_is_known_by_its_name_or_assumed() -> None:
    cell = Cell(
        workload="llama-1b", dataset="synthetic", strategy="ddp", gpus=16, micro_batch=1, device="cuda",
        backend="nccl", optimizer="adamw", precision="bf16",
    )  # fmt: skip
    known = Surroundings.of(cell, Devices(gpu_name="NVIDIA H200", gpu_bytes=140 * 10**9), 8)
    assert (known.inside, known.across, known.memory) == (0.75 * 450e9, 17.5e9, 140 * 10**9)
    assert known.notes == ()
    unknown = Surroundings.of(cell, Devices(), 8)
    assert (unknown.inside, unknown.memory) == (0.75 * 300e9, 80 * 10**9)
    assert unknown.notes == ("assumed: the GPU is like an A100-SXM4-80GB",)


def test_auto_is_for_plans_alone() -> None:
    with pytest.raises(SpecError, match="auto is for a plan to choose"):
        group_layout("auto", 2)
