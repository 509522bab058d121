"""The strategy `auto`: what it chooses, and that its arithmetic follows the closed forms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil

import msgspec
import pytest
from builders import nano_cell, parts_of, plan_of, request_of
from packages import install

from harness.launchers.plan_text import CHOICE_COLUMNS, CHOICE_NUMERIC, choice_rows
from harness.plan.auto import Choice, StrategyCandidate, choose, lighter
from harness.plan.estimate import estimated_step_time
from harness.plan.expand import auto_choices, expand
from harness.plan.points import Reason
from harness.plan.surroundings import MIB, SHARE, Devices, Limit, Measured, Surroundings, local_work
from results.cell import Cell
from results.errors import SpecError
from results.extensions import forget_packages
from results.parts import Part
from results.plan import Pattern, Plan
from strategies.catalog import STRATEGIES, group_layout
from strategies.closed_form.moments import Footprint
from strategies.closed_form.replay import Work
from strategies.pipeline.facts import microbatch_counts
from strategies.predictions import footprint, traffic
from workloads.catalog import learn

pytestmark = pytest.mark.usefixtures("eight_cores")


def weighed(plan: Plan) -> Choice:
    [(_, choice)] = auto_choices(plan)
    return choice


def test_shards_where_replicas_do_not_fit() -> None:
    """GPT-2 small has 124,439,808 parameters, of which ddp has four: AdamW's two and the buckets.

    8 samples of T = 128: of a block 16 T d + T (h + 4) values, of the head T V + 2 T d + 2 T, and twice T V.
    """
    plan = plan_of(workload="gpt2-small:seq=128", gpus=4, strategy="auto", batch_size=8, memory_limit_mb=2000)
    [cell] = plan.cells
    assert cell.strategy.startswith(("fsdp", "scratch-fsdp"))
    t, d, v = 128, 768, 50257
    kept = 12 * (16 * t * d + 16 * t) + 3 * t * v + 2 * t * d + 2 * t
    need = round(4 * (4 * 124_439_808 + 8 * kept) / MIB)
    choice = weighed(plan)
    assert choice.candidates[0].memory.total == pytest.approx(need * MIB, abs=MIB)
    # 0.95 of 2000, less 64.
    assert choice.reason == f"because ddp needs {need:,} MiB of the 1,836 that may be planned"


def test_a_fast_link_gets_replicas_and_a_slow_one_stays_inside() -> None:
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
    assert slow.chosen.strategy.startswith(("hsdp", "pipeline"))
    assert by_name["hsdp"].sample_s < by_name["fsdp"].sample_s
    assert by_name["fsdp"].times.exposed > 10 * by_name["pipeline:1f1b:microbatches=8"].times.exposed
    fast = weighed(plan_of(link="100gbit", **options))
    assert fast.chosen.strategy in ("ddp", "scratch-fsdp:stage=1")


def test_tensor_parallelism_stays_inside_a_node() -> None:
    inside = weighed(plan_of(workload="gpt-nano", gpus=4, strategy="auto"))
    across = weighed(plan_of(workload="gpt-nano", gpus=4, strategy="auto", node_size=2))
    assert "tp" in [candidate.strategy for candidate in inside.candidates]
    assert "tp" not in [candidate.strategy for candidate in across.candidates]
    assert "fsdp:tp=2" in [candidate.strategy for candidate in across.candidates]
    assert "fsdp:tp=4" not in [name for name, _ in across.refused]


def test_nothing_fits_names_the_nearest_and_what_helps() -> None:
    plan = plan_of(workload="gpt2-small", gpus=2, strategy="auto", batch_size=2, memory_limit_mb=100)
    [skip] = plan.skips
    assert plan.cells == ()
    assert skip.strategy == "auto"
    choice = weighed(plan)
    nearest = min(choice.candidates, key=lambda candidate: candidate.memory.total)
    needs = f"{nearest.memory.total / MIB:,.0f}"
    assert skip.reason.startswith(
        f"auto: nothing fits: the nearest, {nearest.strategy} needs {needs} MiB of the 31 that may be planned"
    )
    assert "--activation-checkpointing" in skip.reason
    lighter = msgspec.structs.replace(nearest.cell, activation_checkpointing=True)
    parts = parts_of("gpt2-small")
    assert footprint(lighter, parts).total > choice.around.room


def test_checkpointing_that_would_fit_is_said_so() -> None:
    options = {"workload": "gpt2-small", "gpus": 2, "strategy": "auto", "batch_size": 2}
    [skip] = plan_of(memory_limit_mb=2000, **options).skips
    assert "with --activation-checkpointing" in skip.reason
    assert skip.reason.endswith("which fits")
    assert not plan_of(memory_limit_mb=2000, activation_checkpointing=True, **options).skips


def test_a_models_own_code_alone_knows_its_measures(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def build(): ...\n", encoding="utf-8")
    [skip] = plan_of(workload="py:mine:build", gpus=2, strategy="auto").skips
    assert skip.reason == (
        "auto: memory and traffic of py:mine:build are unknown, because planning does not run a user's own "
        "code; name a strategy"
    )


def test_replicas_fit_where_most_of_a_model_is_frozen(tmp_path, monkeypatch) -> None:
    """Parameters of 475 MiB, trained whole, are four times as much in ddp; with vectors alone trained it has
    them once."""
    monkeypatch.setattr("workloads.catalog._COUNTED", {})
    (tmp_path / "adapted.py").write_text("def build(): ...\n", encoding="utf-8")
    whole = parts_of("gpt2-small:seq=64")

    def adapted(part: Part) -> Part:
        weights = (replace(weight, trained=weight.columns == 1) for weight in part.weights)
        return replace(part, weights=tuple(weights))

    blocks = tuple(adapted(block) for block in whole.blocks)
    frozen = replace(whole, stem=adapted(whole.stem), blocks=blocks, head=adapted(whole.head))
    options = {"gpus": 4, "strategy": "auto", "batch_size": 1, "memory_limit_mb": 1000}
    chosen = []
    for parts in (whole, frozen):
        learn("py:adapted:build", parts, splits=None)
        chosen += [cell.strategy for cell in plan_of(workload="py:adapted:build", **options).cells]
    assert chosen[-1] == "ddp"
    assert chosen[:-1] != ["ddp"]


def test_without_flops_memory_is_predicted_and_time_is_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("workloads.catalog._COUNTED", {})
    (tmp_path / "opaque.py").write_text("def build(): ...\n", encoding="utf-8")
    uncounted = replace(parts_of("gpt-nano"), uncounted="no formula counts the FLOPs of mine::product")
    learn("py:opaque:build", uncounted, splits=None)
    options = {"workload": "py:opaque:build", "gpus": 2, "batch_size": 1}
    plan = plan_of(strategy="auto,ddp", **options)
    [skip], [cell] = plan.skips, plan.cells
    assert "mine::product" in skip.reason
    assert plan.predicted_bytes[cell.id] > 0
    step = estimated_step_time(cell, known_ns=None, hardware=Devices(cores=2))
    assert "mine::product" in str(step.seconds)
    assert lighter(cell, Surroundings.of(cell, Devices(cores=2), None)) is None


def test_compressed_gradients_are_not_weighed() -> None:
    [skip] = plan_of(workload="gpt-nano", gpus=2, strategy="auto", compression="bf16").skips
    assert skip.reason.startswith("auto weighs gradients that are exchanged as they are")


def test_a_chosen_strategy_joins_its_named_series() -> None:
    """Cells and series are as if it had been named, and none is there twice."""
    named = plan_of(workload="gpt-nano", gpus="1,2,4", strategy="single,ddp")
    both = plan_of(workload="gpt-nano", gpus="1,2,4", strategy="single,ddp,auto")
    alone = plan_of(workload="gpt-nano", gpus="1,2,4", strategy="auto")
    assert {cell.id for cell in both.cells} == {cell.id for cell in named.cells}
    assert (both.series, both.skips) == (named.series, named.skips)
    assert {cell.id for cell in alone.cells} == {cell.id for cell in named.cells}
    assert not any("auto" in cell.strategy for cell in both.cells)


def test_strong_scaling_is_weighed_with_its_own_batches() -> None:
    plan = plan_of(workload="gpt-nano", gpus="2,4", strategy="auto", batch_size=8, scaling="strong")
    assert [(cell.strategy, cell.micro_batch) for cell in plan.cells] == [("ddp", 16), ("ddp", 8)]
    assert [choice.chosen.cell for _, choice in auto_choices(plan) if choice.chosen] == list(plan.cells)


def test_an_excluded_point_is_not_chosen_for() -> None:
    plan = plan_of(workload="gpt-nano", gpus="2,4", strategy="auto", exclude=[Pattern(gpus=4)])
    assert [cell.gpus for cell in plan.cells] == [2]
    assert len(auto_choices(plan)) == 1


def test_the_explanation_has_the_numbers_of_the_closed_forms() -> None:
    choice = weighed(plan_of(workload="llama-nano", gpus=4, strategy="auto", batch_size=8))
    parts = parts_of("llama-nano")
    told = {row[0]: dict(zip(CHOICE_COLUMNS, row, strict=True)) for row in choice_rows(choice)}
    for candidate in choice.candidates:
        row, memory = told[candidate.strategy], footprint(candidate.cell, parts)
        sent = sum(term.wire_bytes for term in traffic(candidate.cell, parts))
        assert row["MiB"] == f"{memory.total / MIB:,.0f}"
        assert row["activations"] == f"{memory.activations / MIB:,.0f}"
        assert row["sent MiB"] == f"{sent / MIB:,.1f}"
    assert [row["verdict"] for row in told.values()].count("chosen") == 1
    assert told["single"]["verdict"].endswith("on more use ddp")
    assert told["ddp"]["fullest when"] == footprint(choice.candidates[0].cell, parts).moment
    assert [name for name, numeric in zip(CHOICE_COLUMNS, CHOICE_NUMERIC, strict=True) if not numeric] == [
        "candidate",
        "measured",
        "fullest when",
        "verdict",
    ]


def test_time_by_hand() -> None:
    """ddp on 2, GPT nano, 4 samples at 50 GFLOP/s: 3 x 4 x forward FLOPs.

    L (24 T d^2 + 4 T^2 d) + 2 T d V = 4 (25,165,824 + 2,097,152) + 4,194,304 = 113,246,208. The gradients are
    two buckets, and the last of them is exposed: 1 x its bytes at 1 GB/s and 0.2 ms.
    """
    choice = weighed(plan_of(workload="gpt-nano", gpus=2, strategy="auto", batch_size=4))
    ddp = choice.candidates[0]
    assert ddp.times.compute == pytest.approx(3 * 4 * 113_246_208 / 50e9)
    parts = parts_of("gpt-nano")
    # AdamW: parameters and two values of state read and written, gradients read.
    assert ddp.times.update == pytest.approx(7 * 4 * parts.values / 10e9)
    [sums] = ddp.terms
    first, last = sums.pieces
    assert first.payload_bytes + last.payload_bytes == 4 * parts.values
    assert ddp.times.exposed == pytest.approx(last.payload_bytes / 1e9 + 200e-6)
    assert ddp.times.bubble == 0
    pipeline = next(c for c in choice.candidates if c.strategy == "pipeline:1f1b")
    assert pipeline.times.bubble == pytest.approx(pipeline.times.compute / 4)


def test_gradients_hide_behind_the_last_micro_batch_alone() -> None:
    """ddp over 100 Mbit/s: 1 x the gradients' bytes at 12.5 MB/s and 2 operations of 0.2 ms, from when the
    first bucket is ready: in two thirds of the computation, or of half of it with two micro-batches."""
    parts = parts_of("gpt-nano")
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
        [sums] = ddp.terms
        hidden = (1 - sums.pieces[0].share) * 2 / 3 * ddp.times.compute / accumulation
        assert 0 < hidden < sent / 2
        assert ddp.times.exposed == pytest.approx(sent - hidden)


def test_a_started_study_keeps_what_was_chosen() -> None:
    """A plan was made when `auto` chose another strategy than now: the study keeps its cells, and new points
    are chosen as now."""
    options = {"workload": "gpt-nano", "strategy": "auto", "batch_size": 8}
    then = plan_of(gpus="2,4", **options | {"strategy": "zero1"})
    request = msgspec.structs.replace(then.request, strategies=("auto",))
    earlier = msgspec.structs.replace(then, request=request)
    assert [cell.strategy for cell in plan_of(gpus="2,4,8", **options).cells] == ["ddp"] * 3
    more = plan_of(gpus="2,4,8", earlier=(earlier,), **options)
    assert [cell.strategy for cell in more.cells] == ["zero1", "zero1", "ddp"]
    assert {cell.id for cell in then.cells} < {cell.id for cell in more.cells}
    choice = weighed(plan_of(gpus="2", earlier=(earlier,), **options))
    assert choice.kept == "zero1"
    assert choice.reason.endswith("in a new study ddp would be chosen")


def test_a_named_strategy_is_not_what_auto_chose() -> None:
    """If a plan of `ddp,auto` has ddp and fsdp at a point, `auto` chose fsdp; if it has ddp, it chose ddp."""
    options = {"workload": "gpt-nano", "gpus": 2, "batch_size": 8}
    for names, kept in (("ddp,fsdp", "fsdp"), ("ddp", "ddp")):
        then = plan_of(strategy=names, **options)
        request = msgspec.structs.replace(then.request, strategies=("ddp", "auto"))
        earlier = (msgspec.structs.replace(then, request=request),)
        more = plan_of(strategy="auto", earlier=earlier, **options)
        assert [cell.strategy for cell in more.cells] == [kept]


def test_auto_is_for_plans_alone() -> None:
    with pytest.raises(SpecError, match="the plan chooses what auto is"):
        group_layout("auto", 2)


def test_hsdp_is_weighed_on_real_nodes() -> None:
    """16 on nodes of 8: shards of an eighth, summed over the 2 nodes by 8 rings. Its cell keeps
    real nodes."""
    options = {"workload": "gpt-nano", "gpus": 16, "strategy": "auto", "batch_size": 8}
    choice = weighed(plan_of(gpus_per_node=8, **options))
    by_name = {candidate.strategy: candidate for candidate in choice.candidates}
    assert {"hsdp", "hsdp:tp=2", "hsdp:tp=4", "fsdp:tp=4"} <= by_name.keys()
    assert "hsdp:tp=8" not in [*by_name, *dict(choice.refused)]
    assert "tp" not in by_name
    hsdp = by_name["hsdp"]
    assert hsdp.cell.node_size is None
    across = next(term for term in hsdp.terms if term.what == "shards of gradients")
    assert (across.dimension, across.ranks) == ("replicate", 2)
    parts = parts_of("gpt-nano")
    virtual = msgspec.structs.replace(hsdp.cell, node_size=8)
    assert hsdp.memory == footprint(virtual, parts) != footprint(hsdp.cell, parts)
    assert hsdp.terms == tuple(traffic(virtual, parts))
    # On one node there is nothing to replicate, and of nodes of one rank nothing to shard.
    for alone in ({}, {"link": "1gbit"}):
        names = [candidate.strategy for candidate in weighed(plan_of(**alone, **options)).candidates]
        assert not [name for name in names if name.startswith("hsdp")]


@pytest.mark.parametrize(
    ("samples", "stages", "counts"),
    [
        (64, 4, [4, 8, 16, 32, 64]),
        (48, 2, [2, 4, 8, 16, 48]),
        (36, 3, [3, 6, 12, 36]),
        (10, 4, [5, 10]),
        (4, 4, [4]),
        # Too few: of as many as stages the plan says so.
        (4, 8, [8]),
    ],
)
def test_microbatches_divide_and_keep_all_stages_busy(samples, stages, counts) -> None:
    assert microbatch_counts(samples, stages) == counts


def test_pipelines_are_weighed_on_many_gpus() -> None:
    """Llama 1B has 16 blocks: on 256 up to 16 stages, 256 / stages copies. 8 samples are 8 microbatches at
    most. A divided backward pass has two stages a rank."""
    plan = plan_of(
        workload="llama-1b", gpus=256, strategy="auto", batch_size=8, device="cuda", gpus_per_node=8,
        precision="bf16",
    )  # fmt: skip
    choice = weighed(plan)
    every = [candidate.strategy for candidate in choice.candidates if "pipeline" in candidate.strategy]
    names = [name for name in every if "shard" not in name]
    assert "pipeline:zbv:microbatches=8:pp=8:shard=32" in every
    assert names == [
        "pipeline:1f1b:dp=128:microbatches=2",
        "pipeline:1f1b:dp=128",
        "pipeline:1f1b:dp=128:microbatches=8",
        "pipeline:1f1b:dp=64",
        "pipeline:1f1b:dp=64:microbatches=8",
        "pipeline:1f1b:dp=32:microbatches=8",
        *(
            f"pipeline:{name}:dp={dp}:microbatches=8"
            for dp in (128, 64, 32)
            for name in ("zero-bubble", "zbv")
        ),
    ]
    refused = [name for name, _ in choice.refused if "pipeline" in name and "shard" not in name]
    assert refused == ["pipeline:1f1b:dp=16:microbatches=16"]
    by_name = {candidate.strategy: candidate for candidate in choice.candidates}
    whole, divided = (by_name[f"pipeline:{name}:dp=64:microbatches=8"] for name in ("1f1b", "zbv"))
    assert divided.times.bubble < whole.times.bubble / 2


def of_h100(**options) -> Plan:
    """A plan for nodes of eight GPUs of 80 GB, which this machine need not have."""
    request = request_of(device="cuda", gpus_per_node=8, precision="bf16", strategy="auto", **options)
    request = msgspec.structs.replace(request, gpu_model="H100-SXM5-80GB")
    return expand(request, study="s", created_at="2026-01-01T00:00:00Z")


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        # 32,768 tokens are 8 x 4,096: each of 8 ranks of a sequence has the activations of 4,096.
        ({"seq": "4096"}, ["fsdp", "hsdp", "hsdp", "hsdp"]),
        ({"seq": "32768"}, ["fsdp:cp=8", "hsdp:cp=8", "hsdp:cp=8", "hsdp:cp=8"]),
    ],
)
def test_llama_7b_gets_a_grid_that_fits_at_every_length(options, chosen) -> None:
    plan = of_h100(workload="llama-7b", gpus="8,16,64,256", **options)
    assert [cell.strategy for cell in plan.cells] == chosen
    for _, choice in auto_choices(plan):
        found = choice.chosen
        assert found.memory.total <= choice.around.room < 80e9
        times = found.times
        assert times.step == pytest.approx(times.compute + times.update + times.bubble + times.exposed)
        assert sum(exposed for _, exposed in times.exchange.values()) == pytest.approx(times.exposed)
        assert set(times.exchange) == {term.dimension for term in found.terms}
        assert len(choice.candidates) + len(choice.refused) < 60


def test_a_mixture_gets_dealt_experts_where_whole_ones_would_not_fit() -> None:
    """On two nodes gathered blocks with all experts do not fit, and blocks with dealt experts do."""
    plan = of_h100(
        workload="mixtral-8x7b", gpus="16", seq="4096", batch_size=1, activation_checkpointing=True
    )
    assert [cell.strategy for cell in plan.cells] == ["fsdp:ep=8"]
    [(_, choice)] = auto_choices(plan)
    found, by_name = choice.chosen, {one.strategy: one for one in choice.candidates}
    assert not by_name["fsdp"].fits
    assert set(found.times.exchange) == {"shard", "expert-shard", "expert"}
    # A block has 8 experts, of which a rank gathers one.
    assert by_name["fsdp"].memory.gathered > 3 * found.memory.gathered


def test_one_split_dimension_goes_before_two() -> None:
    """On 8 GPUs at 32,768 tokens both fit: ranks of a sequence, and half as many with split layers. A longer
    batch leaves the latter out of memory, too, and names what fits with checkpointing."""
    long = {"workload": "llama-7b", "seq": "32768", "gpus": 8}
    names = [one.strategy for one in weighed(of_h100(**long)).candidates if one.fits]
    assert names == ["fsdp:cp=8", "fsdp:cp=4:sequence=true:tp=2"]
    [skip] = of_h100(**long, batch_size=8).skips
    assert "--activation-checkpointing" in skip.reason


@pytest.mark.parametrize(
    ("workload", "there", "absent"),
    [
        ("gpt-nano", {"fsdp:cp=4", "fsdp:cp=2:sequence=true:tp=2", "tp:sequence=true"}, {"gathered"}),
        # 9 heads do not divide.
        ("llama-125m", {"fsdp:attention=gathered:cp=4"}, {"fsdp:cp=2"}),
        ("mlp", {"fsdp"}, {"cp=", "sequence"}),
    ],
)
def test_sequences_are_split_where_there_are_some(workload, there, absent) -> None:
    choice = weighed(plan_of(workload=workload, gpus=4, strategy="auto"))
    names = {candidate.strategy for candidate in choice.candidates}
    assert there <= names
    every = [*names, *dict(choice.refused)]
    assert not [name for name in every for word in absent if word in name]


PROPOSING = """
from strategies.facts import Proposal
from strategies.single import Single

