from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
from builders import a_cell, a_request, plan_of, request_of

from harness.plan.expand import expand
from harness.plan.points import points
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Devices, Limit
from results.errors import UsageError
from results.plan import Pattern, Plan, Request
from strategies.refusal import refusal
from workloads.catalog import MEMBERS

Row = tuple[object, ...]

SINGLE, DDP = (str(refusal(a_cell(**one))) for one in ({"strategy": "single"}, {"gpus": 1}))


def rows(plan: Plan) -> list[Row]:
    """Each series as (kind, strategy, batch size, global batch, [(gpus, micro-batch), ...])."""
    cells = {cell.id: cell for cell in plan.cells}
    return [
        (s.kind, s.strategy, s.batch_size, s.global_batch,
         [(cells[id].gpus, cells[id].micro_batch) for id in s.cells])
        for s in plan.series
    ]  # fmt: skip


def skipped(plan: Plan) -> list[Row]:
    return [(s.scaling, s.strategy, s.batch_size, s.gpus, s.reason) for s in plan.skips]


def test_the_example_of_the_readme_expands_as_by_hand() -> None:
    """Weak keeps the micro-batch; strong keeps 8 x 2 = 16 and 16 x 2 = 32 samples over all replicas."""
    plan = plan_of(
        workload="resnet18,gpt-nano",
        gpus="1..2",
        strategy="single,ddp",
        batch_size="8,16",
        scaling="weak,strong",
    )
    one_workload: list[Row] = [
        ("weak", "single", 8, None, [(1, 8)]),
        ("weak", "single", 16, None, [(1, 16)]),
        ("strong", "single", 8, 16, [(1, 16)]),
        ("strong", "single", 16, 32, [(1, 32)]),
        ("weak", "ddp", 8, None, [(2, 8)]),
        ("weak", "ddp", 16, None, [(2, 16)]),
        ("strong", "ddp", 8, 16, [(2, 8)]),
        ("strong", "ddp", 16, 32, [(2, 16)]),
    ]
    assert rows(plan) == one_workload * 2
    assert [s.workload for s in plan.series] == ["resnet18"] * 8 + ["gpt-nano"] * 8
    # single at 8, 16, 32 and ddp at 8, 16: strong shares three of them with weak.
    assert [(c.workload, c.strategy, c.gpus, c.micro_batch) for c in plan.cells] == [
        (workload, *cell)
        for workload in ("resnet18", "gpt-nano")
        for cell in [("single", 1, 8), ("single", 1, 16), ("single", 1, 32), ("ddp", 2, 8), ("ddp", 2, 16)]
    ]
    one_skips: list[Row] = [
        *[(kind, "single", batch, 2, SINGLE) for kind in ("weak", "strong") for batch in (8, 16)],
        *[(kind, "ddp", batch, 1, DDP) for kind in ("weak", "strong") for batch in (8, 16)],
    ]
    assert skipped(plan) == one_skips * 2
    assert {(s.reason, s.predicate) for s in plan.skips} == {(SINGLE, SINGLE[7:]), (DDP, DDP[4:])}


