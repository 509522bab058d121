"""Compressors, collectives and strategies compared with the dense exchange, worked out by hand."""

from __future__ import annotations

import csv
import io

import pytest

from harness.cli import run
from reports.analysis.exchange import ALONE, FEW_RUNS, NO_DENSE, ExchangePart, ExchangeRow, exchange_parts
from reports.page.sections.communication import exchange_sentences
from reports.page.tables import csv_text, frame_of
from results.outcome import Evidence
from results.statistics import Metric

MS = 1e6


def parts_of(planted) -> list[ExchangePart]:
    return exchange_parts(planted.analysed())


def part_of(planted) -> ExchangePart:
    (part,) = parts_of(planted)
    return part


def row_of(part: ExchangePart, name: str, gpus: int = 2) -> ExchangeRow:
    (row,) = [row for row in part.rows if (row.name, row.cell.gpus) == (name, gpus)]
    return row


@pytest.fixture
def plant(planted):
    """Plant cells of batch 8 on 2 ranks by (strategy, compression, collective, link): step times in ms.

    Two times are the ends of three runs, with the mean between them.
    """

    def make(cells: dict[tuple[str, ...], list[float]], *, gpus: int = 2, **timing: object) -> None:
        for (strategy, *rest), step_ms in cells.items():
            axes = dict(zip(("compression", "collective"), rest, strict=False))
            fields: dict[str, object] = {**axes}
            if len(rest) > 2:
                fields["link_mbit_per_s"] = float(rest[2])
            (cell,) = planted.series("weak", strategy, [gpus], batch=8, **fields)
            runs = [step_ms[0], sum(step_ms) / 2, step_ms[1]] if len(step_ms) == 2 else step_ms
            planted.runs(cell, runs, **timing)

    return make


def test_the_speed_up_is_the_ratio_of_means_within_the_ratios_of_single_runs(planted, plant) -> None:
    plant({("ddp",): [10.0, 11.0, 12.0], ("ddp", "bf16"): [4.0, 5.0, 6.0]})
    row = row_of(part_of(planted), "ddp + bf16")
    assert row.dense.cell.compression == "none"
    # 11 / 5; at worst 10 / 6, at best 12 / 4.
    assert row.speed_up.value == pytest.approx(2.2)
    assert (row.speed_up.low, row.speed_up.high) == (pytest.approx(10 / 6), pytest.approx(3.0))
    assert (row.speed_up.interval, row.speed_up.samples) == ("range", 3)


@pytest.mark.parametrize(
    ("step_ms", "verdict"),
    [
        ([9.0, 9.3, 9.6], "faster"),  # its slowest is faster than the fastest dense run, and p is 0.03
        ([9.0, 9.0, 10.0], "no gain"),  # its slowest is as fast as that
        ([9.2, 9.6, 9.9], "no gain"),  # apart, as two equal cells are one time in ten: p is 0.07
        ([10.5, 10.5, 10.5], "no gain"),
        ([11.0, 11.5, 12.0], "no gain"),  # its fastest is as slow as the slowest dense run
        ([11.5, 12.0, 12.5], "slower"),
    ],
)
def test_a_verdict_needs_runs_that_are_apart(planted, plant, step_ms, verdict) -> None:
    plant({("ddp",): [10.0, 10.5, 11.0], ("ddp", "bf16"): step_ms})
    assert row_of(part_of(planted), "ddp + bf16").verdict == verdict


def test_from_six_runs_on_the_interval_decides_and_not_the_range(planted, plant) -> None:
    # The ranges overlap (10.9 < 11.0), the means do not: 10.5 and 11.4 with a deviation of some 0.2.
    plant(
        {
            ("ddp",): [11.0, 11.4, 11.4, 11.4, 11.4, 11.8],
            ("ddp", "bf16"): [10.1, 10.5, 10.5, 10.5, 10.5, 11.05],
        }
    )
    row = row_of(part_of(planted), "ddp + bf16")
    assert row.speed_up.interval == "t95-runs"
    assert row.verdict == "faster"


@pytest.mark.parametrize(("dense", "other"), [(1, 1), (1, 3), (2, 2), (3, 2), (2, 6)])
def test_fewer_than_three_runs_are_shown_and_not_judged(planted, dense, other) -> None:
    for compression, runs, ms in (("none", dense, 10.0), ("bf16", other, 5.0)):
        planted.points("ddp", {2: [ms] * runs}, compression=compression)
    part = part_of(planted)
    row = row_of(part, "ddp + bf16")
    assert row.speed_up.value == pytest.approx(2.0)
    assert (row.verdict, row.reason) == (None, FEW_RUNS)
    assert part.finding.endswith(": a verdict needs 3 runs of each.")
    told = list(exchange_sentences(planted.analysed()))
    assert told[1:] == ["Not judged: ddp + bf16 on 2: a verdict needs 3 runs of each."]