class Elsewhere(Single):
    name = "elsewhere"

    @classmethod
    def proposals(cls, point):
        yield Proposal(strategy="elsewhere", complexity=(-1,))
"""


def test_strategies_of_other_packages_are_weighed(tmp_path, monkeypatch) -> None:
    points = {"elsewhere": "elsewhere:Elsewhere", "broken": "no_such_module:Facts"}
    install(tmp_path, "a-package", {"bench.strategies": points})
    (tmp_path / "elsewhere.py").write_text(PROPOSING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(STRATEGIES, "_offered", None)
    forget_packages()
    try:
        plan = plan_of(strategy="auto", workload="gpt-nano", gpus=1)
        choice = weighed(plan)
    finally:
        forget_packages()
        STRATEGIES.forget("elsewhere")
        sys.modules.pop("elsewhere", None)
    assert [cell.strategy for cell in plan.cells] == ["elsewhere"]
    assert "single" in [candidate.strategy for candidate in choice.candidates]
    assert "cannot be imported" in dict(choice.refused)["broken"].text
    assert "broken" in [row[0] for row in choice_rows(choice)]


def test_refusals_that_differ_in_a_number_are_one_row() -> None:
    """2 samples are too few for 4, 8 and 16 stages."""
    plan = plan_of(workload="llama-1b", gpus=16, strategy="auto", batch_size=2, device="cuda")
    told = [text for text in choice_rows(weighed(plan)) if "pipeline" in text[0] and "multiple" in text[-1]]
    assert [(text[0], text[-1]) for text in told] == [
        (
            "pipeline:1f1b:dp=4 and 12 more",
            "the micro-batch (2 samples) must be a multiple of microbatches (4); give another --batch-size, "
            "or microbatches that divide 2, and the like",
        )
    ]


def candidate_of(strategy: str, like: StrategyCandidate, *, step_s: float, mib: int) -> StrategyCandidate:
    """A candidate with this time and memory."""
    cell = msgspec.structs.replace(like.cell, strategy=strategy)
    times = replace(like.times, compute=step_s, update=0.0, bubble=0.0, exposed=0.0)
    return replace(like, cell=cell, times=times, memory=Footprint(moment="update", parameters=mib * MIB))


@pytest.fixture
def choice_of() -> Callable[..., Choice]:
    """A choice from (strategy, seconds of a step, MiB), of which 886 may be planned."""
    plan = plan_of(workload="gpt-nano", gpus=4, strategy="auto", memory_limit_mb=1000)
    base = weighed(plan)

    def make(*given: tuple[str, float, int]) -> Choice:
        there = [candidate_of(name, base.candidates[0], step_s=s, mib=mib) for name, s, mib in given]
        return replace(base, candidates=tuple(there), kept=None)

    return make


@pytest.mark.parametrize(
    ("given", "chosen", "reason"),
    [
        # The fastest does not fit, and would be taken.
        (
            [("ddp", 2.0, 100), ("zero1", 1.0, 900)],
            "ddp",
            "because zero1 needs 900 MiB of the 886 that may be planned",
        ),
        # It would not be, since a simpler one is as fast: memory is not the reason.
        (
            [("ddp", 1.05, 100), ("zero1", 1.0, 900), ("fsdp", 1.5, 100)],
            "ddp",
            "because it fits, and fsdp is predicted to take 1.43 times as long",
        ),
        # zero1 is chosen as it is within 10 % of fsdp, and not of what does not fit; ddp is not in between.
        (
            [("ddp", 1.3, 100), ("zero1", 1.09, 100), ("fsdp", 1.0, 100), ("tp", 1.02, 900)],
            "zero1",
            "because it fits, is within 10% of fsdp, and simpler",
        ),
        # Of two that are equal nothing is said.
        (
            [("scratch-fsdp:stage=1", 1.0, 100), ("scratch-fsdp:stage=2", 1.0, 100), ("fsdp", 1.2, 100)],
            "scratch-fsdp:stage=1",
            "because it fits, and fsdp is predicted to take 1.20 times as long",
        ),
        ([("ddp", 1.0, 100)], "ddp", "the only candidate"),
        ([("ddp", 1.0, 100), ("fsdp", 1.0, 900)], "ddp", "the only one that fits"),
    ],
)
def test_the_reason_is_what_moved_the_choice(choice_of, given, chosen, reason) -> None:
    choice = choice_of(*given)
    assert choice.chosen.strategy == chosen
    assert choice.reason.split(";")[0] == reason


@pytest.mark.parametrize(
    ("selective", "limit", "instead"),
    [(False, 2440, ""), (True, 2170, " instead of --selective-checkpointing")],
)
def test_a_faster_choice_with_checkpointing_is_named(selective, limit, instead) -> None:
    """Over a slow link stage 1 sends two thirds of what stage 3 does: it is slower by less to compute
    activations again than to gather parameters again."""
    options = {
        "workload": "gpt2-small:seq=1024", "gpus": 2, "strategy": "auto", "batch_size": 1, "link": "100mbit",
        "memory_limit_mb": limit,
    }  # fmt: skip
    choice = weighed(plan_of(selective_checkpointing=selective, **options))
    lighter = weighed(plan_of(activation_checkpointing=True, **options)).chosen
    assert lighter.strategy == "scratch-fsdp:stage=1"
    assert lighter.sample_s < choice.chosen.sample_s / 1.1
    needs = f"{lighter.memory.total / MIB:,.0f}"
    told = f"; with --activation-checkpointing{instead} {lighter.strategy} needs {needs} MiB, which fits"
    assert choice.reason.endswith(told)
    # Where replicas fit there is nothing to say of it.
    options["memory_limit_mb"] = 8000
    assert "checkpointing" not in weighed(plan_of(**options)).reason


GPU = {"device": "cuda", "backend": "nccl", "optimizer": "adamw", "dataset": "synthetic"}
NODES = Devices(cores=8, host_bytes=64 * 2**30, gpu_name="NVIDIA A100-SXM4-80GB", gpu_bytes=80 * 10**9)


def test_an_offloaded_strategy_takes_its_hosts_memory() -> None:
    """8 ranks of a host have a shard of an eighth each of parameters, gradients and AdamW's two: 16 bytes a
    parameter of the whole model on each host of one copy. Llama 1B: 1.24 billion parameters, 18.4 GiB."""

    def made(strategy: str) -> Cell | Reason:
        wanted = STRATEGIES.parse("fsdp:offload=cpu").text
        return (
            nano_cell(strategy, 8, workload="llama-1b", micro_batch=1, **GPU)
            if strategy == wanted
            else Reason("strategy", "not now")
        )

    parts = parts_of("llama-1b")
    whole = 4 * parts.around.padded_values(8) + 4 * sum(block.padded_values(8) for block in parts.blocks)
    for host_bytes, fits in ((64 * 2**30, True), (16 * 2**30, False), (None, True)):
        devices = replace(NODES, host_bytes=host_bytes)
        cell = nano_cell("single", 8, workload="llama-1b", **GPU)
        choice = choose(cell, made, devices=devices, gpus_per_node=None)
        assert isinstance(choice, Choice)
        [candidate] = choice.candidates
        assert candidate.host_bytes == 4 * whole
        assert candidate.fits is fits
        need = f"{4 * whole / MIB:,.0f} MiB of its host"
        verdict = f"chosen, with {need}" if fits else f"does not fit into 15,565: {need}"
        assert choice_rows(choice)[0][-1] == verdict
        if not fits:
            assert f"{need}'s 15,565" in choice.reason


HOST = Devices(cores=8, host_bytes=64 * 2**30)


def limit_of(room: int) -> int:
    """MiB of a limit under which `room` bytes may be planned."""
    return ceil((room + 64 * MIB) / (SHARE * MIB))


def told(cell: Cell, room: int, devices: Devices = HOST) -> str | None:
    """Return what is said of a cell whose memory may be planned up to `room` bytes."""
    cell = msgspec.structs.replace(cell, memory_limit_mb=limit_of(room))
    return lighter(cell, Surroundings.of(cell, devices, None))


def size(cell: Cell) -> int:
    return footprint(cell, parts_of(cell.workload)).total


CELL = nano_cell("ddp", 2, micro_batch=64)


def test_accumulation_is_named_where_it_costs_nothing() -> None:
    words = told(CELL, size(CELL) - MIB)
    assert words.startswith("--accumulation 2 fits by prediction")
    quarter = msgspec.structs.replace(CELL, micro_batch=16, accumulation=4)
    assert str(told(CELL, size(quarter) + MIB)).startswith("--accumulation 4 ")


@pytest.mark.parametrize(
    ("room", "options"),
    [
        (75_000, "--activation-checkpointing selective "),
        (60_000, "--strategy fsdp "),
        (50_000, "--strategy fsdp:cp=4:reshard=false with micro-batches of 1 "),
        (41_000, "--activation-checkpointing all "),
    ],
)
def test_one_sample_is_helped_by_the_cheapest_change_that_is_enough(room, options) -> None:
    """Selective checkpointing costs least by prediction, then gathering again, then the exchange of a
    sequence's ranks, then a forward pass."""
    kept = nano_cell("fsdp:reshard=false", 8, workload="llama-7b", micro_batch=1)
    assert str(told(kept, room * MIB)).startswith(f"{options}fits by prediction")