@pytest.mark.parametrize(
    ("options", "planned", "reasons"),
    [
        # Accumulation divides the batch of a replica.
        (
            {"gpus": 2, "batch_size": "8,10", "accumulation": 4},
            [("weak", "ddp", 8, None, [(2, 2)])],
            [("batch", "10 samples of a replica do not divide into 4 equal micro-batches (accumulation 4)")],
        ),
        (
            {"gpus": "2,3,4", "batch_size": 8, "scaling": "strong"},
            [("strong", "ddp", 8, 32, [(2, 16), (4, 8)])],
            [("batch", "a global batch of 32 samples does not divide over 3 replicas")],
        ),
        # 3 x 4 = 12 samples: 12 / (2 x 2) = 3 each; 12 / (4 x 2) is 1.5.
        (
            {"gpus": "2,4", "batch_size": 3, "scaling": "strong", "accumulation": 2},
            [("strong", "ddp", 3, 12, [(2, 3)])],
            [("batch", "a global batch of 12 samples does not divide over 4 replicas x 2 micro-batches")],
        ),
        # A named global batch is an axis of the strong series alone.
        (
            {"gpus": "2,4", "batch_size": 8, "global_batch_size": "16,64", "scaling": "weak,strong"},
            [
                ("weak", "ddp", 8, None, [(2, 8), (4, 8)]),
                ("strong", "ddp", 16, 16, [(2, 8), (4, 4)]),
                ("strong", "ddp", 64, 64, [(2, 32), (4, 16)]),
            ],
            [],
        ),
        # Workers that do not fill nodes.
        (
            {"gpus": "2,3,4", "batch_size": 8, "gpus_per_node": 2},
            [("weak", "ddp", 8, None, [(2, 8), (4, 8)])],
            [("nodes", "3 workers do not fill whole nodes of 2")],
        ),
    ],
)
def test_batches_and_workers_divide_or_are_skipped_with_the_numbers(options, planned, reasons) -> None:
    plan = plan_of(workload="mlp", strategy="ddp", **options)
    assert rows(plan) == planned
    assert [(skip.rule, skip.reason) for skip in plan.skips] == reasons


def test_a_larger_matrix_later_keeps_the_global_batch_of_the_first_plan() -> None:
    call = {"workload": "mlp", "strategy": "ddp", "scaling": "strong"}
    first = plan_of(gpus="1..2", batch_size=8, **call)
    second = plan_of(gpus="1..4", batch_size=8, earlier=(first,), **call)
    third = plan_of(gpus="1..8", batch_size="8,4", earlier=(first, second), **call)
    assert rows(first) == [("strong", "ddp", 8, 16, [(2, 8)])]
    assert rows(second) == [("strong", "ddp", 8, 16, [(2, 8), (4, 4)])]
    assert rows(third) == [
        ("strong", "ddp", 8, 16, [(2, 8), (4, 4), (8, 2)]),
        ("strong", "ddp", 4, 32, [(2, 16), (4, 8), (8, 4)]),
    ]
    assert first.cells[0] in second.cells


def test_a_global_batch_once_named_does_not_fix_another_batch_size() -> None:
    call = {"workload": "mlp", "strategy": "ddp", "scaling": "strong", "gpus": "1..2"}
    first = plan_of(global_batch_size=8, **call)
    second = plan_of(batch_size=8, earlier=(first,), **call)
    assert rows(first) == [("strong", "ddp", 8, 8, [(2, 4)])]
    assert rows(second) == [("strong", "ddp", 8, 16, [(2, 8)])]


def test_without_a_batch_size_each_workload_has_its_own() -> None:
    plan = plan_of(workload="gpt-nano,mlp", gpus=1, strategy="single")
    own = {name: MEMBERS[name].batch for name in ("gpt-nano", "mlp")}
    assert own["gpt-nano"] != own["mlp"]
    assert {c.workload: c.micro_batch for c in plan.cells} == own


def test_cells_beyond_the_machine_are_skipped_with_a_hint() -> None:
    limit = Limit(devices=2, word="cores", hint="--oversubscribe runs them emulated")
    plan = plan_of(workload="mlp", gpus="1..8", strategy="single,ddp", batch_size=8, limit=limit)
    assert rows(plan) == [("weak", "single", 8, None, [(1, 8)]), ("weak", "ddp", 8, None, [(2, 8)])]
    reasons = {(s.strategy, s.gpus): s.reason for s in plan.skips}
    assert reasons["ddp", 4] == "needs 4, this machine has 2 cores; --oversubscribe runs them emulated"
    assert reasons["single", 4] == SINGLE
    rules = {(s.strategy, s.gpus): s.rule for s in plan.skips}
    assert (rules["ddp", 4], rules["single", 4], rules["ddp", 1]) == ("machine", "strategy", "strategy")


def test_one_core_is_not_called_cores() -> None:
    limit = Limit(devices=1, word="cores", hint="h")
    assert limit.reason(1) is None
    assert limit.reason(2) == "needs 2, this machine has 1 core; h"


A100 = Limit(gpus=Devices(gpu_name="A100-SXM4-80GB"))
LLAMA: dict[str, Any] = {
    "workload": "llama-7b",
    "strategy": "single,ddp,fsdp",
    "device": "cuda",
    "backend": "nccl",
}


