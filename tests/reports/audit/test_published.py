"""Published tables, in excerpts, and what there is to say of each; docs/audit.md works the numbers out."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.audit.audit import Audit, audit
from reports.audit.files import read_csv
from reports.audit.findings import CUT

TABLES = Path(__file__).with_name("tables")


def audited(name: str) -> Audit:
    return audit(read_csv(TABLES / f"{name}.csv", {}))


def test_llm_foundry() -> None:
    found = audited("llm_foundry")
    (finding,) = found.findings
    assert (finding.check, finding.lines) == ("scaling", (6, 7))
    # (1096819 / 16) / (505177 / 8) = 68551.19 / 63147.13 = 1.08558.
    assert finding.difference == pytest.approx(0.08558, abs=1e-5)
    # 1083366 / 512 = 2115.95, printed 2115; 550022 / 256 = 2148.52, 2148; 281491 / 128 = 2199.15, 2199;
    # 2175091 / 32 = 67971.59, 67971; 1096819 / 16 = 68551.19, 68551; 505177 / 8 = 63147.13, 63147.
    assert [(note.rows, note.reading) for note in found.notes] == [((2, 3, 5), CUT)]
    assert found.read["mfu"] == found.read["flops_per_s_device"] == found.read["global_batch"] == 6


def test_torchtitan() -> None:
    # Line 3: 16 a rank x 32 = 512 = 2 x 256. Line 4: 32 x 8 = 256, and 8 x 8 x 8 = 512 GPUs.
    found = audited("torchtitan")
    assert (found.findings, found.notes) == ((), ())
    assert (found.read["global_batch"], found.read["batch_per_replica"]) == (2, 2)
    # `MFU 33-39%` is no number.
    assert "mfu" not in found.read


def test_dlperf() -> None:
    # 348.62; 1226.38 / 4 = 306.60; 2632.93 / 8 = 329.12: 4 GPUs are below 1 and 8.
    (finding,) = audited("dlperf").findings
    assert (finding.check, finding.lines) == ("neighbours", (3, 2, 4))
    assert finding.difference == pytest.approx(306.595 / 329.11625 - 1, abs=1e-6)


def test_pytorch_ddp() -> None:
    # 319 x 0.1, 71 x 0.447 = 31.737 and 71 x 0.45 = 31.95 samples a step: 32 to 1 %.
    found = audited("pytorch_ddp")
    assert (found.findings, found.notes) == ((), ())
    assert found.read["step_s"] == found.read["samples_per_s_device"] == 3


def test_vtrain() -> None:
    # Line 2: 16 / (2 x 1) is 8 micro-batches; lines 4 and 5 differ in the micro-batch, and are not compared.
    found = audited("vtrain")
    assert (found.findings, found.notes) == ((), ())
    assert found.read["micro_batch"] == found.read["data_parallel"] == found.rows == 5


def test_nccl_tests() -> None:
    # Line 4: 67108864 bytes / 324.7 us = 206.68 GB/s, x 2 x 7 / 8 = 361.69; printed 206.67 and 361.67.
    found = audited("nccl_tests")
    assert (found.findings, found.notes) == ((), ())
    assert found.read["busbw"] == found.rows == 7


@pytest.mark.parametrize("digit", ["algbw_GBps", "busbw_GBps", "time_us", "bytes"])
def test_a_mistyped_digit_of_a_published_bandwidth_is_seen(tmp_path: Path, digit: str) -> None:
    head, *lines = (TABLES / "nccl_tests.csv").read_text().splitlines()
    cells = lines[3].split(",")
    number = head.split(",").index(digit)
    cells[number] = str(float(cells[number]) * 1.01)
    path = tmp_path / "table.csv"
    path.write_text("\n".join([head, ",".join(cells)]) + "\n")
    assert {finding.check for finding in audit(read_csv(path, {})).findings} == {"bandwidth"}
