"""Each kind of error, planted alone, is found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reports.audit.audit import Audit
from reports.audit.findings import Disagreement

Cells = dict[str, str]
Audited = Callable[..., Audit]
MakeRow = Callable[[int, float], Cells]


def told(audit: Audit) -> set[tuple[str, int]]:
    return {(finding.check, finding.lines[0]) for finding in audit.findings}


def only(audit: Audit) -> Disagreement:
    (finding,) = audit.findings
    return finding


def test_a_clean_table_has_no_finding(clean: list[Cells], audited: Audited) -> None:
    audit = audited(clean)
    assert (audit.rows, audit.findings, audit.notes, audit.not_checked) == (4, (), (), ())
    assert set(audit.read.values()) == {4}
    assert len(audit.read) == 16


@pytest.mark.parametrize(
    ("column", "text", "check", "formulas"),
    [
        ("step_ms", "901.00", "work", 2),
        ("samples/s", "21.000", "work", 2),
        ("grad_accum", "3", "batch", 1),
        ("dp", "4", "batch", 1),
        ("mfu (%)", "29.50", "utilisation", 2),
        ("mfu (%)", "127.00", "utilisation", 3),
        ("step_ms", "-835.92", "value", 1),
        ("step_ms", "inf", "value", 1),
    ],
)
def test_one_wrong_number(
    clean: list[Cells], audited: Audited, column: str, text: str, check: str, formulas: int
) -> None:
    clean[1][column] = text
    audit = audited(clean)
    assert told(audit) == {(check, 3)}
    assert len({finding.formula for finding in audit.findings}) == formulas


def test_utilisation_that_the_models_size_does_not_give(clean: list[Cells], audited: Audited) -> None:
    # Every row counts half as many FLOPs more: in proportion to each other, and to the peak, but not 6 N.
    for cells in clean:
        cells["tflops/gpu"] = f"{float(cells['tflops/gpu']) * 1.5:.1f}"
        cells["mfu (%)"] = f"{float(cells['mfu (%)']) * 1.5:.2f}"
    audit = audited(clean)
    assert told(audit) == {("utilisation", line) for line in (2, 3, 4, 5)}
    assert {finding.formula for finding in audit.findings} == {
        "tokens/s a GPU x (6 N + attention) = model FLOP/s a GPU"
    }
    # 10000.0 x 8,455,716,864 = 84.557e12 expected, 84.6 x 1.5 = 126.9e12 found.
    assert audit.findings[0].difference == pytest.approx(126.9 / 84.55716864 - 1, rel=1e-3)


def test_without_layers_the_attention_is_bounded(clean: list[Cells], audited: Audited) -> None:
    for cells in clean:
        del cells["layers"], cells["d_model"]
    assert audited(clean).findings == ()
    # d >= (10 N / 12)^(1/3) = 1002.2; N s / d = 2.468e9: at most 9.716e9 FLOPs a token, and 10 % more.
    for cells in clean:
        cells["tflops/gpu"] = f"{float(cells['tokens/s/gpu']) * 9.716e9 * 1.11 / 1e12:.1f}"
        del cells["mfu (%)"]
    assert told(audited(clean)) == {("utilisation", line) for line in (2, 3, 4, 5)}


def test_a_point_above_the_line(clean: list[Cells], row: MakeRow, audited: Audited) -> None:
    clean[2] = row(8, 12_000.0)
    finding = only(audited(clean))
    assert (finding.check, finding.lines) == ("scaling", (4, 2))
    assert finding.difference == pytest.approx(0.2, abs=1e-4)


def test_noise_above_the_line_is_none(clean: list[Cells], row: MakeRow, audited: Audited) -> None:
    clean[1] = row(4, 10_490.0)
    assert audited(clean).findings == ()
    clean[1] = row(4, 10_510.0)
    assert told(audited(clean)) == {("scaling", 3)}


def test_a_size_below_both_neighbours(clean: list[Cells], row: MakeRow, audited: Audited) -> None:
    clean[1] = row(4, 8_000.0)
    finding = only(audited(clean))
    assert (finding.check, finding.lines) == ("neighbours", (3, 2, 4))
    # The nearer neighbour is 9500 at 8: 8000 / 9500 = 0.8421.
    assert finding.difference == pytest.approx(-0.1579, abs=1e-4)
    clean[1] = row(4, 9_100.0)
    assert audited(clean).findings == ()


def test_a_size_above_both_neighbours(row: MakeRow, audited: Audited) -> None:
    rows = [row(2, 10_000.0), row(4, 7_000.0), row(8, 9_000.0), row(16, 6_500.0)]
    assert told(audited(rows)) == {("neighbours", 3), ("neighbours", 4)}
    rows = [row(2, 10_000.0), row(4, 7_000.0), row(8, 7_300.0), row(16, 6_500.0)]
    assert audited(rows).findings == ()


def test_a_row_twice_with_other_numbers(clean: list[Cells], row: MakeRow, audited: Audited) -> None:
    finding = only(audited([*clean, row(8, 8_000.0)]))
    assert (finding.check, finding.lines) == ("repeats", (6, 4))


def test_a_row_twice_is_a_note(clean: list[Cells], audited: Audited) -> None:
    audit = audited([*clean, dict(clean[2])])
    assert audit.findings == ()
    assert [(note.check, note.lines) for note in audit.notes] == [("repeats", (6, 4))]


def test_runs_that_are_told_apart_are_no_repeats(clean: list[Cells], row: MakeRow, audited: Audited) -> None:
    rows = [{**cells, "run": "1"} for cells in clean] + [{**row(8, 9_400.0), "run": "2"}]
    audit = audited(rows)
    assert audit.findings == audit.notes == ()
    assert audit.not_checked == ("run",)


def test_a_row_in_another_unit(row: MakeRow, audited: Audited) -> None:
    rows = [row(2, 1_000.0), row(4, 980.0), row(8, 950_000.0), row(16, 930.0)]
    for cells in rows:
        del cells["tflops/gpu"], cells["mfu (%)"]
    finding = only(audited(rows))
    assert (finding.check, finding.lines) == ("units", (4,))
    # The median of 1000, 980, 950000 and 930 is 990.
    assert finding.difference == pytest.approx(950_000 / 990 - 1, rel=1e-3)


@pytest.mark.parametrize(
    ("factor", "words"),
    [(1000.0, "prefix"), (1024.0, "binary"), (4.0, "all devices")],
)
def test_the_reading_of_a_wrong_unit(clean: list[Cells], audited: Audited, factor: float, words: str) -> None:
    clean[1]["tokens/s/gpu"] = f"{9_800 * factor:.1f}"
    finding = only(audited(clean))
    assert (finding.check, finding.lines) == ("work", (3,))
    assert words in finding.reading


def test_digits_cut_off_are_a_note(clean: list[Cells], audited: Audited) -> None:
    # 39203 / 4 = 9800.75 is 9801 if it is rounded, and 9800 if it is cut off; 39205 / 4 = 9801.25 is neither.
    del clean[1]["samples/s"]
    clean[1] |= {"tokens/s": "39203", "tokens/s/gpu": "9800"}
    audit = audited(clean)
    assert audit.findings == ()
    assert [(note.check, note.lines, note.reading) for note in audit.notes] == [
        ("work", (3,), "the last digit was cut off, not rounded")
    ]
    clean[1] |= {"tokens/s": "39205", "tokens/s/gpu": "9800"}
    assert told(audited(clean)) == {("work", 3)}


def test_accumulation_that_is_no_whole_number(clean: list[Cells], audited: Audited) -> None:
    for cells in clean:
        del cells["grad_accum"]
    assert audited(clean).findings == ()
    clean[2]["micro_batch"] = "3"
    # 32 / (3 x 4) = 2.67.
    finding = only(audited(clean))
    assert (finding.check, finding.lines) == ("batch", (4,))
    assert finding.found == pytest.approx((32 / 12, 32 / 12))


NCCL = "collective,gpus,bytes,time_us,algbw_GBps,busbw_GBps\n"


@pytest.mark.parametrize(
    ("line", "formulas"),
    [
        # 16777216 bytes / 123.8 us = 135.52 GB/s; x 2 x 7 / 8 = 237.16.
        ("all_reduce,8,16777216,123.8,135.52,237.16", 0),
        # x 7 / 8 = 118.58.
        ("all_gather,8,16777216,123.8,135.52,118.58", 0),
        ("reduce_scatter,8,16777216,123.8,135.52,118.58", 0),
        ("broadcast,8,16777216,123.8,135.52,135.52", 0),
        # The wrong factor, in both equations that have one.
        ("all_gather,8,16777216,123.8,135.52,237.16", 2),
        # GiB for GB: 126.21.
        ("all_reduce,8,16777216,123.8,126.21,237.16", 2),
        # An unknown collective has no factor; the bandwidth of the algorithm is checked all the same.
        ("gossip,8,16777216,123.8,135.52,999.00", 0),
        ("gossip,8,16777216,123.8,136.00,999.00", 1),
        # As tiny as it is printed: 8 bytes / 13.67 us = 0.0006 GB/s.
        ("all_reduce,8,8,13.67,0.00,0.00", 0),
    ],
)
def test_bandwidths(audited: Audited, line: str, formulas: int) -> None:
    audit = audited(NCCL + line + "\n")
    assert {finding.check for finding in audit.findings} <= {"bandwidth"}
    assert len(audit.findings) == formulas


def test_gibibytes_are_read_as_such(audited: Audited) -> None:
    audit = audited(NCCL + "all_reduce,8,16777216,123.8,126.21,237.16\n")
    assert [finding.reading for finding in audit.findings] == ["GiB for GB", "GiB for GB"]


def test_a_printed_efficiency_above_one(audited: Audited) -> None:
    heads = "model,gpus,throughput,unit\n"
    audit = audited(heads + "VGG,512,68%,scaling efficiency vs 1 GPU\n")
    assert audit.findings == ()
    audit = audited(heads + "VGG,512,108%,scaling efficiency vs 1 GPU\n")
    assert told(audit) == {("scaling", 2)}


def test_strong_scaling_is_compared_too(audited: Audited) -> None:
    # Global batch 64 throughout: 800, 390 and 90 ms. 8 times faster on 4 times the devices, less 10 ms.
    heads = "model,gpus,global_batch,step_ms\n"
    audit = audited(heads + "A,1,64,800\nA,2,64,405\nA,4,64,90\n")
    assert told(audit) == {("scaling", 4)}
    assert only(audit).difference == pytest.approx(800 / (4 * 90) - 1, rel=1e-2)


def test_other_batches_are_another_configuration(audited: Audited) -> None:
    heads = "model,gpus,global_batch,micro_batch,step_ms\n"
    assert audited(heads + "A,1,64,1,800\nA,2,64,8,90\n").findings == ()