def test_a_cell_that_certainly_does_not_fit_into_a_gpu_is_skipped() -> None:
    """6,738,415,616 parameters of 4 bytes, five times in ddp (128,525 MiB) and four times on one device. What
    is offered in its place fits."""
    plan = plan_of(**LLAMA, gpus="1,8", limit=A100)
    assert [(cell.strategy, cell.gpus) for cell in plan.cells] == [("fsdp", 8)]
    alone, replicas = (skip.reason for skip in plan.skips if skip.rule == "memory")
    assert "llama-7b with single needs at least 102,820 MiB of a GPU's 81,920" in alone
    assert "llama-7b with ddp needs at least 128,525 MiB of a GPU's 81,920" in replicas
    assert "--strategy tp --gpus 2 fits" in alone
    assert "--strategy fsdp --gpus 8 fits" in replicas
    # Cells that are planned already stay, and where nothing is known of the GPUs nothing is left out.
    free = plan_of(**LLAMA, gpus="1,8")
    assert len(free.cells) == 3
    assert plan_of(**LLAMA, gpus="1,8", limit=A100, earlier=(free,)).cells == free.cells
    assert plan_of(**LLAMA, gpus="1,8", limit=Limit(gpus=Devices())).cells == free.cells


def axes(plan: Plan) -> list[Row]:
    """Each series as (strategy, compression, collective, link, sizes)."""
    cells = {cell.id: cell for cell in plan.cells}
    return [
        (s.strategy, s.compression, s.collective, s.link, [cells[id].gpus for id in s.cells])
        for s in plan.series
    ]


def test_collectives_and_links_multiply_the_matrix_and_single_stands_outside() -> None:
    plan = plan_of(
        workload="mlp", gpus="1,2", batch_size=8, compression="none,bf16", collective="default,ring",
        link="none,1gbit",
    )  # fmt: skip
    assert axes(plan) == [
        ("single", "none", "default", "none", [1]),
        ("ddp", "none", "default", "none", [2]),
        ("ddp", "none", "default", "1gbit", [2]),
        ("ddp", "none", "ring", "none", [2]),
        ("ddp", "none", "ring", "1gbit", [2]),
        ("ddp", "bf16", "default", "none", [2]),
        ("ddp", "bf16", "default", "1gbit", [2]),
        ("ddp", "bf16", "ring", "none", [2]),
        ("ddp", "bf16", "ring", "1gbit", [2]),
    ]
    by_axes = {(s.strategy, s.compression, s.collective, s.link, s.gpus): s.reason for s in plan.skips}
    # Two strategies x 8 ways x 2 sizes, less the 9 cells.
    assert len(by_axes) == len(plan.skips) == 32 - 9
    alone = "single needs --compression none and --collective default, not"
    nothing = "one device exchanges nothing"
    assert by_axes["single", "none", "default", "1gbit", 1] == "single has no network"
    assert by_axes["single", "bf16", "default", "none", 1] == f"{alone} bf16 and default: {nothing}"
    assert by_axes["single", "none", "ring", "none", 1] == f"{alone} none and ring: {nothing}"
    assert by_axes["single", "none", "default", "1gbit", 2] == SINGLE


def test_cells_carry_their_collective_their_link_and_the_nodes() -> None:
    plan = plan_of(
        workload="mlp", gpus=4, strategy="ddp", batch_size=8, collective="ring", link="none,2.5gbit",
        node_size=2,
    )  # fmt: skip
    assert [(cell.collective, cell.node_size, cell.link_mbit_per_s) for cell in plan.cells] == [
        ("ring", 2, None),
        ("ring", 2, 2500.0),
    ]
    assert plan.virtual_cells == {cell.id for cell in plan.cells}


def test_a_link_goes_between_whole_virtual_nodes() -> None:
    plan = plan_of(workload="mlp", gpus="2,3,4,6", strategy="ddp", batch_size=8, link="1gbit", node_size=2)
    assert axes(plan) == [("ddp", "none", "default", "1gbit", [4, 6])]
    assert [(s.gpus, s.reason) for s in plan.skips] == [
        (2, "2 ranks are on one virtual node of 2: nothing goes over its link"),
        (3, "3 workers do not fill whole virtual nodes of 2"),
    ]


