"""Sizes that a study projects, and that it refuses with the measurement that lifts the refusal."""

from __future__ import annotations

import random

import msgspec
import pytest

from harness.features.project.bands import band
from harness.features.project.call import outside_of
from harness.features.project.laws import CONSTANT, LAWS
from harness.features.project.project import projected_series
from harness.features.project.records import ProjectedSeries, ProjectedSize
from harness.features.project.refusals import Outside
from harness.features.project.section import size_table
from harness.features.project.series import REPLAY, Replayed
from results.environment import CodeVersion
from results.errors import UsageError
from results.outcome import Evidence, Outcome
from results.run import StepBudget
from results.statistics import Metric
from results.store import Study
from strategies.catalog import STRATEGIES

MS, NOTHING = 1e6, Outside()
FLAT = {1: 10.0, 2: 10.0, 4: 10.2, 8: 10.2, 16: 10.4}
"""On nodes of eight; efficiencies 1, 1, 0.98, 0.98, 0.96."""


def projected(study, to: int = 64, outside: Outside = NOTHING) -> ProjectedSeries:
    [found] = projected_series(study, to, outside)
    return found


def size(series: ProjectedSeries, gpus: int) -> ProjectedSize:
    return next(one for one in series.sizes if one.gpus == gpus)


def refused(series: ProjectedSeries) -> dict[int, str]:
    return {one.gpus: one.refusal.kind for one in series.of("refused") if one.refusal}


def replaying(step_ms, **more) -> Outside:
    """An outside that replays every size by a function, in milliseconds."""

    def replay(of):
        sizes = (*of.steps.gpus, *of.targets)
        return {gpus: Replayed(step_ns=step_ms(gpus) * MS, loss="transfer", **more) for gpus in sizes}

    return Outside(replay=replay)


def test_a_regular_curve_is_projected_with_all_that_follows_from_its_step(new_study) -> None:
    found = projected(new_study(FLAT))
    assert [one.gpus for one in found.of("measured")] == [1, 2, 4, 8, 16]
    assert [one.gpus for one in found.of("projected")] == [32, 64]
    there = size(found, 64)
    assert there.step_ns is not None
    assert found.law == CONSTANT
    assert there.step_ns.value == 10.4 * MS
    assert there.step_ns.low < there.step_ns.value < there.step_ns.high
    assert there.efficiency.value == pytest.approx(10 / 10.4)
    assert there.samples_per_s.value == pytest.approx(64 * 8 / 0.0104)
    # 1,000,000 samples in steps of 512, 64 GPUs at 3.60 an hour.
    assert there.epoch_ns.value == pytest.approx(1e6 / 512 * 10.4 * MS)
    assert there.usd_per_epoch.value == pytest.approx(1e6 / 512 * 0.0104 / 3600 * 64 * 3.6)
    assert there.usd_per_epoch.low < there.usd_per_epoch.value < there.usd_per_epoch.high


def test_the_size_to_buy_is_measured_and_a_projected_one_comes_with_the_command_that_verifies_it(
    new_study,
) -> None:
    found = projected(new_study(FLAT))
    assert found.advice == "16 GPUs measured; 64 projected, verify by"
    assert "--gpus 64" in found.verify
    # A doubling that yields less than half, 2 * 10 / 16 - 1, ends the growth that pays among measured sizes.
    assert projected(new_study({8: 10.0, 32: 11.9, 64: 13.0}), 128).verify is not None
    assert projected(new_study({32: 10.0, 40: 11.5}), 80).advice is None


def test_the_band_contains_the_interval_of_the_largest_size(new_study) -> None:
    quiet = projected(new_study(FLAT))
    noisy = projected(new_study(FLAT | {16: [9.4, 11.4]}))
    narrow, wide = (size(one, 32).step_ns for one in (quiet, noisy))
    assert wide.high - wide.low > narrow.high - narrow.low


@pytest.mark.parametrize(
    ("steps", "to", "kinds", "lifted"),
    [
        ({4: 10.0}, 8, {8: "one size"}, "--gpus 2 "),
        ({2: 10.0}, 4, {4: "one size"}, "--strategy single --gpus 1 "),
        ({1: 10.0}, 2, {2: "one size"}, "--strategy ddp --gpus 2 "),
        ({2: 10.0, 4: 10.0, 8: 10.0}, 16, {16: "node boundary"}, "--gpus 16 "),
        ({4: 10.0, 8: 10.0, 16: 12.0}, 32, {32: "irregular"}, "--gpus 32 "),
        ({2: 10.0, 16: 10.0}, 512, {256: "too far", 512: "too far"}, "--gpus 32 "),
    ],
)
def test_what_is_not_known_is_refused_with_the_cheapest_measurement(
    new_study, steps, to, kinds, lifted
) -> None:
    found = projected(new_study(steps), to)
    assert refused(found) == kinds
    lift = size(found, min(kinds)).refusal.lift
    assert lifted in lift.command + " "
    assert lift.gpu_hours > 0
    assert lift.usd == pytest.approx(3.6 * lift.gpu_hours)


