"""Costs worked out by hand: dollars, epochs, the frontier, whose price counts, and cells without one."""

from __future__ import annotations

import dataclasses
import datetime
import html
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import a_job

import reports
from harness.cli import run
from harness.reporting.assumptions import CostFlags
from harness.reporting.studies import read_figures
from harness.terminal.console import Console
from reports.analysis.assumptions import Assumptions, Quote, quote, site_price, study_day
from reports.analysis.cost import (
    EMULATED,
    CellCost,
    cell_costs,
    cheapest_within,
    energy_per_sample,
    frontiers,
    why_no_energy,
)
from reports.analysis.study import StudyFigures
from reports.page.render import render_figures
from reports.page.section import Bullets, Paragraph, Table
from reports.page.sections.cost import cost_section, usd
from results import schemas
from results.catalogue.prices import Price
from results.job import Job
from results.job_store import JobStore
from results.outcome import Evidence

H100 = "NVIDIA H100 80GB HBM3"
FLAG = Assumptions(price=Price(usd_per_gpu_hour=2.5, source="given by --price"))
CENT_OF_A_SECOND = Assumptions(price=Price(usd_per_gpu_hour=3.6, source="given by --price"))
"""0.001 USD a device and second."""


def analysed(planted, assumptions: Assumptions | None = None) -> StudyFigures:
    return planted.analysed(name="costs", assumptions=assumptions)


@pytest.fixture
def eight(planted) -> object:
    """8 devices, 80 samples in 72, 80 and 88 ms: 1,000 samples a second, of 64 tokens each."""
    planted.points("ddp", {8: [72.0, 80.0, 88.0]}, batch=10, units_per_sample=64, unit="tokens")
    planted.plan()
    return planted


def only(study: StudyFigures) -> CellCost:
    (cost,) = cell_costs(study)
    return cost


def ends(metric: object) -> tuple[float | None, float, float | None]:
    return metric.low, metric.value, metric.high


def test_eight_devices_of_2_50_usd(eight) -> None:
    cost = only(analysed(eight, FLAG))
    # 8 x 2.50 USD; 1,000 steps take 72 to 88 s, a million samples 900 to 1,100 s around 1,000.
    assert cost.usd_per_hour == pytest.approx(20.0)
    assert ends(cost.usd_per_1000_steps) == pytest.approx((0.4, 0.444444, 0.488889), abs=1e-6)
    assert ends(cost.usd_per_million_samples) == pytest.approx((5.0, 5.555556, 6.111111), abs=1e-6)
    # 64,000 tokens a second: a billion in 15,625 s.
    assert ends(cost.usd_per_billion_tokens) == pytest.approx((78.125, 86.805556, 95.486111), abs=1e-6)
    assert cost.usd_per_million_samples.interval == "range"
    assert cost.usd_per_million_samples.samples == 3
    assert cost.usd_per_million_samples.unit == "USD"
    assert cost.epoch_ns is None
    assert cost.usd_per_epoch is None
    assert cost.absent is None


def test_an_epoch_is_the_data_sets_where_its_size_is_known_and_the_flag_wins(planted) -> None:
    planted.points("ddp", {2: 16.0}, dataset="digits:workers=2")
    known = Assumptions(dataset_samples={"digits": 1797})
    # 16 samples in 16 ms: 1,797 in 1.797 s.
    assert only(analysed(planted, known)).epoch_ns.value == pytest.approx(1.797e9)
    flag = dataclasses.replace(known, epoch_samples=1000)
    assert only(analysed(planted, flag)).epoch_ns.value == pytest.approx(1e9)
    assert only(analysed(planted)).epoch_ns is None


# Whose price


@pytest.fixture
def gpus(tmp_path, new_study, new_environment) -> Callable[..., StudyFigures]:
    """A study of one cell of two GPUs."""

    def make(assumptions: Assumptions, **facts: object) -> StudyFigures:
        planted = new_study(tmp_path / "gpus", device="cuda")
        planted.points("ddp", {2: 10.0}, environment=new_environment(**{"device_name": H100, **facts}))
        planted.plan(repeats=1)
        return analysed(planted, assumptions)

    return make