def test_a_link_is_for_cpu_ranks_and_the_cores_limit_it_like_any_cell() -> None:
    call = {"workload": "mlp", "gpus": "2,4", "strategy": "ddp", "batch_size": 8, "link": "none,1gbit"}
    cuda = plan_of(device="cuda", **call)
    assert [(s.link, s.gpus, s.reason) for s in cuda.skips] == [
        ("1gbit", 2, "a link is emulated only for CPU ranks"),
        ("1gbit", 4, "a link is emulated only for CPU ranks"),
    ]
    few = plan_of(limit=Limit(devices=2, word="cores", hint="h"), **call)
    assert axes(few) == [("ddp", "none", "default", "none", [2]), ("ddp", "none", "default", "1gbit", [2])]


def test_a_known_gpu_without_products_in_float8_is_a_skip() -> None:
    call = {"workload": "gpt-nano", "gpus": "1", "strategy": "single", "precision": "float8"}
    for name, reason in (
        ("NVIDIA A100-SXM4-80GB", "use --precision bf16"),
        ("NVIDIA L4", None),
        (None, None),
    ):
        plan = plan_of(device="cuda", **call, limit=Limit(gpus=Devices(gpu_name=name)))
        assert [skip.reason for skip in plan.skips] == (
            [f"{name} has no products in float8; {reason}"] if reason else []
        )
    assert plan_of(**call, limit=Limit(gpus=Devices(gpu_name="NVIDIA A100-SXM4-80GB"))).cells


def test_where_no_link_can_be_made_cells_under_one_are_skipped_with_the_reason() -> None:
    request = request_of(workload="mlp", gpus="1,2", batch_size=8, link="none,1gbit")
    plan = expand(request, study="s", created_at="t", limit=Limit(link="tc is not installed"))
    assert axes(plan) == [("single", "none", "default", "none", [1]), ("ddp", "none", "default", "none", [2])]
    reasons = {(s.strategy, s.gpus): s.reason for s in plan.skips if s.link == "1gbit"}
    assert reasons["ddp", 2] == "tc is not installed"
    # What makes no sense anywhere says so first.
    assert reasons["single", 1] == "single has no network"


def test_a_data_set_that_fits_one_workload_skips_the_other() -> None:
    plan = plan_of(workload="mlp,gpt-nano", gpus=1, strategy="single", dataset="digits")
    assert [c.workload for c in plan.cells] == ["mlp"]
    assert [(s.workload, s.reason) for s in plan.skips] == [
        ("gpt-nano", "gpt-nano does not take digits; it takes synthetic, text")
    ]


def test_an_excluded_point_is_a_skip_that_says_so() -> None:
    plan = plan_of(
        workload="mlp",
        gpus="2,4",
        strategy="ddp",
        batch_size="8,16",
        exclude=[Pattern(gpus=4, batch_size=16)],
    )
    assert rows(plan) == [("weak", "ddp", 8, None, [(2, 8), (4, 8)]), ("weak", "ddp", 16, None, [(2, 16)])]
    assert skipped(plan) == [("weak", "ddp", 16, 4, "excluded by the study file: gpus 4, batch_size 16")]


def test_an_included_point_joins_its_series_and_is_never_excluded() -> None:
    plan = plan_of(
        workload="mlp",
        gpus="2,4",
        strategy="ddp",
        batch_size=8,
        exclude=[Pattern(gpus=4)],
        include=[
            Pattern(workload="mlp", strategy="ddp", gpus=3, batch_size=8),
            Pattern(workload="mlp", strategy="ddp", gpus=4, batch_size=8),
            Pattern(workload="gpt-nano", strategy="single", gpus=1, batch_size=2, scaling="strong"),
        ],
    )
    # The strong global batch of gpt-nano: 2 x 4, the largest count of the axis.
    assert rows(plan) == [
        ("weak", "ddp", 8, None, [(2, 8), (3, 8), (4, 8)]),
        ("strong", "single", 2, 8, [(1, 8)]),
    ]
    assert plan.skips == ()


