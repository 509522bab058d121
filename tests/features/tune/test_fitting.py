"""`--batch-size auto` without runs: what is tried next, what is found, and where it lands in a plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

import msgspec
import pytest
from builders import nano_cell, parts_of, plan_of, request_of

from harness.features.tune.fitting import Candidate, Curve, place_of, with_batches
from harness.plan import surroundings
from harness.plan.expand import expand
from harness.plan.surroundings import GROWTH_BYTES, MIB, SHARE, Devices, Limit, Surroundings
from results.cell import Cell, StepPolicy
from results.errors import UsageError
from results.plan import FittingBatch, Plan, Request
from strategies.predictions import footprint

HOST = Devices(cores=8, host_bytes=64 * 2**30)
AUTO = {"workload": "gpt-nano", "gpus": "1..4", "device": "cpu", "batch_size": "auto", "memory_limit_mb": 400}
ROOM = SHARE * 400 * MIB - GROWTH_BYTES
"""Bytes that a rank may take in a short run under a limit of 400 MiB on CPU."""
NO_ROOM = "ran out of memory"
Takes = Callable[[int], int | str]


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch) -> None:
    monkeypatch.setattr(surroundings, "devices_here", lambda: HOST)


def candidate(strategy: str = "single", gpus: int = 1, **fields: object) -> Candidate:
    cell = nano_cell(strategy, gpus, **{"micro_batch": 1, "memory_limit_mb": 400, **fields})
    return Candidate(cell, Surroundings.of(cell, HOST, None))


def limited(cell: Cell, what: int | str) -> int | str:
    """Return what the run of a cell reports that takes `what`. On CPU the cell's limit ends a larger one."""
    limit = cell.memory_limit_mb
    over = limit is not None and cell.device == "cpu" and isinstance(what, int) and what > limit * MIB
    return NO_ROOM if over else what


def searched(one: Candidate, takes: Takes, most: int | None = None) -> tuple[int | None, list[int]]:
    """The largest size that fits, and the sizes that were tried."""
    taken: dict[int, int | str] = {}
    for unit in one.units:
        while (size := one.next_size(taken, unit, most)) is not None:
            assert size not in taken
            assert size % unit == 0
            taken[size] = limited(one.probe(size), takes(size))
        if one.bracket(taken, most)[0] is not None:
            break
    return one.bracket(taken, most)[0], list(taken)