def test_each_is_compared_with_the_dense_exchange_of_its_strategy_or_of_ddp(planted, plant) -> None:
    ones = [10.0, 10.0]
    plant(
        {
            ("local-sgd:4", "bf16"): ones,
            ("scratch-ddp", "bf16", "ring"): ones,
            ("scratch-ddp",): ones,
            ("ddp", "none", "ring"): ones,
            ("ddp",): ones,
        }
    )
    part = part_of(planted)
    against = {row.name: None if row.dense is None else row.dense.cell.strategy for row in part.rows}
    assert against == {
        "ddp": None,
        "local-sgd:4 + bf16": "ddp",
        "scratch-ddp + bf16, ring": "scratch-ddp",
        "scratch-ddp": "ddp",
        "ddp, ring": "ddp",
    }
    # What the others are compared with stands first, the rest as it was asked for.
    assert part.rows[0].name == "ddp"
    assert row_of(part, "ddp").reason is None


def test_a_ddp_with_options_stands_in_for_plain_ddp(planted, plant) -> None:
    plant({("ddp:bucket_mb=50.0",): [10.0, 10.0], ("scratch-ddp",): [10.0, 10.0]})
    row = row_of(part_of(planted), "scratch-ddp")
    assert row.dense.cell.strategy == "ddp:bucket_mb=50.0"


def test_without_a_dense_exchange_nothing_is_compared(planted, plant) -> None:
    plant({("ddp", "bf16"): [10.0, 10.0], ("ddp", "fp16"): [10.0, 10.0]})
    part = part_of(planted)
    assert [(row.dense, row.speed_up, row.reason) for row in part.rows] == [(None, None, NO_DENSE)] * 2
    assert part.finding.endswith(f": {NO_DENSE}.")


def test_dense_exchanges_without_ddp_stand_alone(planted, plant) -> None:
    plant({("scratch-ddp",): [10.0, 10.0], ("local-sgd:4",): [5.0, 5.0]})
    assert part_of(planted).finding.endswith(f": {ALONE}.")


@pytest.mark.parametrize(
    "fields",
    [{"precision": "bf16"}, {"micro_batch": 16}, {"link_mbit_per_s": 1000.0}, {"node_size": 1}, {"gpus": 4}],
)
def test_unlike_points_are_not_compared(planted, plant, fields) -> None:
    plant({("ddp",): [10.0, 10.0], ("ddp", "fp16"): [9.0, 9.0]})
    gpus = fields.pop("gpus", 2)
    (cell,) = planted.points("ddp", {gpus: [5.0, 5.0]}, compression="bf16", **fields)
    planted.points("ddp", {gpus: [5.0, 5.0]}, compression="fp16", **fields)
    rows = [row for part in parts_of(planted) for row in part.rows if row.cell.id == cell.id]
    assert [(row.dense, row.reason) for row in rows] == [(None, NO_DENSE)]


def test_unlike_conditions_and_evidence_are_named_instead_of_divided(planted, plant, new_environment) -> None:
    plant({("ddp",): [10.0, 10.0]})
    plant({("ddp", "bf16"): [5.0, 5.0]}, environment=new_environment(torch="2.12.0"))
    plant({("ddp", "fp16"): [5.0, 5.0]}, evidence=Evidence.EMULATED)
    part = part_of(planted)
    reasons = {row.name: row.reason for row in part.rows if row.reason is not None}
    assert reasons == {
        "ddp + bf16": "not comparable with the baseline: torch: 2.12.0 here, 2.13.0 there",
        "ddp + fp16": "emulated here, measured there",
    }
    assert all(row.speed_up is None for row in part.rows)


def test_emulated_exchanges_are_compared_and_called_so(planted, plant) -> None:
    slow = {("ddp", "none", "default", "1000"): [10.0, 10.0]}
    plant(slow | {("ddp", "bf16", "default", "1000"): [5.0, 5.0]}, evidence=Evidence.EMULATED)
    part = part_of(planted)
    assert part.finding == (
        "Over 1gbit links (emulated) faster than the dense exchange: ddp + bf16 (2.00 times)."
    )