def origin(study: StudyFigures) -> tuple[str, float] | None:
    found = quote(study.assumptions, study.runs[0], gpus_per_node=1)
    return (found.origin, found.price.usd_per_gpu_hour) if found else None


OWN = {"H100-SXM5-80GB": [Price(usd_per_gpu_hour=2.0, source="contract")]}
SITE = Price(usd_per_gpu_hour=3.0, source="the site's list")


def test_the_flag_comes_before_the_file_the_site_and_the_catalogue(gpus) -> None:
    study = gpus(Assumptions(price=FLAG.price, prices=OWN, site=SITE), allocation="slurm 17")
    assert origin(study) == ("flag", 2.5)
    for kept, expected in (
        ({"prices": OWN, "site": SITE}, ("file", 2.0)),
        ({"prices": {"L4-24GB": OWN["H100-SXM5-80GB"]}, "site": SITE}, ("site", 3.0)),
        ({}, ("catalogue", 6.88)),
    ):
        assert origin(dataclasses.replace(study, assumptions=Assumptions(**kept))) == expected


def test_the_sites_price_is_for_runs_in_its_allocations(gpus) -> None:
    assert origin(gpus(Assumptions(site=SITE), allocation=None)) == ("catalogue", 6.88)


def test_one_price_holds_for_all_sizes_of_a_study(tmp_path, new_study, new_environment) -> None:
    planted = new_study(tmp_path / "l4", device="cuda")
    planted.points("ddp", {2: 10.0, 8: 10.0}, environment=new_environment(device_name="NVIDIA L4"))
    # 8 on a node: of a g6.48xlarge, though two could be had for 1.1504 each.
    assert [cost.usd_per_hour for cost in cell_costs(analysed(planted))] == pytest.approx([3.3376, 13.3504])


def job(number: int, price: object) -> Job:
    return a_job(f"{number:04d}-1x2", site={} if price is None else {"price": price})


def test_the_profile_of_the_newest_job_has_the_sites_price() -> None:
    old = job(1, {"usd_per_gpu_hour": 1.0, "source": "old list"})
    new = job(2, {"usd_per_gpu_hour": 2.0, "source": "new list"})
    assert site_price([new, old]) == Price(usd_per_gpu_hour=2.0, source="new list")
    free = job(3, {"usd_per_gpu_hour": 0.0, "source": "ours"})
    assert site_price([old, job(4, None), free]) == Price(usd_per_gpu_hour=1.0, source="old list")
    assert site_price([job(1, None)]) is None


# How old a price is


@pytest.mark.parametrize(
    ("date", "warning"),
    [
        # 2026-01-02 less 180 days is 2025-07-06; 180 days more is 2026-07-01.
        ("2025-07-06", None),
        ("2025-07-05", "this price is 181 days older than the study's runs of 2026-01-02"),
        ("2026-07-01", None),
        ("2026-07-02", "this price is 181 days newer than the study's runs of 2026-01-02"),
        (None, "the date of this price is not known: it may be out of date"),
    ],
)
def test_an_old_price_says_its_age_on_the_day_of_the_runs(eight, date, warning) -> None:
    day = study_day(analysed(eight).runs)
    assert day == datetime.date(2026, 1, 2)
    price = Price(
        usd_per_gpu_hour=1.0, source="list", date=datetime.date.fromisoformat(date) if date else None
    )
    assert Quote(price=price, origin="catalogue", device_name="d").warning(day) == warning
    assert Quote(price=price, origin="file", device_name="d").warning(day) == warning
    # Who gives a price with the call, or in a profile, vouches for it.
    assert Quote(price=price, origin="flag", device_name="d").warning(day) is None
    assert Quote(price=price, origin="site", device_name="d").warning(day) is None


def test_ages_are_counted_to_the_newest_run(eight) -> None:
    moments = ("2025-12-31T23:59:59.000Z", "2026-01-05T00:00:00.000Z", None)
    runs = [
        msgspec.structs.replace(one, started_at=moment)
        for one, moment in zip(eight.study.collect(), moments, strict=True)
    ]
    assert study_day(runs) == datetime.date(2026, 1, 5)
    assert study_day(runs[2:]) is None


