from __future__ import annotations

import csv
from pathlib import Path

import pytest

import results.catalogue.gpus as catalogue
from results.catalogue.gpus import catalogue_name, lacks_float8, peak_flops_per_s

# What torch.cuda.get_device_name gives on such a machine, and the row of gpus.csv.
DRIVER_NAMES = {
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA GeForce RTX 4090": "RTX-4090-24GB",
    "NVIDIA H20": "H20-96GB",
    "NVIDIA H200 NVL": "H200-NVL",
    "NVIDIA H800": "H800-SXM5-80GB",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA GH200 120GB": "GH200-96GB",
    "NVIDIA GH200 144G HBM3e": "GH200-144GB",
    "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
    "Tesla V100-SXM2-32GB": "V100-SXM2-16GB",
    "Tesla V100-PCIE-16GB": "V100-PCIe",
    "Tesla T4": "T4-16GB",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA A100-SXM-80GB": "A100-SXM4-80GB",
    "NVIDIA A100-SXM-64GB": "A100-SXM-64GB",
    "NVIDIA A800-SXM4-80GB": "A800-SXM4-80GB",
    "NVIDIA L4": "L4-24GB",
    "NVIDIA L40S": "L40S-48GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "NVIDIA H100 64GB HBM2": "H100-SXM5-64GB",
    "NVIDIA H100 PCIe": "H100-PCIe-80GB",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200": "H200-SXM5-141GB",
    "NVIDIA B200": "B200-SXM",
    "NVIDIA GB200": "GB200 (per Blackwell GPU)",
    "NVIDIA B300": "B300-SXM",
    "NVIDIA B300 SXM6 AC": "B300-SXM",
    "NVIDIA GB300": "GB300 (per Blackwell GPU)",
    "AMD Instinct MI300X": "MI300X-192GB",
}
UNKNOWN = [
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA H20-3e",
    "NVIDIA H800 PCIe",
    "NVIDIA GH200",
    "NVIDIA B300 MIG 1g.34gb",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA A10G",
    "NVIDIA L40",
    "Tesla V100S-PCIE-32GB",
    "Tesla V100-FHHL-16GB",
    "AMD EPYC 9R14",
    "",
]


def _rows() -> list[dict[str, str]]:
    path = Path(catalogue.__file__).with_name("gpus.csv")
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def _peak(row: dict[str, str], precision: str) -> float | None:
    text = row[f"{precision}_tflops"]
    return float(text) if text else None


@pytest.mark.parametrize(("device", "row"), DRIVER_NAMES.items())
def test_a_name_as_its_driver_gives_it_finds_its_row(device, row) -> None:
    assert catalogue_name(device) == row


@pytest.mark.parametrize("device", UNKNOWN)
def test_a_sibling_of_another_peak_stays_unknown(device) -> None:
    assert catalogue_name(device) is None
    assert peak_flops_per_s(device, "bf16") is None


def test_every_pattern_is_reached_and_has_its_row() -> None:
    reachable = {row for _, row in catalogue._NAMES}
    assert reachable == set(DRIVER_NAMES.values())
    assert reachable <= {row["gpu"] for row in _rows()}


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.0),  # dense; the often copied 1979 is with sparsity
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312.0),
        ("NVIDIA A100 80GB PCIe", "bf16", 312.0),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA H200 NVL", "bf16", 836.0),
        ("NVIDIA H200 NVL", "fp32", None),  # not in the sources
        ("NVIDIA H800", "bf16", 989.0),
        ("NVIDIA GH200 480GB", "bf16", 989.0),
        ("NVIDIA A100-SXM-64GB", "bf16", 358.0),  # 312 x 124 / 108 SMs
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GB300", "bf16", 2500.0),  # 360 PFLOPS of fp8 over 72 GPUs, halved
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),  # sums in fp32
        ("NVIDIA L4", "bf16", 121.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # no bf16 tensor cores
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("NVIDIA H100 NVL", "fp32", None),  # not in the sources
    ],
)
def test_a_peak_is_dense_and_in_flops_per_second(device, precision, tflops) -> None:
    assert peak_flops_per_s(device, precision) == (None if tflops is None else tflops * 1e12)


def test_every_row_has_a_name_of_its_own_a_source_and_a_confidence() -> None:
    rows = _rows()
    assert len({row["gpu"] for row in rows}) == len(rows)
    assert all(row["source"].strip() for row in rows)
    assert {row["confidence"] for row in rows} <= {"high", "medium", "low"}


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row["gpu"])
def test_dense_peaks_double_from_a_width_to_the_next(row) -> None:
    # A sparse figure among dense ones, the usual slip, would make a ratio of 1 or 4.
    halves = [("tf32_dense", "bf16_dense"), ("bf16_dense", "fp8_dense")]
    for wide, narrow in halves:
        first, second = _peak(row, wide), _peak(row, narrow)
        assert first is None or second is None or 1.9 <= second / first <= 2.1
    fp16, bf16 = _peak(row, "fp16_dense"), _peak(row, "bf16_dense")
    assert bf16 is None or bf16 == fp16


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row["gpu"])
def test_tensor_cores_are_faster_than_plain_fp32(row) -> None:
    # tf32 is held by its ratio to bf16 above; on a GeForce it is no faster than fp32.
    fp32, tf32, fp16 = (_peak(row, name) for name in ("fp32", "tf32_dense", "fp16_dense"))
    assert fp32 is None or fp16 is None or 1.9 * fp32 < fp16
    assert fp32 is None or tf32 is None or fp32 <= tf32


def test_the_peak_in_float8_is_twice_that_in_bf16_and_older_cards_are_known_to_have_none() -> None:
    """The data sheets double it, and round."""
    for row in catalogue._rows().values():
        if row["fp8_dense_tflops"]:
            ratio = float(row["fp8_dense_tflops"]) / float(row["bf16_dense_tflops"])
            assert ratio == pytest.approx(2, rel=0.03)
            assert lacks_float8(row["gpu"]) == (row["gpu"] == "MI300X-192GB")
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "float8") == 1979e12
    assert lacks_float8("NVIDIA A100-SXM4-80GB")
    # The catalogue has no peak of this one, and a name that it does not know may have such products.
    assert not lacks_float8("NVIDIA H200 NVL")
    assert not lacks_float8("another")
