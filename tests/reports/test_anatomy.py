"""The anatomy of a step: its parts, its bars, and its sentence for a run without a budget."""

from __future__ import annotations

import re

import msgspec
import pytest
from generated_study import large_study

from reports.analysis.stragglers import stragglers
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.verdict import verdict
from reports.page.section import Bullets, Drawing, Drawings
from reports.page.sections.anatomy import anatomy_section
from results.outcome import Evidence, Outcome
from results.record import Recorded

MS = 1_000_000


def remarks(study: StudyFigures) -> list[str]:
    """Every bullet of the section."""
    section = anatomy_section(study)
    return [item for block in section.blocks if isinstance(block, Bullets) for item in block.items]


def off(*rank_ms: list[float]):
    """Return each rank's four steps without exchange."""
    return lambda rank: [round(ms * MS) for ms in rank_ms[rank]]


@pytest.fixture
def study(planted) -> StudyFigures:
    """Single on 1, and ddp on 2 whose parts are worked out in the tests."""
    [single] = planted.points("single", {1: 10.0}, input_ms=0.5, first_step_ms=40.0)
    planted.runs(single, [10.0], input_ms=0.5, first_step_ms=60.0)
    own = off([10.0, 12.0, 10.0, 12.0], [8.0, 8.0, 12.0, 12.0])
    planted.points("ddp", {2: [15.0, 17.0]}, input_ms=1.0, off_step_ns=own)
    return planted.analysed()


def test_the_full_table_has_every_part(study, full_rows) -> None:
    alone, ddp = full_rows(study)
    # Compute: (44 + 40) / 8. Slowest of each step 10, 12, 12, 12: 11.5, and so a wait of 1.
    # Steps of 14 and 16 without input: transfer 2.5 and 4.5. The mean step is 16.
    assert (ddp["step time, ms"], ddp["step time, from, ms"], ddp["step time, to, ms"]) == (
        "16.0",
        "15.0",
        "17.0",
    )
    assert (ddp["input, ms"], ddp["compute, ms"], ddp["exposed transfer, ms"]) == ("1.00", "10.5", "3.50")
    # One rank exchanges nothing: there is nothing to show.
    assert (ddp["exposed wait, ms"], alone["exposed wait, ms"]) == ("1.00", "")
    assert (alone["compute, ms"], alone["exposed transfer, ms"]) == ("9.50", "")
    assert "bubble, ms" not in ddp
    assert (alone["first step, ms"], ddp["first step, ms"], alone["set-up, ms"]) == ("50.0", "", "500")


def test_a_large_residual_is_warned_of(planted) -> None:
    planted.points("ddp", {2: 20.0}, input_ms=2.0, off_step_ns=off([10.0] * 4, [10.0] * 4))
    planted.plan(repeats=1)
    [run] = planted.study.collect()
    # 20 = 2 + 10 + 8, until 2 of the 8 are lost on the way.
    less = msgspec.structs.replace(run.budget.transfer_ns, value=6.0 * MS)
    lacking = msgspec.structs.replace(run, budget=msgspec.structs.replace(run.budget, transfer_ns=less))
    sound, warned = (remarks(planted.analysed([one])) for one in (run, lacking))
    assert not any("the parts come from" in text for text in sound)
    assert (
        "ddp on 2, batch 8 a replica: the parts come from steps that took 10.0 % less time than the timed "
        "ones: the machine changed in between."
    ) in warned


def test_compute_that_is_encoding_and_decoding_is_told_of(planted, new_timing) -> None:
    cells = [
        planted.series("weak", "ddp", [2], batch=8, **fields)[0]
        for fields in ({"compression": "topk:0.01"}, {"compression": "int8"}, {})
    ]
    own = off([10.0] * 4, [10.0] * 4)
    # Two runs of 2 ms and 4 ms; int8 has no blocks without the exchange; the last one encodes nothing.
    for cell, quads in zip(cells, (own, None, own), strict=True):
        for cpu_ms in (2, 4):
            kept = Recorded(step_ns=[12 * MS] * 2, blocked_ns=[MS] * 2, exchange_cpu_ns=[cpu_ms * MS] * 2)
            planted.run(
                cell,
                new_timing(
                    step_ms=12.0, input_ms=1.0, off_step_ns=quads, recorded=lambda rank, one=kept: one
                ),
            )
    told = (
        "Compute contains encoding and decoding (CPU time): ddp + topk:0.01 on 2, batch 8 a replica: 3.00 ms."
    )
    assert told in remarks(planted.analysed())


def test_where_a_cell_has_no_budget_the_reason_is_given(small) -> None:
    assert any(
        text.startswith("No budget of ddp on 2, batch 8 a replica; ddp on 4, batch 8 a replica")
        for text in remarks(small.analysed())
    )


def test_input_of_synthetic_data_is_said_not_to_be_measured(planted, new_timing) -> None:
    synthetic = planted.series("weak", "ddp", [2], batch=8)[0]
    real = planted.series("weak", "ddp", [2], batch=8, dataset="digits")[0]

    def told() -> list[str]:
        return [text for text in remarks(planted.analysed()) if "not measured" in text]

    planted.run(real, new_timing(step_ms=10.0))
    assert told() == []
    planted.run(synthetic, new_timing(step_ms=10.0))
    [text] = told()
    assert text.startswith("Input of 1 of 2 cells was not measured: the data are synthetic")