def test_the_price_its_source_and_its_age_stand_on_the_page(gpus) -> None:
    text = page(gpus(Assumptions()))
    assert "NVIDIA H100 80GB HBM3: 6.88 USD a device and hour; aws p5.48xlarge, us-east-1" in text
    assert "source: aws/karpenter-provider-aws" in text
    assert "of 2026-07-20" in text
    assert (
        "the lowest of the newest in the catalogue, whose 8 prices of it go from 3.99 USD to 12.29 USD"
        in text
    )
    # From 2026-01-02 to 2026-07-20.
    assert "Beware: this price is 199 days newer than the study's runs of 2026-01-02." in text


# What has no cost


def test_a_device_without_a_price_has_no_cost_and_the_page_says_how_to_give_one(eight) -> None:
    study = analysed(eight)
    cost = only(study)
    assert (cost.usd_per_hour, cost.usd_per_million_samples, cost.usd_per_1000_steps) == (None, None, None)
    assert cost.million_samples_ns.value == pytest.approx(1000e9)
    reason = (
        "no price is known of Example CPU: give --price USD, of one rank (CPU) and hour, or --prices FILE.csv"
    )
    assert cost.absent == reason
    text = page(study)
    assert f"No cost of 1 cell: {reason}." in text
    assert "Cost of the devices in use" not in text


def test_emulated_cells_have_no_cost(planted) -> None:
    cells = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.runs(cells[0], [10.0])
    planted.runs(cells[1], [20.0], evidence=Evidence.EMULATED)
    study = analysed(planted, FLAG)
    measured, emulated = cell_costs(study)
    assert measured.usd_per_million_samples is not None
    assert emulated.quote is None
    assert emulated.usd_per_hour is None
    assert emulated.usd_per_million_samples is None
    assert emulated.absent == EMULATED
    assert [cost.cell.gpus for frontier in frontiers(cell_costs(study)) for cost in frontier.costs] == [2]
    assert f"No cost of 1 cell: {EMULATED}." in page(study)


# Energy


def test_joules_of_a_sample_are_those_of_a_step_over_its_samples(eight, full_rows) -> None:
    results = eight.study.collect()
    told = [msgspec.structs.replace(one, energy_j=j) for one, j in zip(results, (40, 80, 120), strict=True)]
    (figures,) = eight.analysed(told).cells.values()
    # 80 samples a step.
    assert ends(energy_per_sample(figures)) == pytest.approx((0.5, 1.0, 1.5))
    assert why_no_energy(figures) is None
    (row,) = full_rows(eight.analysed(told))
    assert row["energy of a sample, J"] == "1.00"


def test_without_a_counter_in_every_run_there_are_no_joules_but_a_reason(eight) -> None:
    first, *bare = [msgspec.structs.replace(one, absent={}) for one in eight.study.collect()]
    told = [msgspec.structs.replace(first, energy_j=40.0), *bare]
    (figures,) = eight.analysed(told).cells.values()
    assert energy_per_sample(figures) is None
    assert why_no_energy(figures) == "no counter of the devices' energy was read"
    told[1] = msgspec.structs.replace(told[1], absent={"energy_j": "the driver has no such counter"})
    assert "No energy of a sample: the driver has no such counter." in page(eight.analysed(told))


def test_mfu_is_over_the_mean_step_time_of_all_runs(eight, full_rows) -> None:
    results = eight.study.collect()
    # The newest run, of 88 ms, used 20 % of the peak: over the mean of 80 ms that is 22 %.
    told = [*results[:-1], msgspec.structs.replace(results[-1], mfu=0.2)]
    (row,) = full_rows(eight.analysed(told))
    # 6 MFLOP a sample.
    assert (row["parameters, M"], row["a step, MFLOP"], row["MFU, %"]) == ("1.00", "480", "22.0")
    assert "No MFU: no peak is known for a CPU core." in page(analysed(eight))