def test_a_matrix_beyond_reason_is_refused_before_it_grows() -> None:
    with pytest.raises(UsageError, match=r"^the matrix has 1000000 points, at most 200000 are planned"):
        plan_of(workload="mlp", gpus="1..500000:1", strategy="single,ddp")


def test_the_source_of_an_own_model_is_part_of_the_cell(tmp_path) -> None:
    model = tmp_path / "mine.py"
    model.write_text("def build():\n    return 1\n")
    call = {"workload": "py:mine:build", "gpus": 1, "strategy": "single", "batch_size": 2}
    before = plan_of(**call).cells[0]
    again = plan_of(**call).cells[0]
    model.write_text("def build():\n    return 2\n")
    after = plan_of(**call).cells[0]
    assert before.source_hash is not None
    assert before.id == again.id
    assert before.id != after.id


def test_the_bytes_of_an_own_text_are_part_of_the_cell(tmp_path) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"to be or not to be")
    plan = plan_of(workload="gpt-nano", gpus=1, strategy="single", dataset="text:corpus.txt")
    assert plan.cells[0].dataset_hash == hashlib.sha256(b"to be or not to be").hexdigest()[:16]
    assert plan.cells[0].dataset == "text:corpus.txt"


def test_a_text_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"none\.txt: No such file"):
        plan_of(workload="gpt-nano", gpus=1, strategy="single", dataset="text:none.txt")


def test_what_holds_for_all_cells_reaches_each() -> None:
    plan = plan_of(
        workload="mlp",
        gpus="1..2",
        strategy="single,ddp",
        precision="bf16",
        clip_norm=1.0,
        seed=7,
        optimizer="adamw",
        selective_checkpointing=True,
        memory_limit_mb=64,
        compile=True,
        quads=2,
    )
    assert len(plan.cells) == 2
    for cell in plan.cells:
        assert (cell.precision, cell.clip_norm, cell.seed) == ("bf16", 1.0, 7)
        assert (cell.optimizer, cell.steps.quads) == ("adamw", 2)
        assert (cell.activation_checkpointing, cell.memory_limit_mb, cell.compile) == ("selective", 64, True)


@pytest.mark.parametrize(
    ("strategy", "gpus", "weak", "strong"),
    [
        # Eight samples a replica and 8 x 4 = 32 over all: micro-batch and global batch by hand.
        ("ddp", 4, (8, 32), (8, 32)),
        ("fsdp:tp=2", 4, (8, 16), (16, 32)),
        ("tp", 4, (8, 8), (32, 32)),
        ("pipeline:1f1b", 4, (8, 8), (32, 32)),
        ("pipeline:1f1b:dp=2", 4, (8, 16), (16, 32)),
    ],
)
def test_ranks_of_one_replica_see_the_same_samples(strategy, gpus, weak, strong) -> None:
    plan = plan_of(workload="gpt-nano", gpus="2,4", strategy=strategy, batch_size=8, scaling="weak,strong")
    cells = {cell.id: cell for cell in plan.cells if cell.gpus == gpus}
    found = {
        series.kind: (cells[id].micro_batch, cells[id].global_batch)
        for series in plan.series
        for id in series.cells
        if id in cells
    }
    assert found == {"weak": weak, "strong": strong}


def test_accumulation_and_split_replicas_both_divide_a_global_batch() -> None:
    options = {"workload": "gpt-nano", "strategy": "fsdp:tp=2", "accumulation": 2}
    (cell,) = plan_of(gpus=8, batch_size=4, scaling="strong", **options).cells
    # 4 x 8 = 32 samples over 8 / 2 = 4 replicas of 2 micro-batches each: 4 at once.
    assert (cell.model_parallel, cell.replicas, cell.micro_batch, cell.global_batch) == (2, 4, 4, 32)


