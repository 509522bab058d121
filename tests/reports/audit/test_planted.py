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
    return {(finding.check, line) for finding in audit.findings for line in finding.rows}


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
    finding = only(audit)
    assert 1 + len(finding.also) == formulas


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
    rows = [{**cells, "host": "1"} for cells in clean] + [{**row(8, 9_400.0), "host": "2"}]
    audit = audited(rows)
    assert audit.findings == audit.notes == ()
    assert audit.not_checked == ("host",)


def test_repeats_that_differ(clean: list[Cells], row: MakeRow, audited: Audited) -> None:
    # 9500 and 9400 are 1.1 % apart, 9500 and 8900 6.3 %.
    rows = [{**cells, "seed": "1"} for cells in clean]
    audit = audited([*rows, {**row(8, 9_400.0), "seed": "2"}])
    assert audit.findings == ()
    assert [(note.check, note.rows) for note in audit.notes] == [("repeats", (6,))]
    finding = only(audited([*rows, {**row(8, 8_900.0), "seed": "2"}]))
    assert (finding.check, finding.lines) == ("repeats", (6, 4))


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


def test_a_note_does_not_hide_a_finding_of_its_row(
    clean: list[Cells], row: MakeRow, audited: Audited
) -> None:
    clean[1] = row(4, 8_000.2)
    # 32003 / 4 = 8000.75 is 8001 if it is rounded, and 8000 if it is cut off.
    for cells in clean:
        del cells["samples/s"]
    clean[1] |= {"tokens/s": "32003", "tokens/s/gpu": "8000"}
    audit = audited(clean)
    assert [note.lines for note in audit.notes] == [(3,)]
    assert told(audit) == {("neighbours", 3)}


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
    assert sum(1 + len(finding.also) for finding in audit.findings) == formulas


def test_gibibytes_are_read_as_such(audited: Audited) -> None:
    audit = audited(NCCL + "all_reduce,8,16777216,123.8,126.21,237.16\n")
    finding = only(audit)
    assert (finding.reading, finding.suspect) == ("GiB for GB", "algbw_GBps 126.21")


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


def test_a_row_that_contradicts_itself(clean: list[Cells], audited: Audited) -> None:
    for cells in clean:
        cells["notes"] = f"GBS {cells['global_batch']}"
    agreeing = audited(clean)
    assert agreeing.findings == ()
    assert agreeing.seen["contradiction"] == len(clean)
    clean[1]["notes"] = "GBS 32"
    del clean[0]["notes"]
    audit = audited(clean)
    # The account has the row that the check found fault with.
    assert audit.seen["contradiction"] == len(clean) - 1
    finding = only(audit)
    assert (finding.check, finding.lines) == ("contradiction", (3,))
    assert finding.inputs == ("global_batch 16", "global_batch 32 (in notes)")


def test_more_work_in_less_time(audited: Audited) -> None:
    heads = "model,gpus,global_batch,step_ms\n"
    assert audited(heads + "A,8,64,100.0\nA,8,128,180.0\nA,8,256,340.0\n").findings == ()
    finding = only(audited(heads + "A,8,64,100.0\nA,8,128,180.0\nA,8,256,134.0\n"))
    assert (finding.check, finding.lines) == ("order", (4, 3))


def test_numbers_that_are_computed_and_not_measured(audited: Audited) -> None:
    heads = "model,gpus,batch_per_gpu,images/s\n"
    assert audited(heads + "A,8,64,2812.3\nA,16,64,5624.9\nA,32,64,11199.0\n").findings == ()
    # 5624.6 / 2812.3 = 2 to the last of five digits.
    finding = only(audited(heads + "A,8,64,2812.3\nA,16,64,5624.6\nA,32,64,11199.0\n"))
    assert (finding.check, finding.rows) == ("digits", (2, 3))


def test_a_digit_where_the_rows_beside_agree_to_the_digit(row: MakeRow, audited: Audited) -> None:
    # 0.3 % off, which the tolerance of 1 % allows; the eleven others agree to the digit.
    rows = [{**row(4, 9_800.0 + 37 * number), "model": f"GPT {number}"} for number in range(12)]
    assert audited(rows).findings == ()
    right = rows[5]["step_ms"]
    rows[5]["step_ms"] = f"{float(right) * 0.997:.2f}"
    finding = only(audited(rows))
    assert (finding.check, finding.rows) == ("digits", (7,))