def test_a_long_sequence_is_helped_by_more_ranks_for_it() -> None:
    """Half of the tokens are half of the activations, and cost less than a second forward pass."""
    cell = nano_cell("fsdp", 8, workload="llama-7b:seq=32768", micro_batch=1)
    half = msgspec.structs.replace(cell, strategy="fsdp:cp=2", model_parallel=2)
    words = str(told(cell, size(half) + MIB))
    assert words.startswith("--strategy fsdp:cp=2 with micro-batches of 1 fits by prediction")
    assert "cp=" not in str(told(nano_cell("fsdp", 8, workload="mlp", micro_batch=1), 4 * MIB))


def test_what_no_single_change_helps_is_not_told() -> None:
    assert told(nano_cell("ddp", 2, micro_batch=1), 6 * MIB) is None


def test_a_cell_that_fits_by_prediction_needs_a_change_that_saves_memory() -> None:
    """It is asked about because it ran out of memory all the same."""
    words = str(told(CELL, 4 * size(CELL)))
    assert words.startswith("--accumulation 2 ")


def test_measured_computation_goes_before_assumed_one() -> None:
    cell = nano_cell("ddp", 2, workload="gpt2-small:seq=1024", micro_batch=4)
    room = int(0.9 * size(cell))
    assert str(told(cell, room)).startswith("--accumulation")
    changed = partial(msgspec.structs.replace, cell, memory_limit_mb=limit_of(room))
    cells = [changed(micro_batch=2, accumulation=2), changed(micro_batch=1, accumulation=4)]
    slow = Work(forward_s=900.0, backward_s=900.0, update_s=1.0, micro_batches=2)
    devices = replace(HOST, measured=Measured(works={local_work(one): slow for one in cells}))
    assert str(told(cell, room, devices)).startswith("--activation-checkpointing")


def test_a_skip_for_memory_names_it() -> None:
    options = {"workload": "gpt2-xl", "gpus": 2, "device": "cuda", "batch_size": 1, "strategy": "fsdp"}
    [skip] = plan_of(**options, limit=Limit(gpus=Devices(gpu_name="A10", gpu_bytes=11 * 2**30))).skips
    assert skip.rule == "memory"
    assert "--strategy fsdp:offload=cpu fits by prediction" in skip.reason