def test_runs_of_a_cell_that_differ_in_flops_have_no_flops_and_no_mfu(eight, full_rows) -> None:
    results = eight.study.collect()
    told = [*results[:-1], msgspec.structs.replace(results[-1], mfu=0.2, flops_per_step=1)]
    (row,) = full_rows(eight.analysed(told))
    assert not {"a step, MFLOP", "MFU, %"} & {
        name for name, value in row.items() if value.strip("\N{EN DASH}- ")
    }
    assert "No MFU: runs of one cell contradict each other in the FLOPs of a step." in page(
        eight.analysed(told)
    )


# The frontier


@pytest.fixture
def race(planted) -> object:
    """1,000 samples a step, so that a step of n ms is n s a million samples, at 0.001 USD a device and s.

    single 1: 1,000 s, 1.00 USD: as cheap as ddp on 2, and slower. ddp 2: 500 s, 1.00 USD. ddp 4: 300 s,
    1.20 USD, and so is bf16 4. ddp 8: 300 s, 2.40 USD: as fast, and dearer. bf16 8: 200 s, 1.60 USD.
    """
    work = {"kind": "strong", "batch": 1000}
    planted.points("single", {1: 1000.0}, **work)
    planted.points("ddp", {2: 500.0, 4: 300.0, 8: 300.0}, **work)
    planted.points("ddp", {4: 300.0, 8: 200.0}, compression="bf16", **work)
    planted.plan(repeats=1)
    return planted


def names(costs: tuple[CellCost, ...]) -> list[str]:
    return [f"{cost.cell.compression} {cost.cell.gpus}" for cost in costs]


def test_the_frontier_leaves_out_who_is_matched_in_both_and_beaten_in_one(race) -> None:
    (frontier,) = frontiers(cell_costs(analysed(race, CENT_OF_A_SECOND)))
    assert frontier.title == "gpt-nano"
    assert len(frontier.costs) == 6
    assert names(frontier.best) == ["bf16 8", "none 4", "bf16 4", "none 2"]
    dollars = [cost.usd_per_million_samples.value for cost in frontier.best]
    assert dollars == pytest.approx([1.6, 1.2, 1.2, 1.0])
    assert (names((frontier.fastest,)), names((frontier.cheapest,))) == (["bf16 8"], ["none 2"])


@pytest.mark.parametrize(
    ("within_s", "name"),
    [
        (199, None),
        (200, "bf16 8"),
        (299, "bf16 8"),
        (300, "bf16 4"),
        (499, "bf16 4"),
        (500, "none 2"),
        (9e9, "none 2"),
    ],
)
def test_the_cheapest_that_finishes_an_epoch_in_time(race, within_s, name) -> None:
    granted = dataclasses.replace(CENT_OF_A_SECOND, epoch_samples=1_000_000)
    (frontier,) = frontiers(cell_costs(analysed(race, granted)))
    found = cheapest_within(frontier, within_s)
    assert (names((found,)) if found else [None]) == [name]


def test_the_answer_is_a_sentence(race) -> None:
    def told(within_s: float, epoch: int | None = 1_000_000) -> str:
        granted = dataclasses.replace(CENT_OF_A_SECOND, epoch_samples=epoch, within_s=within_s)
        return page(analysed(race, granted))

    start = "gpt-nano: an epoch of 1,000,000 samples within"
    assert (
        f"{start} 6 min 40 s: the cheapest is ddp + bf16 on 4 ranks (CPU), batch 250 per replica, at 1.20 "
        "USD and 5 min 00 s." in told(400)
    )
    no = told(100)
    assert f"{start} 1 min 40 s: no cell does, the fastest is ddp + bf16 on 8" in no
    assert "1.60 USD and 3 min 20 s." in no
    assert "is open: the size of its epoch is not known: give --epoch-samples N." in told(400, epoch=None)
    assert "4 cells of 6 on the frontier" in no


def test_an_interval_that_reaches_beyond_the_time_is_told(eight) -> None:
    # 900 to 1,100 s around 1,000.
    granted = dataclasses.replace(FLAG, epoch_samples=1_000_000, within_s=1050)
    assert "and 16 min 40 s; its interval reaches beyond that time." in page(analysed(eight, granted))
    assert "reaches beyond" not in page(analysed(eight, dataclasses.replace(granted, within_s=1100)))