def test_gradients_over_exposed_time_where_that_is_above_nothing(planted) -> None:
    for compression, exposed in (("none", [2.0, 2.0]), ("bf16", [-0.5, 1.0]), ("fp16", [1.0, 3.0])):
        (cell,) = planted.series("weak", "ddp", [2], batch=8, compression=compression)
        for ms in exposed:
            planted.runs(cell, [10.0], exposed_ms=ms)
    planted.points("ddp", {2: [10.0, 10.0]}, compression="int8")
    rates = {row.name: row.gradients_per_exposed_s for row in part_of(planted).rows}
    # 4 MB in 2 ms; in 2 ms on the mean of 1 and 3; nothing where it may be 0 or was not measured.
    assert rates == {
        "ddp": pytest.approx(2e9),
        "ddp + fp16": pytest.approx(2e9),
        "ddp + bf16": None,
        "ddp + int8": None,
    }


@pytest.mark.parametrize(("low", "rate"), [(0.5, 2e9), (-0.5, None)])
def test_the_quads_of_a_single_run_decide_whether_time_is_exposed(planted, plant, low, rate) -> None:
    plant({("ddp",): [10.0], ("ddp", "bf16"): [10.0]})
    exposed = Metric(value=2 * MS, unit="ns", low=low * MS, high=3 * MS, samples=6, interval="t95-quads")
    (part,) = exchange_parts(planted.analysed(exposed_ns=exposed))
    # 4 MB in 2 ms.
    assert [row.gradients_per_exposed_s for row in part.rows] == [rate and pytest.approx(rate)] * 2


def test_a_study_of_one_exchange_compares_no_exchanges(small) -> None:
    assert parts_of(small) == []
    assert list(exchange_sentences(small.analysed())) == []
    rows = list(csv.DictReader(io.StringIO(csv_text(frame_of([small.analysed()], "cells")))))
    assert {row["speed_up"] for row in rows} == {""}


def test_a_single_device_is_no_exchange(planted) -> None:
    for strategy, gpus in (("single", 1), ("fsdp", 1), ("ddp", 2)):
        planted.points(strategy, {gpus: 10.0})
    assert parts_of(planted) == []


def test_parts_are_by_workload_and_network_the_open_one_first(planted, plant) -> None:
    both = [10.0, 10.0]
    for rate in ("1000", "100"):
        plant({("ddp", "none", "default", rate): both, ("ddp", "bf16", "default", rate): both})
    plant({("ddp",): both, ("ddp", "bf16"): both})
    for compression in ("none", "bf16"):
        planted.points("ddp", {2: both}, workload="a-model", compression=compression)
    assert [(part.workload, part.link) for part in parts_of(planted)] == [
        ("a-model", "none"),
        ("gpt-nano", "none"),
        ("gpt-nano", "100mbit"),
        ("gpt-nano", "1gbit"),
    ]


# The dense exchange takes 10.0 to 10.2 ms; each other one on 2 ranks and, where two are given, on 4.
DENSE = [10.0, 10.2]
FINDINGS = [
    (
        # 10.1 / 5.05 = 2, 12.625 / 10.1 = 1.25.
        {"bf16": ([5.0, 5.1],), "int8": ([12.5, 12.75],), "topk:0.01": ([10.1, 10.1],)},
        ("ddp + bf16 (2.00 times)", "ddp + int8 (1.25 times)", "ddp + topk:0.01"),
    ),
    (
        {"bf16": ([12.5, 12.75],), "int8": ([20.2, 20.2],)},
        ("none", "ddp + int8 (2.00 times), ddp + bf16 (1.25 times)", ""),
    ),
    (
        # Slower on the mean than bf16 and still within the spread.
        {"bf16": ([10.5, 10.5],), "int8": ([10.0, 13.0],), "fp16": ([20.2, 20.2],)},
        ("none", "ddp + fp16 (2.00 times), ddp + bf16 (1.04 times)", "ddp + int8"),
    ),
    ({"bf16": ([10.1, 10.1],)}, ("none", "", "ddp + bf16")),
    (
        # Faster twice; faster and slower; slower and neither.
        {
            "bf16": ([5.05, 5.05], [2.525, 2.525]),
            "int8": ([20.2, 20.2], [5.05, 5.05]),
            "fp16": ([10.1, 10.1], [20.2, 20.2]),
        },
        (
            "ddp + bf16 (up to 4.00 times), ddp + int8 (2.00 times, on 4)",
            "ddp + int8 (2.00 times, on 2), ddp + fp16 (2.00 times, on 4)",
            "",
        ),
    ),
]


def finding_of(faster: str, slower: str, even: str) -> str:
    kinds = ("faster than the dense exchange", faster), ("slower", slower)
    told = (*kinds, ("no difference shown, or one below 2 %", even))
    return f"On this network {'; '.join(f'{kind}: {those}' for kind, those in told if those)}."


@pytest.mark.parametrize(("cells", "finding"), FINDINGS)
def test_the_finding_names_what_gained_and_what_lost(planted, plant, cells, finding) -> None:
    for place, gpus in enumerate((2, 4)):
        there = {("ddp", name): points[place] for name, points in cells.items() if place < len(points)}
        if there:
            plant({("ddp",): DENSE} | there, gpus=gpus)
    assert part_of(planted).finding == finding_of(*finding)