def test_efficiencies_that_do_not_follow(clean: list[Cells], audited: Audited) -> None:
    # 10000, 9800, 9500 and 9300 tokens/s a GPU.
    for cells, share in zip(clean, ("1.00", "0.98", "0.95", "0.93"), strict=True):
        cells["efficiency"] = share
    assert audited(clean).findings == ()
    clean[2]["efficiency"] = "0.88"
    finding = only(audited(clean))
    assert (finding.check, finding.lines) == ("scaling", (4, 2))
    assert finding.difference == pytest.approx(0.88 / 0.95 - 1, abs=1e-3)


def test_throughput_that_falls_to_less_than_the_exchange_explains(audited: Audited) -> None:
    heads = "model,gpus,images/s\n"
    # 0.7 of each GPU is left at 8, and 0.5.
    assert audited(heads + "A,4,1000\nA,8,1400\nA,16,2700\n").findings == ()
    finding = only(audited(heads + "A,4,1000\nA,8,1000\nA,16,1900\n"))
    assert (finding.check, finding.lines) == ("scaling", (3, 2))


def test_step_times_alone_are_a_curve(audited: Audited) -> None:
    heads = "model,gpus,step_ms\n"
    # Constant (weak) and halved (strong scaling) are possible; a third of it on twice the GPUs is not.
    assert audited(heads + "A,8,100\nA,16,101\n").findings == ()
    assert audited(heads + "A,8,100\nA,16,51\n").findings == ()
    assert told(audited(heads + "A,8,100\nA,16,33\n")) == {("scaling", 3)}


def test_a_peak_that_only_the_rows_imply(clean: list[Cells], audited: Audited) -> None:
    for cells in clean:
        cells["hardware"] = "Ascend 910B"
    assert audited(clean).findings == ()
    # As of a sparse peak: half the utilisation.
    clean[3]["mfu (%)"] = f"{float(clean[3]['mfu (%)']) / 2:.2f}"
    finding = only(audited(clean))
    assert (finding.check, finding.lines[0]) == ("utilisation", 5)
    assert "FLOP/s a GPU / MFU = one peak for a device" in (finding.formula, *finding.also)
    assert "sparse peak" in finding.reading


def test_flops_a_token_are_those_of_the_model_on_any_device(row: MakeRow, audited: Audited) -> None:
    rows = [row(gpus, 9_000.0) for gpus in (2, 4, 8)]
    for cells, device in zip(rows, ("a100_80gb", "H100 SXM", "Ascend 910B"), strict=True):
        cells["hardware"] = device
        del cells["mfu (%)"], cells["params"]
    for cells, number in zip(rows, ("9000.3", "9171.4", "9333.1"), strict=True):
        measured = row(int(cells["gpus"]), float(number))
        cells |= measured | {"hardware": cells["hardware"], "mfu (%)": "", "params": ""}
    assert audited(rows).findings == ()
    rows[1]["tflops/gpu"] = f"{float(rows[1]['tflops/gpu']) * 4 / 3:.1f}"
    finding = only(audited(rows))
    assert (finding.check, finding.lines[0], "HFU" in finding.reading) == ("utilisation", 3, True)


@pytest.mark.parametrize("words", ["Mixtral 8x7B", "MoE", "GPT with LoRA", "Qwen3-30B-A3B"])
def test_mixtures_and_adapters_are_not_held_to_6_n(clean: list[Cells], audited: Audited, words: str) -> None:
    for cells in clean:
        cells["model"] = words
        cells["params"] = str(int(cells["params"]) * 8)
    audit = audited(clean)
    assert audit.findings == ()
    assert audit.not_dense == (2, 3, 4, 5)
    for cells in clean:
        cells["model"] = "GPT"
    (finding,) = audited(clean).findings
    assert (finding.check, finding.rows) == ("utilisation", (2, 3, 4, 5))


def test_layers_and_width_tell_models_apart(clean: list[Cells], row: MakeRow, audited: Audited) -> None:
    others = [row(gpus, rate) for gpus, rate in ((2, 4_000.0), (4, 3_900.0), (8, 30_000.0))]
    for cells in (*clean, *others):
        del cells["params"], cells["tflops/gpu"], cells["mfu (%)"]
    others[2]["layers"] = "12"
    for cells in others[:2]:
        cells["layers"] = "48"
    assert audited([*clean, *others]).findings == ()


def test_a_derived_number_is_not_compared_with_itself(audited: Audited) -> None:
    # The total comes from the number a GPU: nothing is left to check it against.
    audit = audited("model,gpus,tokens/s/gpu\nA,8,1000.5\n")
    assert audit.findings == ()
    assert not audit.is_checked