def test_a_study_without_figures_has_no_section(planted) -> None:
    planted.points("ddp", {2: 1}, outcome=Outcome.CRASHED, reason="no")
    assert anatomy_section(planted.analysed()) is None


def drawings_of(study: StudyFigures) -> list[Drawing]:
    [block] = [one for one in anatomy_section(study).blocks if isinstance(one, Drawings)]
    return list(block.drawings)


def pieces_of(svg: str) -> list[tuple[float, str]]:
    """The width and colour of each piece of the bars, in order."""
    found = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*var\(--(\w+)\)', svg[svg.index("<a ") :])
    return [(float(width), colour) for width, colour in found]


def test_a_bar_of_an_emulated_cell_says_so(planted) -> None:
    for gpus, evidence in ((2, Evidence.MEASURED), (4, Evidence.EMULATED)):
        own = off(*[[10.0] * 4] * gpus)
        planted.points("ddp", {gpus: 12.0}, off_step_ns=own, evidence=evidence)
    [drawing] = drawings_of(planted.analysed())
    svg = str(drawing.svg)
    assert ">ddp on 2<" in svg
    assert ">ddp on 4, emulated<" in svg


WHOLE = 630 - 170 - 116
"""The width of the longest bar."""


def test_bars_are_the_ideal_and_the_losses_end_to_end_in_time(study) -> None:
    [drawing] = drawings_of(study)
    # Single: an ideal of 9.5 and input of 0.5 ms. Ddp: input 1, compute 10.5 - 9.5, transfer 3.5 and wait 1.
    lengths = [9.5, 0.5, 9.5, 1.0, 1.0, 3.5, 1.0]
    colours = ["rule", "green", "rule", "green", "blue", "vermillion", "orange"]
    found = pieces_of(str(drawing.svg))
    assert [width for width, _ in found] == pytest.approx([ms / 16 * WHOLE for ms in lengths], abs=0.1)
    assert [colour for _, colour in found] == colours
    assert "ddp on 2 16.0 ms, 40.6 % lost: ideal step 9.50 ms, input 1.00 ms, slower" in str(drawing.svg)
    assert drawing.title.endswith("where a step's time goes, ms")


def test_what_a_part_gains_is_taken_from_the_ideal(planted) -> None:
    planted.points("ddp", {2: 10.0}, input_ms=1.0, off_step_ns=off([10.0] * 4, [10.0] * 4))
    # Blocks with the exchange took 9, those without it 10: -1 of transfer, so 9 of the ideal and 1 of input.
    [drawing] = drawings_of(planted.analysed())
    (ideal, _), (lost, colour) = pieces_of(str(drawing.svg))
    assert (ideal, lost) == (pytest.approx(0.9 * WHOLE, abs=0.1), pytest.approx(0.1 * WHOLE, abs=0.1))
    assert colour == "green"
    assert "exposed transfer -1.00 ms" in str(drawing.svg)
    # The mark is at the ideal of 10 ms, where the step ends.
    assert f'd="M{170 + WHOLE:.1f} ' in str(drawing.svg)


def test_the_largest_piece_of_a_bar_is_the_part_that_the_verdict_names() -> None:
    study = large_study(seed=7)
    colours = {"transfer": "vermillion", "compute": "blue", "wait": "orange"}
    weak, strong = drawings_of(study)
    for drawing, reach in zip((weak, strong), verdict(study).workloads[0].reaches, strict=True):
        [bar] = re.findall(rf'<a [^>]*#cell-{reach.lost_on}".*?</a>', str(drawing.svg), re.DOTALL)
        lost = [piece for piece in pieces_of(bar) if piece[1] != "rule"]
        assert max(lost)[1] == colours[reach.lost_to]
    # The ideal on 256 is a fraction of the one on 2: bars have their own, which are equally long.
    assert strong.title.endswith("in ideal steps of each bar")
    ideals = [width for width, colour in pieces_of(str(strong.svg)) if colour == "rule"]
    assert max(ideals) == pytest.approx(min(ideals), rel=0.05)


def test_a_bubble_is_a_part_of_pipelines_alone(planted, full_rows) -> None:
    own = off([10.0] * 4, [10.0] * 4, [10.0] * 4, [10.0] * 4)
    # The exchange and the bubble take 16 - 1 - 10 = 5 ms together; the ranks waited 2, 2, 4 and 4 ms: 3.
    waits = [
        Recorded(step_ns=[16 * MS] * 2, blocked_ns=[5 * MS] * 2, bubble_ns=[ms * MS] * 2)
        for ms in (2, 2, 4, 4)
    ]
    timing = {"input_ms": 1.0, "off_step_ns": own}
    recorded = {"recorded": lambda rank: waits[rank], "bubble_ideal": 0.15}
    planted.points("pipeline:1f1b", {4: 16.0}, **timing, **recorded)
    planted.points("ddp", {4: 16.0}, **timing)
    found, other = full_rows(planted.analysed())
    assert (found["bubble, ms"], found["exposed transfer, ms"]) == ("3.00", "2.00")
    assert other["bubble, ms"] == ""
    # Stages do unlike work: that one takes longer makes no slow rank of its own.
    cells = {one.cell.strategy: one for one in planted.analysed().cells.values()}
    assert stragglers(cells["pipeline:1f1b"]) is None
    assert stragglers(cells["ddp"]) is not None