FAST, EVEN, SLOW = [5.05, 5.05], [10.1, 10.1], [20.2, 20.2]
# What int8 does on 2, 4, 8 and 16 ranks, twice as fast, as fast or twice as slow as the dense exchange.
BY_SIZE = [
    (
        (SLOW, SLOW, [2.525, 2.525], FAST),
        ("ddp + int8 (up to 4.00 times, on 8 and 16)", "ddp + int8 (up to 2.00 times, on 2 and 4)"),
    ),
    # A size without a gain is not told where there is one elsewhere.
    ((EVEN, SLOW, EVEN, FAST), ("ddp + int8 (2.00 times, on 16)", "ddp + int8 (2.00 times, on 4)")),
    ((EVEN, FAST, FAST, FAST), ("ddp + int8 (up to 2.00 times, on 4, 8 and 16)", "")),
]


@pytest.mark.parametrize(("by_size", "told"), BY_SIZE)
def test_the_finding_says_at_which_sizes(planted, plant, by_size, told) -> None:
    for gpus, step_ms in zip((2, 4, 8, 16), by_size, strict=True):
        plant({("ddp",): DENSE, ("ddp", "int8"): step_ms}, gpus=gpus)
    assert part_of(planted).finding == finding_of(*told, "")


def test_points_of_one_size_are_counted_and_not_named(planted) -> None:
    for batch, step_ms in ((8, FAST), (16, SLOW)):
        for compression, each in (("none", EVEN), ("int8", step_ms)):
            planted.points("ddp", {2: [each[0]] * 3}, batch=batch, compression=compression)
    told = "ddp + int8 (2.00 times, at 1 of 2 points)"
    assert part_of(planted).finding == finding_of(told, told, "")


def test_exchanges_are_named_with_what_is_sent_over_what(planted, plant) -> None:
    fast = [5.05, 5.05]
    plant({("ddp",): DENSE, ("ddp", "bf16", "ring"): fast, ("ddp", "none", "ring"): fast})
    plant({("scratch-ddp",): fast, ("scratch-ddp", "bf16"): [10.1, 10.1]})
    # Three times 10.1 / 5.05 against ddp, and its own dense exchange is twice as fast as the last.
    faster = "ddp + bf16 over ring (2.00 times), ddp over ring (2.00 times), scratch-ddp (2.00 times)"
    assert part_of(planted).finding == finding_of(faster, "scratch-ddp + bf16 (2.00 times)", "")


def test_the_csv_has_the_speed_up_of_each_cell(planted, plant) -> None:
    plant({("ddp",): [10.0, 12.0]}, exposed_ms=4.0)
    plant({("ddp", "bf16", "ring", "2500"): [5.0, 6.0], ("ddp", "none", "default", "2500"): [10.0, 12.0]})
    rows = list(csv.DictReader(io.StringIO(csv_text(frame_of([planted.analysed()], "cells")))))
    by_name = {(row["compression"], row["link_mbit_per_s"]): row for row in rows}
    assert len(by_name) == 3
    other = by_name["bf16", "2500.0"]
    assert (other["collective"], other["speed_up_verdict"]) == ("ring", "faster")
    assert float(other["speed_up"]) == pytest.approx(2.0)
    assert float(other["speed_up_low"]) == pytest.approx(10 / 6)
    assert float(other["speed_up_high"]) == pytest.approx(12 / 5)
    assert other["dense_cell_id"] == by_name["none", "2500.0"]["cell_id"]
    # On the open network there is one exchange, and nothing to compare.
    assert by_name["none", ""]["speed_up"] == ""


def test_the_smallest_effect_is_an_option_of_the_command_and_stands_on_the_page(planted, plant) -> None:
    plant({("ddp",): [10.0, 10.0, 10.1], ("ddp", "bf16"): [10.4, 10.4, 10.5]})
    planted.plan()
    verdicts, pages = [], []
    for flags in ([], ["--smallest-effect", "5%"]):
        assert run(["report", str(planted.study.root), *flags]) == 0
        pages.append((planted.study.root / "report.html").read_text())
        cells = csv.DictReader(io.StringIO((planted.study.root / "cells.csv").read_text()))
        verdicts.append([row["speed_up_verdict"] for row in cells if row["compression"] == "bf16"])
    # 10.43 / 10.03 = 1.04.
    assert verdicts == [["slower"], ["no gain"]]
    for text, effect in zip(pages, ("2 %", "5 %"), strict=True):
        assert f"the value is at least {effect} from it" in text
        assert f"differ by less than {effect}" in text
