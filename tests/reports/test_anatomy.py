"""The anatomy of a step: its table, its bars, and what it says where there is no budget."""

from __future__ import annotations

import msgspec
import pytest

from reports.analysis.budget import CellBudget, budget
from reports.analysis.stragglers import stragglers
from reports.analysis.study import StudyFigures, analyse
from reports.page.budget_bars import _budget as paint
from reports.page.budget_bars import budget_bars
from reports.page.section import Bullets, Drawings, Paragraph, Section, Table
from reports.page.sections.anatomy import anatomy_section
from reports.page.svg import axes
from reports.page.tables import CellWords
from results.outcome import Evidence, Outcome
from results.recorded import Recorded

MS = 1_000_000


def analysed(planted) -> StudyFigures:
    return analyse("study", planted.study.plans(), planted.study.collect())


def table_of(section: Section, caption: str) -> list[dict[str, str]]:
    [found] = [block for block in section.blocks if isinstance(block, Table) and block.caption == caption]
    titles = [column.title for column in found.data.columns]
    return [dict(zip(titles, row, strict=True)) for row in found.data.texts]


def off(*rank_ms: list[float]):
    """Of each rank its four steps without exchange."""
    return lambda rank: [round(ms * MS) for ms in rank_ms[rank]]


@pytest.fixture
def study(planted, new_timing) -> StudyFigures:
    """Single on 1, and ddp on 2 whose parts are worked out in the tests."""
    single = planted.series("weak", "single", [1], batch=8)[0]
    ddp = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan(repeats=2)
    planted.run(single, new_timing(step_ms=10.0, input_ms=0.5, first_step_ms=40.0))
    planted.run(single, new_timing(step_ms=10.0, input_ms=0.5, first_step_ms=60.0))
    own = off([10.0, 12.0, 10.0, 12.0], [8.0, 8.0, 12.0, 12.0])
    planted.run(ddp, new_timing(step_ms=15.0, input_ms=1.0, off_step_ns=own))
    planted.run(ddp, new_timing(step_ms=17.0, input_ms=1.0, off_step_ns=own))
    return analysed(planted)


def test_the_table_has_every_part_with_interval_share_and_method(study) -> None:
    alone, ddp = table_of(anatomy_section(study), "The budget of a step")
    # Compute: (44 + 40) / 8. Slowest of each step 10, 12, 12, 12: 11.5, and so a wait of 1.
    # Steps of 14 and 16 without input: transfer 2.5 and 4.5. The mean step is 16.
    assert ddp["step time"] == "16.0 ms"
    assert ddp["input"] == "1.00 ms, 6.2 %"
    assert ddp["compute"] == "10.5 ms, 65.6 %"
    assert ddp["exposed transfer"] == "3.50 ms (2.50 to 4.50), 21.9 %"
    assert ddp["exposed wait"] == "1.00 ms (1.00 to 1.00), 6.2 %"
    assert ddp["other"] == "0 ns, 0.0 %"
    assert (ddp["method"], ddp["runs"]) == ("on-off", "2 measured")
    # One rank exchanges nothing, exactly.
    assert alone["compute"] == "9.50 ms, 95.0 %"
    assert alone["exposed transfer"] == "0 ns, 0.0 %"
    assert alone["method"] == "one rank"
    assert "bubble" not in ddp


def test_what_is_done_once_stands_apart(study) -> None:
    once = table_of(anatomy_section(study), "Data, host and what is done once, beside the steps")
    assert once[0]["data loading"] == "500 us"
    assert once[0]["first step"] == "50.0 ms"
    assert once[0]["set-up"] == "500 ms"
    # Nothing is dispatched to a CPU, and no attempt was planted that knows the start-up.
    assert (once[0]["host dispatch"], once[0]["start-up"]) == ("-", "-")
    assert once[1]["first step"] == "-"


def test_spread_is_folded_and_phases_are_not(study) -> None:
    tables = {block.caption: block for block in anatomy_section(study).blocks if isinstance(block, Table)}
    assert tables["Spread of single steps"].folded
    assert not tables["Step time by phase"].folded