def test_ranks_that_cannot_be_grouped_or_split_are_skipped_with_the_reason() -> None:
    plan = plan_of(workload="gpt-nano", gpus="3,8", strategy="fsdp:tp=2,tp", batch_size=8)
    assert [cell.strategy for cell in plan.cells] == ["fsdp:tp=2"]
    assert [(skip.strategy, skip.gpus, skip.reason) for skip in plan.skips] == [
        ("fsdp:tp=2", 3, "fsdp:tp=2 needs a multiple of 2 ranks, not 3 (the nearest: 2 and 4)"),
        ("tp", 3, "4 attention heads of gpt-nano do not divide by 3"),
        ("tp", 8, "4 attention heads of gpt-nano do not divide by 8"),
    ]


def test_two_kinds_of_checkpointing_at_once_are_refused() -> None:
    for given in (True, False):
        with pytest.raises(UsageError, match="give only one of the two"):
            plan_of(workload="gpt-nano", gpus=2, activation_checkpointing=given, selective_checkpointing=True)


def test_size_1_is_planned_as_single_for_strategies_that_need_more() -> None:
    """Once for each batch and kind of scaling of a workload that has larger cells."""
    request = Request(
        workloads=("mlp",), gpus=(1, 2, 3), strategies=("ddp", "fsdp"), compressions=("none", "topk:0.1"),
        batch_sizes=(8, 16), scalings=("weak", "strong"),
    )  # fmt: skip
    plan = expand(request, study="s", created_at="", baseline=True)
    single = [row for row in rows(plan) if row[1] == "single"]
    # The strong ones keep 8 x 3 and 16 x 3 samples.
    assert single == [
        ("weak", "single", 8, None, [(1, 8)]),
        ("weak", "single", 16, None, [(1, 16)]),
        ("strong", "single", 8, 24, [(1, 24)]),
        ("strong", "single", 16, 48, [(1, 48)]),
    ]
    # The request says all that the plan has, and gives it again.
    assert expand(plan.request, study="s", created_at="") == plan
    assert expand(request, study="s", created_at="", baseline=True) == plan


@pytest.mark.parametrize(
    "asked",
    [
        {"gpus": (2, 3)},
        {"gpus": (1,)},
        {"strategies": ("single", "ddp")},
        {"strategies": ("auto", "ddp")},
        {"exclude": (Pattern(gpus=1),)},
        {"include": (Pattern(workload="mlp", strategy="single", gpus=1, batch_size=4),)},
    ],
)
def test_no_baseline_is_planned_that_is_not_lacking(asked) -> None:
    request = Request(**{"workloads": ("mlp",), "gpus": (1, 2), "strategies": ("ddp",), **asked})
    plan = expand(request, study="s", created_at="", baseline=True)
    assert plan == expand(request, study="s", created_at="")


def test_an_exclude_that_no_point_has_is_refused_with_what_there_is() -> None:
    options = StudyFile(workload="mlp", gpus="1,2", device="cpu", exclude=[Pattern(workload="resnet101")])
    request = a_request(options)
    with pytest.raises(UsageError, match=r"exclude\[0\]: no point .* workload resnet101; it has mlp"):
        list(points(request))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Pattern(collective="tree"), "no point of the matrix has collective tree; it has default, ring"),
        (Pattern(link="100mbit"), "link 100mbit; it has none, 1gbit"),
    ],
)
def test_collectives_and_links_can_be_excluded_where_they_are(pattern, message) -> None:
    options = StudyFile(gpus=2, device="cpu", collective="default,ring", link="none,1gbit", exclude=[pattern])
    request = a_request(options)
    with pytest.raises(UsageError, match=re.escape(message)):
        list(points(request))


def test_an_included_point_is_plain_unless_it_says_otherwise() -> None:
    base = {"workload": "mlp", "strategy": "ddp", "gpus": 3, "batch_size": 8}
    include = [Pattern(**base), Pattern(**base, collective="ring", link="1gbit", compression="bf16")]
    options = StudyFile(workload="mlp", gpus=2, strategy="ddp", batch_size=8, device="cpu", include=include)
    request = a_request(options)
    found = [point for point, _ in points(request) if point.gpus == 3]
    assert [(point.compression, point.collective, point.link) for point in found] == [
        ("none", "default", "none"),
        ("bf16", "ring", "1gbit"),
    ]