def test_no_larger_size_is_ordered_beyond_the_knee(new_study) -> None:
    found = projected(new_study({2: 10.0, 4: 10.0, 8: 19.0}), 32)
    lift = size(found, 32).refusal.lift
    assert lift.command is None
    assert lift.what.startswith("a run beyond the knee, which does not pay: going from 4 to 8")


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({16: {"disturbed": True}}, "disturbed"),
        ({8: {"evidence": Evidence.EMULATED}}, "emulated"),
    ],
)
def test_runs_that_do_not_count_decide_nothing(new_study, changed, kind) -> None:
    found = projected(new_study(FLAT, changed=changed))
    assert set(refused(found).values()) == {kind}


def test_a_series_of_stand_ins_is_not_called_measured(new_study) -> None:
    found = projected(new_study(FLAT, changed={key: {"evidence": Evidence.EMULATED} for key in FLAT}))
    assert [row[1] for row in size_table(found).texts[:2]] == ["emulated"] * 2


def test_the_network_is_to_be_measured_only_where_computation_was(new_study) -> None:
    steps, outside = {4: 1e4, 8: 1e4, 16: 1.2e4}, Outside(network_call=lambda gpus: "bench network")
    none = Metric(value=0.0, unit="ns", low=None, high=None, samples=1, interval=None)
    budget = StepBudget(
        method="m", input_ns=0.0, compute_ns=9e9, transfer_ns=none, wait_ns=none, other_ns=0.0
    )
    for changed, network in (({}, False), ({key: {"budget": budget} for key in steps}, True)):
        found = size(projected(new_study(steps, changed=changed), 32, outside), 32)
        assert (found.refusal.lift.command == "bench network") is network


def test_two_environments_are_not_one_curve(new_study) -> None:
    study = new_study(FLAT)
    other = msgspec.structs.replace(
        study.cells[next(iter(study.cells))].newest.environment,
        driver="other",
        code=CodeVersion(code_hash="x"),
    )
    found = projected(new_study(FLAT, changed={2: {"environment": other}}))
    assert set(refused(found).values()) == {"mixed runs"}
    assert "--gpus 2 " in size(found, 32).refusal.lift.command


def test_a_strategy_that_is_not_projected_says_so(new_study) -> None:
    outside = Outside(unprojected=lambda cell: None if cell.strategy == "ddp" else "reason of its facts")
    assert refused(projected(new_study({8: 10.0, 16: 10.0}), 32, outside)) == {}
    found = projected(new_study({8: 10.0, 16: 10.0}, strategy="tp"), 32, outside)
    assert refused(found) == {32: "strategy"}
    compressed = projected(new_study({8: 10.0, 16: 10.0}, compression="powersgd:4"), 32)
    assert refused(compressed) == {32: "strategy"}


def test_sizes_that_divide_a_replica_otherwise_are_not_continued(new_study) -> None:
    """Two ranks of a sequence take about half of what one device takes: the curve from 2 on is flat."""
    fields = {"strategy": "fsdp:cp=2", "model_parallel": 2}
    found = projected(new_study({1: 19.0, 2: 10.0, 4: 10.0, 8: 10.0, 16: 10.0}, **fields), 32)
    assert size(found, 32).step_ns.value == 10.0 * MS
    assert size(found, 32).samples_per_s.value == pytest.approx(32 / 2 * 8 / 10e-3)
    [lift] = {one.refusal.lift.command for one in projected(new_study({2: 10.0}, **fields)).of("refused")}
    assert "--strategy fsdp:cp=2 --gpus 4 " in lift


@pytest.mark.parametrize("strategy", ["fsdp:cp=2", "fsdp:sequence=true:tp=2", "tp", "pipeline:zbv:pp=2"])
def test_a_grid_is_projected_or_refused_with_the_reason(new_study, tmp_path, strategy) -> None:
    study = new_study({8: 10.0, 16: 10.0}, strategy=strategy, model_parallel=2)
    found = projected(study, 32, outside_of(Study(tmp_path), study, None))
    facts = STRATEGIES.facts(strategy)
    assert [one.basis for one in found.sizes][2:] == ["projected" if facts.projected else "refused"]
    assert facts.projected or facts.unprojected in size(found, 32).refusal.reason


def test_ranks_on_cpu_that_have_no_core_each_are_refused(new_study) -> None:
    study = new_study({2: 10.0, 4: 10.0}, device="cpu", backend="gloo", precision="fp32")
    found = projected(study, 256)
    assert refused(found)[256] == "cores"
    assert "--gpus 256" in size(found, 256).refusal.lift.command


def test_a_size_that_does_not_fit_says_by_how_much_and_what_fits(new_study) -> None:
    def memory(cell, per_node):
        return 2**30 * (1 if cell.gpus <= 16 else 100)

    outside = Outside(
        memory=memory, room=lambda one: 80 * 2**30, fitting=lambda cell, share: "--strategy fsdp"
    )
    found = projected(new_study(FLAT), 32, outside)
    refusal = size(found, 32).refusal
    assert refusal.kind == "memory"
    # The measured peak is 1 GiB of 16, so it is 100 of 80.
    assert "20.0 GiB more than the 80.0 GiB" in refusal.reason
    assert "--strategy fsdp" in refusal.lift.what