def test_every_part_is_defined(study) -> None:
    section = anatomy_section(study)
    defined = {definition.anchor for definition in section.definitions}
    columns = [
        column for block in section.blocks if isinstance(block, Table) for column in block.data.columns
    ]
    anchors = {column.anchor for column in columns if (column.anchor or "").startswith("method-part-")}
    assert anchors == {f"method-part-{part}" for part in ("input", "compute", "transfer", "wait", "other")}
    assert anchors < defined


def test_a_large_residual_is_warned_of(planted, new_timing) -> None:
    cell = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan(repeats=1)
    own = off([10.0] * 4, [10.0] * 4)
    planted.run(cell, new_timing(step_ms=20.0, input_ms=2.0, off_step_ns=own))
    [run] = planted.study.collect()
    # 20 = 2 + 10 + 8, until 2 of the 8 are lost on the way.
    less = msgspec.structs.replace(run.budget.transfer_ns, value=6.0 * MS)
    lacking = msgspec.structs.replace(run, budget=msgspec.structs.replace(run.budget, transfer_ns=less))
    found = [anatomy_section(analyse("study", planted.study.plans(), [one])) for one in (run, lacking)]
    warnings = [[block.items for block in one.blocks if isinstance(block, Bullets)] for one in found]
    assert warnings[0] == []
    assert warnings[1] == [
        (
            "ddp x 2, 8 / 16: the parts come from steps that took 10.0 % less time than the timed ones: the "
            "machine changed in between.",
        )
    ]


def test_compute_that_is_encoding_and_decoding_is_told_of(planted, new_timing) -> None:
    cells = [
        planted.series("weak", "ddp", [2], batch=8, **fields)[0]
        for fields in ({"compression": "topk:0.01"}, {"compression": "int8"}, {})
    ]
    planted.plan(repeats=2)
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
    bullets = [one.items for one in anatomy_section(analysed(planted)).blocks if isinstance(one, Bullets)]
    assert bullets == [
        (
            "gpt-nano: compute contains encoding and decoding (CPU time): ddp + topk:0.01 x 2, 8 / 16: "
            "3.00 ms.",
        )
    ]


def test_where_a_cell_has_no_budget_the_reason_is_given(small) -> None:
    section = anatomy_section(analysed(small))
    told = [block.text for block in section.blocks if isinstance(block, Paragraph)]
    assert any(text.startswith("No budget of ddp x 2, 8 / 16, ddp x 4, 8 / 32") for text in told)


def test_input_of_synthetic_data_is_said_not_to_be_measured(planted, new_timing) -> None:
    synthetic = planted.series("weak", "ddp", [2], batch=8)[0]
    real = planted.series("weak", "ddp", [2], batch=8, dataset="digits")[0]
    planted.plan(repeats=1)

    def told() -> list[str]:
        blocks = anatomy_section(analysed(planted)).blocks
        texts = [block.text for block in blocks if isinstance(block, Paragraph)]
        return [text for text in texts if "not measured" in text]

    planted.run(real, new_timing(step_ms=10.0))
    assert told() == []
    planted.run(synthetic, new_timing(step_ms=10.0))
    [text] = told()
    assert text.startswith("Input of 1 of 2 cells was not measured: the data are synthetic")


def test_a_study_without_figures_says_so(planted, new_timing) -> None:
    cell = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan()
    planted.run(cell, new_timing(step_ms=1, outcome=Outcome.CRASHED, reason="no"))
    section = anatomy_section(analysed(planted))
    assert section.blocks == (Paragraph("No cell has a figure.", "plain"),)


def budgets_of(study: StudyFigures) -> list[CellBudget]:
    return [one for cell in study.cells.values() if (one := budget(cell)) is not None]


def test_bars_are_the_parts_end_to_end_on_one_scale(study) -> None:
    alone, ddp = budgets_of(study)
    with axes(width=4, height=2) as drawn:
        # Only one row of the two is on this sheet: it is drawn on the scale of both.
        paint(drawn, [alone, ddp], [alone])
        widths = [bar.get_width() for bar in drawn.patches]
        lefts = [bar.get_x() for bar in drawn.patches]
        limits = drawn.get_xlim()
    # Input, compute, transfer, wait, other, in ms.
    assert widths == pytest.approx([0.5, 9.5, 0.0, 0.0, 0.0])
    assert lefts == pytest.approx([0.0, 0.5, 10.0, 10.0, 10.0])
    assert limits == pytest.approx((0.0, 1.03 * 16.0))