def a_memory(draw: random.Random) -> Takes:
    """Memory that grows with the samples, by pages of some size, not always straight, up to a wall."""
    base, rise = draw.uniform(0, 300) * MIB, 10 ** draw.uniform(-1.5, 1.7) * MIB
    bend, page = draw.choice([0, 0, 0.3, -0.2]), draw.choice([1, MIB, 20 * MIB])
    wall = draw.choice([inf, inf, draw.uniform(250, 380) * MIB])

    def takes(size: int) -> int | str:
        # A bend of 0.3 is a rise by 30 % more for each tenfold number of samples.
        exact = base + rise * size ** (1 + bend / 3)
        return int(exact // page * page) if exact <= wall else NO_ROOM

    return takes


def test_the_search_finds_what_a_scan_finds_in_few_runs() -> None:
    one, runs = candidate(), []
    for seed in range(300):
        takes = a_memory(random.Random(seed))

        def fits(size: int, takes: Takes = takes) -> bool:
            what = takes(size)
            return isinstance(what, int) and what <= ROOM

        scan = 0
        while fits(scan + 1):
            scan += 1
        found, tried = searched(one, takes)
        assert (found or 0) <= scan
        assert scan - (found or 0) <= max(1, 0.03 * scan)
        runs.append(len(tried))
    assert max(runs) <= 24
    assert sum(runs) / len(runs) < 10


def test_a_run_that_fits_beyond_its_aim_does_not_make_the_search_climb_by_one() -> None:
    """On CPU a run records resident pages, and its limit counts address space."""
    one, taken = candidate("ddp", 2), dict[int, int | str]()
    while (size := one.next_size(taken, 1, None)) is not None:
        taken[size] = (200 + size) * MIB if size <= 300 else NO_ROOM
    assert 291 <= (one.bracket(taken)[0] or 0) <= 300
    assert len(taken) < 12
    assert max(taken) < 800
    # Here the first run already takes more than the aim.
    assert one.next_size({100: 500 * MIB}, 1, None) == 200


def test_the_first_size_is_the_largest_that_fits_by_prediction() -> None:
    one, parts = candidate("ddp", 2), parts_of("gpt-nano")
    _, [first, *_] = searched(one, lambda size: NO_ROOM)
    assert (
        footprint(one.of(first), parts).total <= one.around.room < footprint(one.of(first + 1), parts).total
    )


def test_where_memory_is_as_predicted_two_further_runs_are_enough() -> None:
    """Predictions leave room for what they do not count, which measurements contain."""
    one, parts = candidate("ddp", 2), parts_of("gpt-nano")
    found, tried = searched(one, lambda size: footprint(one.of(size), parts).total)
    assert found is not None
    assert len(tried) <= 3
    assert footprint(one.of(found), parts).total <= ROOM


def test_tensor_cores_get_multiples_of_8_unless_8_do_not_fit() -> None:
    gpu = {"device": "cuda", "backend": "nccl"}
    half, full = candidate(precision="bf16", **gpu), candidate(**gpu)
    assert searched(half, lambda size: size * 21 * MIB)[0] == 16
    assert searched(half, lambda size: size * 70 * MIB)[0] == 5
    assert searched(full, lambda size: size * 21 * MIB)[0] == 18
    assert searched(half, lambda size: size * 500 * MIB)[0] is None


def test_a_pipeline_gets_multiples_of_its_microbatches() -> None:
    assert searched(candidate("pipeline:1f1b", 4), lambda size: size * 21 * MIB)[0] % 4 == 0


def a_curve(*gpus: int) -> Curve:
    request = msgspec.structs.replace(request_of(**AUTO, strategy="ddp"), gpus=gpus)
    _, [curve] = with_batches(request, earlier=(), limit=Limit())
    return curve


def run(curve: Curve, takes: Callable[[Cell], int | str]) -> tuple[FittingBatch, list[Cell]]:
    seen: dict[str, dict[int, int | str]] = {}
    tried: list[Cell] = []
    while isinstance(found := curve.search(seen), Cell):
        assert found not in tried
        tried.append(found)
        seen.setdefault(place_of(found), {})[found.micro_batch] = limited(found, takes(found))
    return found, tried


@pytest.mark.parametrize(("at_2", "at_8", "batch"), [(10, 20, 18), (20, 10, 18), (10, 10, 37)])
def test_the_smaller_of_both_ends_holds_for_the_curve(at_2, at_8, batch) -> None:
    takes = {2: at_2, 8: at_8}
    found, tried = run(a_curve(2, 4, 8), lambda cell: cell.micro_batch * takes[cell.gpus] * MIB)
    assert (found.series.batch_size, found.basis) == (batch, "measured")
    assert {cell.gpus for cell in tried} == {2, 8}
    # The second end is not searched beyond what the first has found.
    assert max(cell.micro_batch for cell in tried if cell.gpus == 8) <= 37


def test_a_curve_of_which_no_batch_fits_says_what_one_sample_takes() -> None:
    found, tried = run(a_curve(2), lambda cell: 500 * MIB)
    assert (found.basis, found.series.batch_size) == ("nothing fits", 1)
    assert found.why == "of the 374.0 MiB that a rank on 2 may take, a micro-batch of 1 ran out of memory"
    assert min(cell.micro_batch for cell in tried) == 1


@pytest.mark.parametrize(("trains", "samples"), [(False, 898), (True, 718)])
def test_data_without_so_many_samples_end_the_search(trains, samples) -> None:
    """Digits has 1,797 images, and 360 of them are held out of a training."""
    options = {**AUTO, "workload": "mlp", "dataset": "digits", "gpus": 2, "strategy": "ddp"}
    _, [curve] = with_batches(request_of(**options), earlier=(), limit=Limit(trains=trains))
    found, tried = run(curve, lambda cell: MIB)
    assert f"digits has {samples}" in found.why
    assert 0.97 * samples <= found.series.batch_size <= samples
    assert len(tried) < 5


def with_found(request: Request, batch: int = 7, basis: str = "measured") -> Request:
    request, _ = with_batches(request, earlier=(), limit=Limit())
    found = [
        msgspec.structs.replace(
            one, series=msgspec.structs.replace(one.series, batch_size=batch), basis=basis, why="so"
        )
        for one in request.batches or ()
    ]
    return msgspec.structs.replace(request, batches=tuple(found))


def planned(request: Request, **more: object) -> Plan:
    return expand(request, study="s", created_at="", **more)


def test_every_size_of_a_curve_and_its_baseline_have_the_batch() -> None:
    plan = planned(with_found(request_of(**AUTO, strategy="single,ddp", accumulation=1)))
    assert {(cell.strategy, cell.gpus, cell.micro_batch) for cell in plan.cells} == {
        ("single", 1, 7), ("ddp", 2, 7), ("ddp", 4, 7)
    }  # fmt: skip


def test_accumulation_multiplies_what_is_found() -> None:
    _, [curve] = with_batches(request_of(**AUTO, strategy="ddp", accumulation=4), earlier=(), limit=Limit())
    found, _ = run(curve, lambda cell: cell.micro_batch * 21 * MIB)
    assert found.series.batch_size == 4 * 17


def test_a_batch_that_the_study_has_is_used_again_for_larger_sizes_too() -> None:
    first = planned(with_found(request_of(**{**AUTO, "gpus": 2}, strategy="ddp")))
    request, left = with_batches(request_of(**AUTO, strategy="ddp,fsdp"), earlier=(first,), limit=Limit())
    assert [curve.series.strategy for curve in left] == ["fsdp"]
    assert {one.series.strategy: one.basis for one in request.batches or ()} == {
        "ddp": "measured", "fsdp": "predicted"
    }  # fmt: skip
    _, left = with_batches(
        request_of(**AUTO, strategy="ddp", precision="bf16"), earlier=(first,), limit=Limit()
    )
    assert len(left) == 1


def test_a_batch_that_was_found_on_larger_sizes_alone_is_found_anew_for_smaller_ones() -> None:
    first = planned(with_found(request_of(**{**AUTO, "gpus": 4}, strategy="ddp")))
    request = request_of(**{**AUTO, "gpus": "2..4"}, strategy="ddp")
    _, left = with_batches(request, earlier=(first,), limit=Limit())
    assert len(left) == 1
    second = planned(with_found(request, batch=5))
    request, left = with_batches(request, earlier=(first, second), limit=Limit())
    assert [one.series.batch_size for one in request.batches or ()] == [5]
    assert left == ()


@pytest.mark.parametrize("strategy", ["single,ddp", "single"])
def test_the_baseline_has_its_own_batch_where_nothing_is_compared_with_it(strategy) -> None:
    request, curves = with_batches(
        request_of(**{**AUTO, "gpus": 1}, strategy=strategy), earlier=(), limit=Limit()
    )
    [curve] = curves
    assert curve.series.strategy == "single"
    [cell] = planned(request).cells
    assert cell.micro_batch == curve.predicted().series.batch_size > 1


def test_a_series_without_a_batch_that_fits_is_skipped_for_its_memory() -> None:
    plan = planned(with_found(request_of(**AUTO, strategy="single,ddp"), batch=1, basis="nothing fits"))
    assert plan.cells == ()
    assert {skip.rule for skip in plan.skips if skip.strategy == "ddp" and skip.gpus > 1} == {"memory"}


def test_a_plan_and_its_batches_survive_a_file() -> None:
    plan = planned(with_found(request_of(**AUTO, strategy="ddp")))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"scaling": "weak,strong"}, "--global-batch-size"),
        ({"strategy": "auto"}, "name strategies"),
        ({"memory_limit_mb": None}, "--memory-limit-mb"),
        ({"batch_size": "8,auto"}, "leave auto out of 8,auto"),
    ],
)
def test_what_auto_cannot_be_combined_with_is_refused_with_the_fix(options, fix) -> None:
    with pytest.raises(UsageError, match=fix):
        request_of(**{**AUTO, **options})


def test_a_probe_is_a_short_run_of_the_cell_under_the_limit_that_it_must_fit() -> None:
    [cell] = {run(a_curve(2), lambda cell: 500 * MIB)[1][0]}
    assert (
        msgspec.structs.replace(cell, steps=StepPolicy(), memory_limit_mb=400)
        in plan_of(**{**AUTO, "batch_size": cell.micro_batch, "gpus": 2}, strategy="ddp").cells
    )
    assert cell.memory_limit_mb == 374