def test_a_size_that_ran_out_of_memory_is_not_projected(new_study) -> None:
    failed = {"outcome": Outcome.OUT_OF_MEMORY, "reason": "memory", "step_ns": None}
    found = projected(new_study(FLAT | {64: 10.0}, changed={64: failed}), 64)
    assert refused(found) == {64: "memory"}
    assert size(found, 32).basis == "projected"


def test_a_strong_series_is_refused_with_the_weak_series_that_tells_its_step(new_study) -> None:
    strong = new_study({8: 40.0, 16: 20.0}, kind="strong", batch=512)
    found = projected(strong, 64)
    assert refused(found) == {32: "batch", 64: "batch"}
    lift = size(found, 64).refusal.lift.command
    assert "--batch-size 8 " in lift
    assert "--scaling" not in lift


# The replay


def test_a_replay_answers_from_one_size_but_not_over_a_boundary_that_it_was_not_compared_over(
    new_study,
) -> None:
    def slow_between(gpus: int) -> float:
        return 10 if gpus <= 8 else 15

    # Nodes have 8 devices: nothing was measured between two of them.
    inside = projected(new_study({4: 10.0, 8: 10.0}), 32, replaying(slow_between))
    assert refused(inside) == {16: "node boundary", 32: "node boundary"}
    assert "--gpus 16 " in size(inside, 32).refusal.lift.command
    crossing = projected(new_study({8: 10.0, 16: 15.0}), 32, replaying(slow_between))
    assert (crossing.law, size(crossing, 32).step_ns.value) == (REPLAY, 15 * MS)
    assert size(crossing, 32).loss == "transfer"
    # With one size the scale is 1.
    alone = projected(new_study({16: 15.0}), 32, replaying(slow_between))
    assert size(alone, 32).step_ns.value == 15 * MS


def test_the_band_of_a_replay_reaches_as_far_to_both_sides() -> None:
    low, high = band(REPLAY, 1.0, 0.02)
    assert low * high == pytest.approx(1)
    assert high == pytest.approx(max(band(law, 1.0, 0.02)[1] for law in LAWS))


def test_a_replay_is_scaled_by_the_measured_sizes(new_study) -> None:
    study = new_study({8: 12.0, 16: 12.0})
    found = projected(study, 32, replaying(lambda gpus: 10 if gpus <= 16 else 15))
    assert size(found, 32).step_ns.value == pytest.approx(18 * MS)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        # Fitted on 4 alone it says 10 for 8, and 12 was measured.
        ({4: 10.0, 8: 12.0}, "off there"),
        # One device, without messages, does not say by how much 8 are off.
        ({1: 12.0, 8: 12.0}, "unscaled it is"),
        # It lacks more than half of the step.
        ({4: 25.0, 8: 25.0}, "lacks a part"),
        ({8: 12.0}, "off there"),
    ],
)
def test_a_replay_that_does_not_reproduce_the_largest_size_does_not_answer(new_study, steps, why) -> None:
    found = projected(new_study(steps), 16, replaying(lambda gpus: 10))
    assert found.law is None
    assert why in size(found, 16).refusal.reason


def test_a_level_that_the_table_lacks_widens_the_band(new_study) -> None:
    study = new_study({8: 10.0, 16: 10.0})
    known, unknown = (
        size(projected(study, 32, replaying(lambda gpus: 10, levels=levels)), 32).step_ns for levels in (0, 1)
    )
    assert unknown.high > known.high
    assert unknown.value == known.value


# Negative controls and bad input


def test_shuffled_sizes_widen_the_band_or_refuse(new_study) -> None:
    true = {1: 10.0, 2: 10.4, 4: 10.9, 8: 11.4, 16: 11.9}
    own = size(projected(new_study(true), 32), 32).step_ns
    order, outcomes = list(true.values()), []
    for seed in range(20):
        random.Random(seed).shuffle(order)
        there = size(projected(new_study(dict(zip(true, order, strict=True))), 32), 32)
        if order != sorted(order):
            width = there.step_ns and (there.step_ns.high - there.step_ns.low) / there.step_ns.value
            outcomes.append(there.refusal is not None or width > (own.high - own.low) / own.value)
    assert all(outcomes)


@pytest.mark.parametrize("to", [2, 16])
def test_a_size_that_was_measured_is_not_projected(new_study, to) -> None:
    with pytest.raises(UsageError, match="16"):
        projected_series(new_study(FLAT), to, Outside())


def test_a_study_of_failures_alone_says_what_to_do(new_study) -> None:
    failed = {"outcome": Outcome.CRASHED, "reason": "rank 1", "step_ns": None}
    with pytest.raises(UsageError, match="bench report"):
        projected_series(new_study({2: 10.0}, changed={2: failed}), 8, Outside())


def test_the_end_is_projected_also_where_it_is_no_doubling(new_study) -> None:
    found = projected(new_study(FLAT), 48)
    assert [one.gpus for one in found.of("projected")] == [32, 48]