def test_a_bar_of_an_emulated_cell_says_so(planted, new_timing) -> None:
    cells = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan(repeats=1)
    for cell, evidence in zip(cells, (Evidence.MEASURED, Evidence.EMULATED), strict=True):
        own = off(*[[10.0] * 4] * cell.gpus)
        planted.run(cell, new_timing(step_ms=12.0, off_step_ns=own, evidence=evidence))
    [block] = [one for one in anatomy_section(analysed(planted)).blocks if isinstance(one, Drawings)]
    svg = str(block.drawings[0].svg)
    assert ">ddp x 2, 8 / 16<" in svg
    assert ">ddp x 4, 8 / 32, emulated<" in svg


def test_a_part_below_zero_has_no_bar(planted, new_timing) -> None:
    cell = planted.series("weak", "ddp", [2], batch=8)[0]
    planted.plan(repeats=1)
    # Blocks with the exchange took 9, those without it 10: -1 of transfer.
    planted.run(cell, new_timing(step_ms=10.0, input_ms=1.0, off_step_ns=off([10.0] * 4, [10.0] * 4)))
    [one] = budgets_of(analysed(planted))
    assert one.part_ns["transfer"] == pytest.approx(-1 * MS)
    with axes(width=4, height=2) as drawn:
        paint(drawn, [one], [one])
        assert min(bar.get_width() for bar in drawn.patches) == 0.0


def test_more_cells_than_a_sheet_holds_go_on_in_the_next_drawing(study) -> None:
    alone, ddp = budgets_of(study)
    words = CellWords(study)
    labels = {one.cell.id: words.label(one.cell) for one in (alone, ddp)}
    drawings = budget_bars([("work", [alone, ddp] * 13)], labels)
    assert len(drawings) == 2
    [section] = [block for block in anatomy_section(study).blocks if isinstance(block, Drawings)]
    assert len(section.drawings) == 1


def test_a_bubble_stands_beside_its_ideal_as_shares_of_the_step(planted, new_timing) -> None:
    piped = planted.series("weak", "pipeline:1f1b", [4], batch=8)[0]
    ddp = planted.series("weak", "ddp", [4], batch=8)[0]
    planted.plan(repeats=1)
    own = off([10.0] * 4, [10.0] * 4, [10.0] * 4, [10.0] * 4)
    # The exchange and the bubble take 16 - 1 - 10 = 5 ms together; the ranks waited 2, 2, 4 and 4 ms: 3.
    waits = [
        Recorded(step_ns=[16 * MS] * 2, blocked_ns=[5 * MS] * 2, bubble_ns=[ms * MS] * 2)
        for ms in (2, 2, 4, 4)
    ]
    timing = {"step_ms": 16.0, "input_ms": 1.0, "off_step_ns": own}
    planted.run(piped, new_timing(**timing, recorded=lambda rank: waits[rank], bubble_ideal=0.15))
    planted.run(ddp, new_timing(**timing))
    section = anatomy_section(analysed(planted))
    found, other = table_of(section, "The budget of a step")
    assert list(found)[-5:] == ["bubble", "ideal bubble", "other", "method", "runs"]
    assert (found["bubble"], found["ideal bubble"]) == ("3.00 ms, 18.8 %", "15.0 %")
    assert found["exposed transfer"].startswith("2.00 ms")
    assert (other["bubble"], other["ideal bubble"]) == ("-", "-")
    # Stages do unlike work: that one takes longer makes no slow rank of its own.
    cells = {one.cell.strategy: one for one in analysed(planted).cells.values()}
    assert stragglers(cells["pipeline:1f1b"]) is None
    assert stragglers(cells["ddp"]) is not None
    (definition,) = [one for one in section.definitions if one.anchor == "method-part-bubble"]
    assert "Transfers of activations that nothing hides are in it" in str(definition)
