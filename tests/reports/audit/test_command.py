"""`bench audit`: what it prints, as which exit code, of CSV files and of studies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import run
from reports.analysis.study import analyse
from reports.audit.audit import audit
from reports.audit.files import read_csv
from reports.audit.study import read_study
from reports.page.frames import cells_csv, runs_csv
from results.version import VERSION

TABLES = Path(__file__).with_name("tables")
TABLE = "model,gpus,samples/s,step_ms,global_batch,mood\nA,2,10.0,900.00,8,good\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    return path


def test_a_finding_says_its_numbers(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(table)]) == 1
    # 9.95 x 0.899995 = 8.95495 to 10.05 x 0.900005 = 9.04505; 8 over their middle, 9, is 11.1 % less.
    assert capsys.readouterr().out.splitlines() == [
        "1 row; read, in so many rows: gpus (1), samples_per_s (1), step_s (1), global_batch (1)",
        "rows that each check compared: value 1, work 1",
        "saw no row, for lack of columns or of rows to compare: contradiction, batch, utilisation, "
        "bandwidth, scaling, neighbours, order, digits, repeats, units",
        "not checked, names not known (--map says what they are): mood",
        "",
        "line 2: work: samples/s x step time = global batch",
        "    numbers: samples/s 10.0; step_ms 900.00; global_batch 8",
        "    expected 8.95495 to 9.04505, found 8: 11.111% less",
        "    tolerance 1 %: the mean of a rate and that of a time differ by their squared variation: "
        "1 % allows one of 10 %",
        "",
        "1 row, 1 finding, 0 notes",
    ]


def test_a_clean_table(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text(TABLE.replace("900.00", "800.00"))
    assert run(["audit", str(table)]) == 0
    assert "1 row, 0 findings, 0 notes" in capsys.readouterr().out


def test_json_holds_the_same(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(table), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (finding,) = told["findings"]
    assert (finding["check"], finding["lines"], finding["tolerance"]) == ("work", [2], 0.01)
    assert finding["found"] == [8.0, 8.0]
    assert finding["expected"] == pytest.approx([8.95495, 9.04505], rel=1e-6)
    assert finding["difference"] == pytest.approx(8 / 9 - 1, rel=1e-5)
    assert told["not_checked"] == ["mood"]
    assert told["seen"]["work"] == 1
    assert (told["file"], told["version"], told["units"]["step_s"]) == (str(table), VERSION, "s")


def test_json_has_no_infinities(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 0.000 s may be 0: the rate that is expected has no upper end.
    table.write_text("gpus,tokens/s,tokens/s/gpu,step_s,global_batch,seq_len\n2,10,9,0.000,1000,1000\n")
    assert run(["audit", str(table), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in told["findings"]} == {"work"}
    assert None in [end for finding in told["findings"] for end in finding["expected"]]


def test_one_cause_in_many_rows_is_one_finding(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, line = TABLE.splitlines()
    table.write_text("\n".join([head, *(line.replace("A", f"A{number}") for number in range(25))]))
    assert run(["audit", str(table)]) == 1
    out = capsys.readouterr().out
    assert out.count("global batch") == 1
    assert "the same in 25 rows: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 13 more" in out


def test_every_finding_is_told_the_most_telling_in_full(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Step times of 820 to 1800 ms, where 8 / 10.0 = 800: from 2 % to half less than expected.
    head, _ = TABLE.splitlines()
    table.write_text("\n".join([head, *(f"A{ms},2,10.0,{ms}.00,8,good" for ms in range(820, 1820, 20))]))
    assert run(["audit", str(table)]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("line ")]
    assert len(told) == 50
    # 8 / 18 = 0.444; the last one in the file is the furthest off.
    assert told[0].startswith("line 51: work")
    assert told[-1] == "line 2: work: samples/s x step time = global batch: 2.439% less"


@pytest.mark.parametrize(
    "text",
    [
        "model,gpus,samples/s\nA,2,10\n",
        "model;gpus;samples/s\nA;2;about 3\n",
        "model;gpus;step_ms;global_batch\nA;2;1,234;8\n",
    ],
)
def test_a_table_that_nothing_is_checked_of_is_not_usable(
    table: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table.write_text(text)
    assert run(["audit", str(table)]) == 2
    captured = capsys.readouterr()
    assert "rows that each check compared" in captured.out
    assert "is not usable: no two of its numbers could be compared" in captured.err


def test_a_head_without_rows_is_not_usable(table: Path) -> None:
    table.write_text("model,gpus,samples/s\n")
    assert run(["audit", str(table)]) == 2


def test_a_cell_may_be_named(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # An A100's 312 TFLOP/s: 156 / 312 is an MFU of 50 %.
    table.write_text("gpu,dtype,gpus,TFLOPs/GPU,MFU (%)\nbig,half,8,156.0,25.0\n")
    assert run(["audit", str(table)]) == 0
    assert run(["audit", str(table), "--map", "gpu:big=A100", "--map", "dtype:half=bf16"]) == 1
    assert "FLOP/s a GPU / peak = MFU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.csv"], "cannot be read"),
        ([str(TABLES)], "is not a study"),
        ([str(TABLES / "dlperf.csv"), "--map", "notes"], "write COLUMN=MEANING or COLUMN:VALUE=MEANING"),
        ([str(TABLES / "dlperf.csv"), "--map", "x=gpus"], "there is no column 'x'"),
        ([], "Missing argument"),
    ],
)
def test_wrong_calls(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_a_column_may_be_named(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text("what,n = gpus,speed\nA,4,10\nA,8,19\n")
    assert run(["audit", str(table), "--map", "n = gpus=gpus", "--map", "speed=samples_per_s"]) == 0
    assert "gpus (2), samples_per_s (2)" in capsys.readouterr().out


def test_a_study_and_its_own_tables_are_clean(
    small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = small.study.collect()
    figures = analyse(small.study.name, small.study.plans(), results)
    own = audit(read_study(small.study))
    assert (own.findings, own.not_checked) == ((), ("cell_id", "run_id"))
    assert own.rows == sum(run.outcome == "ok" for run in results) > 0
    assert own.read["samples_per_s"] == own.read["step_s"] == own.read["global_batch"] == own.rows
    assert run(["audit", str(small.study.root)]) == 0
    assert run(["audit", str(small.study.root), "--map", "gpus=gpus"]) == 2
    capsys.readouterr()
    for name, text in (("cells", cells_csv(figures)), ("runs", runs_csv(figures))):
        path = tmp_path / f"{name}.csv"
        path.write_text(text)
        found = audit(read_csv(path, {}))
        assert found.findings == (), name
        assert found.read["step_s"] == found.read["samples_per_s"] > 0


def test_a_wrong_number_in_a_studys_table_is_found(small, tmp_path: Path) -> None:
    figures = analyse(small.study.name, small.study.plans(), small.study.collect())
    head, *lines = cells_csv(figures).splitlines()
    column = head.split(",").index("samples_per_s")
    cells = lines[0].split(",")
    cells[column] = str(float(cells[column]) * 1.05)
    path = tmp_path / "cells.csv"
    path.write_text("\n".join([head, ",".join(cells), *lines[1:]]) + "\n")
    (finding,) = audit(read_csv(path, {})).findings
    # The table has a throughput in samples and in units of the workload, which are samples too.
    assert (finding.check, finding.lines) == ("contradiction", (2,))
    assert finding.also == ("samples/s x step time = global batch",)