def test_other_work_has_a_frontier_of_its_own(planted) -> None:
    planted.points("ddp", {2: 10.0})
    planted.points("ddp", {2: 5.0}, precision="bf16")
    planted.points("ddp", {2: 1.0}, workload="mlp")
    planted.points("ddp", {2: 15.0}, batch=16)
    found = {
        one.title: [c.cell.micro_batch for c in one.costs]
        for one in frontiers(cell_costs(analysed(planted, FLAG)))
    }
    assert found == {"gpt-nano, fp32": [8, 16], "gpt-nano, bf16": [8], "mlp": [8]}


def test_the_drawing_rings_the_frontier(race, full_rows) -> None:
    study = analysed(race, CENT_OF_A_SECOND)
    whole = render_figures(study)
    assert "gpt-nano, global batch 1,000, strong: cost against time of a million samples" in whole
    # Four cells have a ring, with their sizes.
    rings = re.findall(r'class="ring" r="6.5"/><text [^>]*>(\d+)<', whole)
    assert sorted(rings) == ["2", "4", "4", "8"]
    # Nothing counts tokens, and no epoch was given.
    titles = set(full_rows(study)[0])
    assert "a million samples, USD" in titles
    assert {"a billion tokens, USD", "an epoch, USD", "time of an epoch, s"} & titles == set()
    assert render_figures(study) == whole


def placed(sample: CellCost, time: float, dollars: float) -> CellCost:
    return dataclasses.replace(
        sample,
        million_samples_ns=msgspec.structs.replace(sample.million_samples_ns, value=time),
        usd_per_million_samples=msgspec.structs.replace(sample.million_samples_ns, value=dollars, unit="USD"),
    )


@pytest.fixture
def sample(planted) -> CellCost:
    """Any cell with a cost."""
    planted.points("single", {1: 10.0})
    planted.plan(repeats=1)
    return only(analysed(planted, FLAG))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_frontier_is_that_of_comparing_all_with_all(sample, points) -> None:
    costs = [placed(sample, float(time), float(dollars)) for time, dollars in points]
    (frontier,) = frontiers(costs)
    naive = [
        (time, dollars)
        for time, dollars in points
        if not any(t <= time and d <= dollars and (t, d) != (time, dollars) for t, d in points)
    ]
    found = [(cost.million_samples_ns.value, cost.usd_per_million_samples.value) for cost in frontier.best]
    assert found == sorted(naive)


def test_equal_costs_are_equal_whatever_the_last_bit(sample) -> None:
    slower = placed(sample, 2.0, 0.1 + 0.2)
    faster = placed(sample, 1.0, 0.30000000000000010)
    (frontier,) = frontiers([slower, faster])
    assert frontier.best == (faster,)


# The command


def test_prices_are_printed_as_lists_print_them() -> None:
    assert [usd(value) for value in (20, 2.5, 3.4309, 0.526, 1234.5, 0.00001)] == [
        *("20.00 USD", "2.50 USD", "3.4309 USD", "0.526 USD", "1,234.50 USD", "0.00 USD"),
    ]


def test_the_command_takes_price_epoch_and_time(eight) -> None:
    root = eight.study.root
    flags = ["--price", "2.50", "--epoch-samples", "1281167", "--within", "4h"]
    assert run(["report", str(root), *flags]) == 0
    text = plain((root / "report.html").read_text())
    assert "Example CPU: 2.50 USD a device and hour; source: given by --price." in text
    assert "an epoch of 1,281,167 samples within 4 h 00 min: the cheapest is" in text
    assert "7.12 USD and 21 min 21 s." in text


def test_the_command_takes_a_file_of_prices(eight, tmp_path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("gpu,usd_per_gpu_hour,price_date,price_source\nExample CPU,0.04,2025-01-02,the lab\n")
    assert run(["report", str(eight.study.root), "--prices", str(file)]) == 0
    text = plain((eight.study.root / "report.html").read_text())
    assert "Example CPU: 0.04 USD a device and hour; source: the lab; of 2025-01-02." in text
    assert "Beware: this price is 365 days older than the study's runs of 2026-01-02." in text


def test_the_price_of_a_job_that_cannot_be_read_is_left_out_with_a_warning(eight, capsys) -> None:
    path = JobStore(eight.study.root).folder("0001-1x8") / "job.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert run(["report", str(eight.study.root)]) == 0
    assert "no price of the site, since a job cannot be read" in " ".join(capsys.readouterr().err.split())


def test_the_command_knows_the_price_of_the_site_and_the_size_of_digits(planted, new_environment) -> None:
    planted.points("ddp", {2: 16.0}, dataset="digits", environment=new_environment(allocation="slurm 17"))
    planted.plan(repeats=1)
    folder = JobStore(planted.study.root).folder("0001-1x2")
    folder.mkdir(parents=True)
    made = job(1, {"usd_per_gpu_hour": 0.9, "source": "price list of the site, 2026"})
    (folder / "job.json").write_bytes(schemas.JOB.encode(made))
    assert run(["report", str(planted.study.root), "--within", "1h"]) == 0
    text = plain((planted.study.root / "report.html").read_text())
    assert "Example CPU: 0.90 USD a device and hour; source: price list of the site, 2026." in text
    # 1,797 samples, 16 of them in 16 ms.
    assert "an epoch of 1,797 samples within 1 h 00 min: the cheapest is ddp on 2 ranks (CPU)" in text
    # 2 ranks at 0.9, as `reports.load` has it too.
    assert list(reports.load(planted.study.root).cells["usd_per_hour"]) == [pytest.approx(1.8)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--price", "-1"], "not -1"),
        (["--price", "0"], "not 0"),
        (["--epoch-samples", "0"], "--epoch-samples takes N or WORKLOAD=N,... with N of at least 1, not '0'"),
        (["--epoch-samples", "resnet5=7"], "the workloads are gpt-nano"),
        (["--within", "soon"], "--within takes a time like 90s, 1h30m, 2d or 1:30:00, not 'soon'"),
        (["--within", "4"], "--within 4 has no unit: write 4h for hours or 4m for minutes"),
        (["--within", "0h"], "--within must be > 0, not '0h'"),
        (
            ["--smallest-effect", "two"],
            "--smallest-effect takes more than 0 and at most 100 %, like 2% or 0.02, not 'two'",
        ),
        (["--prices", "nowhere.csv"], "price file nowhere.csv"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_rule(eight, capsys, flags, message) -> None:
    assert run(["report", str(eight.study.root), *flags]) == 2
    assert message in capsys.readouterr().err


def page(study: StudyFigures) -> str:
    """The words and the tables of the section."""
    parts: list[str] = []
    for block in cost_section(study).blocks:
        if isinstance(block, Paragraph):
            parts.append(block.text)
        elif isinstance(block, Bullets):
            parts += block.items
        elif isinstance(block, Table):
            parts += [block.caption, *(text for row in block.data.texts for text in row)]
    return " ".join(parts)


def plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())


def test_an_epoch_is_of_one_workload(planted, capsys) -> None:
    for workload in ("gpt-nano", "mlp"):
        planted.points("single", {1: 10.0}, workload=workload)
    planted.plan(repeats=1)
    epochs = {}
    for flag in ("1000", "mlp=1000", "gpt-nano=50,mlp=1000"):
        [study] = read_figures([str(planted.study.root)], CostFlags(epoch_samples=flag), Console())
        epochs[flag] = {cost.cell.workload: cost.epoch_samples for cost in cell_costs(study)}
    assert "give --epoch-samples gpt-nano=N,mlp=N" in capsys.readouterr().err
    assert epochs["1000"] == {"gpt-nano": None, "mlp": None}
    assert epochs["mlp=1000"] == {"gpt-nano": None, "mlp": 1000}
    assert epochs["gpt-nano=50,mlp=1000"] == {"gpt-nano": 50, "mlp": 1000}
