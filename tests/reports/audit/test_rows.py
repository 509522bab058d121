"""Files as they come: encodings, separators, holes, and names that are on no list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.audit.audit import Audit, audit
from reports.audit.columns import HEADERS, meaning, unit_meaning
from reports.audit.hardware import highest_peak, peaks
from reports.audit.phrases import phrases, precision
from reports.audit.rows import table
from reports.audit.text import audit_json, lines
from results.errors import UsageError

Audited = Callable[..., Audit]
TABLE = "model,gpus,samples/s,step_ms,global_batch\nA,2,10.0,800,8\n"


@pytest.mark.parametrize("raw", [b"", b"\n", b"  \r\nA,1\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_a_wrong_call(audited: Audited, raw: bytes) -> None:
    with pytest.raises(UsageError, match="is empty"):
        audited(raw)


def test_a_head_without_rows_is_clean(audited: Audited) -> None:
    assert audited("model,gpus,samples/s\n").rows == 0


@pytest.mark.parametrize(
    "raw",
    [
        TABLE.encode("utf-8-sig"),
        TABLE.encode("utf-16"),
        TABLE.replace(",", ";").encode(),
        TABLE.replace(",", "\t").encode(),
        TABLE.replace("\n", "\r\n").encode(),
        TABLE.replace("A,2", '"A\nof two lines",2').encode(),
        (TABLE + "\n,,,,\n").encode(),
    ],
)
def test_the_same_table_in_other_clothes(audited: Audited, raw: bytes) -> None:
    audit = audited(raw)
    # 10.0 samples/s x 0.8 s = 8.
    assert (audit.rows, audit.findings, audit.not_checked) == (1, (), ())
    assert dict(audit.read) == {"gpus": 1, "samples_per_s": 1, "step_s": 1, "global_batch": 1}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("mod\xe8le,gpus\nA,1\n".encode("latin-1"), "not utf-8 text"),
        (b"model,gpus\nA\0,1\n", "NUL"),
        (b"gpus,gpus\n1,2\n", "stands twice"),
        (b"gpus,model\n1,2,3\n", "line 2 has 3 cells"),
        (b'gpus,model\n1,"open\n', "is no CSV"),
        (b"colour,taste\nred,sweet\n", "no column is recognised"),
    ],
)
def test_what_is_no_table(audited: Audited, raw: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audited(raw)


@pytest.mark.parametrize("text", ["", "-", "NaN", "n/a", "None"])
def test_holes_are_holes(audited: Audited, text: str) -> None:
    audit = audited(TABLE.replace("800", text))
    assert audit.findings == ()
    assert "step_s" not in audit.read


def test_what_cannot_be_read_is_told_not_guessed(audited: Audited) -> None:
    audit = audited("model,gpus,step_ms,speed\nA,2,about 3,7\n")
    assert dict(audit.unreadable) == {"step_ms": 1}
    assert audit.not_checked == ("speed",)
    audit = audited("model;gpus;step_ms\nA;2;1,234\n")
    assert dict(audit.unreadable) == {"step_ms": 1}
    audit = audited("gpus,throughput,unit\n2,5.0,widgets/s\n")
    assert dict(audit.unreadable) == {"throughput in widgets/s": 1}


def test_the_line_of_a_finding_is_that_of_the_file(audited: Audited) -> None:
    audit = audited(TABLE + '"B\nwide",2,10.0,800,8\n\nC,2,10.0,900,8\n')
    assert [finding.lines for finding in audit.findings] == [(6,)]


def test_a_column_that_the_user_names(audited: Audited) -> None:
    table = "model,gpus,rate,iter,global_batch\nA,2,10.0,900,8\n"
    assert audited(table).findings == ()
    audit = audited(table, {"rate": "samples_per_s", "iter": "step_ms"})
    # 10.0 x 0.9 s = 9, not 8: found is 11.1 % less.
    assert [finding.difference for finding in audit.findings] == [pytest.approx(8 / 9 - 1, rel=1e-3)]


@pytest.mark.parametrize(
    ("mapping", "words"),
    [({"gone": "step_ms"}, "there is no column 'gone'"), ({"step_ms": "step_fortnights"}, "no such meaning")],
)
def test_a_mapping_to_nothing(audited: Audited, mapping: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audited(TABLE, mapping)


@pytest.mark.parametrize(
    ("header", "name", "scale"),
    [
        ("Tokens/s", "tokens_per_s", 1.0),
        ("tokens/s/GPU", "tokens_per_s_device", 1.0),
        ("MFU (%)", "mfu", 0.01),
        ("Step Time (ms)", "step_s", 1e-3),
        ("step_ns", "step_s", 1e-9),
        ("time_us", "time_s", 1e-6),
        ("busbw_GBps", "busbw", 1e9),
        ("busbw_Gbps", "busbw", 1.25e8),
        ("algbw_GiB_per_s", "algbw", 1073741824.0),
        ("TFLOPs/GPU", "flops_per_s_device", 1e12),
        ("Model TFLOP / sec / GPU", "flops_per_s_device", 1e12),
        ("Per-GPU teraFLOP/s", "flops_per_s_device", 1e12),
        ("#-GPUs", "gpus", 1.0),
        ("# of GPUs", "gpus", 1.0),
        ("GA", "accumulation", 1.0),
        ("MBS", "micro_batch", 1.0),
        ("images/sec", "samples_per_s", 1.0),
        ("sentences/s", "samples_per_s", 1.0),
        ("Tokens/sec", "tokens_per_s", 1.0),
        ("Throughput (tokens/second/device)", "tokens_per_s_device", 1.0),
        ("avg. iter time (msec)", "step_s", 1e-3),
        ("AlgBW (GB/s)", "algbw", 1e9),
    ],
)
def test_names_and_their_units(header: str, name: str, scale: float) -> None:
    meant = meaning(header)
    assert meant is not None
    assert (meant.name, meant.scale) == (name, pytest.approx(scale))


@pytest.mark.parametrize("header", ["busbw_gbps", "speed", "step", "throughput_x", "", "%"])
def test_names_that_are_on_no_list(header: str) -> None:
    assert meaning(header) is None


def test_units_of_a_value() -> None:
    for text, name, scale in (
        ("ms/iteration (median)", "step_s", 1e-3),
        ("tokens/s total", "tokens_per_s", 1.0),
        ("examples/s/GPU (p50)", "samples_per_s_device", 1.0),
        ("img/sec", "samples_per_s", 1.0),
    ):
        meant = unit_meaning(text)
        assert meant is not None
        assert (meant.name, meant.scale) == (name, scale)
    assert unit_meaning("tokens/fortnight") is None


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("H100", (756e12, 989e12)),
        ("DGX H100", (989e12, 989e12)),
        ("8x H100 80GB HBM3", (989e12, 989e12)),
        ("A100-80GB", (312e12, 312e12)),
        ("A100 (one node)", (312e12, 312e12)),
        ("H100 PCIe", (756e12, 756e12)),
        ("H100 96GB HBM2e, 500 W limit", None),
        ("H100 MIG 1g.10gb", None),
        ("H800", (989e12, 989e12)),
        ("H900", None),
        ("A100 and H100", None),
    ],
)
def test_spellings_of_devices(name: str, bf16: tuple[float, float] | None) -> None:
    peak = peaks(name, "bf16")
    assert (None if peak is None else (peak.low, peak.high)) == bf16


def test_another_card_of_a_family_is_bounded_by_its_fastest() -> None:
    assert highest_peak("H100 96GB HBM2e, 500 W limit", "fp8") == 1979e12
    assert highest_peak("V100", "") == 125e12
    assert highest_peak("Ascend 910B", "bf16") is None


@pytest.mark.parametrize("name", ["AllReduce", "all_reduce_perf", "all-reduce", "ALLREDUCE"])
def test_spellings_of_collectives(audited: Audited, name: str) -> None:
    # 16777216 bytes / 123.8 us = 135.52 GB/s; x 2 x 7 / 8 = 237.16.
    heads = "Op,# of GPUs,size (B),time (us),algbw (GB/s),busbw (GB/s)\n"
    assert audited(heads + f"{name},8,16777216,123.8,135.52,237.16\n").findings == ()
    assert len(audited(heads + f"{name},8,16777216,123.8,135.52,200.00\n").findings) == 1


def test_a_source_is_not_read_for_sizes(audited: Audited) -> None:
    heads = "source,strategy,gpus,micro_batch,grad_accum,global_batch\n"
    audit = audited(heads + "IEEE TP8 2025,FSDP2,8,2,1,16\n")
    assert audit.findings == ()
    assert audit.read.keys() == {"gpus", "micro_batch", "accumulation", "global_batch"}
    # TP8 in the strategy is a size: 8 / 8 x 2 = 2, not 16.
    assert len(audited(heads + "IEEE,TP=8,8,2,1,16\n").findings) == 1


@pytest.mark.parametrize("separator", [";", "\t"])
def test_decimal_commas(audited: Audited, separator: str) -> None:
    # 10,5 samples/s x 761,9 ms = 8,0.
    lines = ["model;gpus;samples/s;step_ms;global_batch", "A;2;10,5;761,9;8", "B;2;1.050,5;7,615;8"]
    audit = audited("\n".join(lines).replace(";", separator))
    assert (audit.findings, audit.unread) == ((), ())
    assert audit.seen["work"] == 2
    audit = audited("\n".join(lines).replace(";", separator).replace("761,9", "861,9"))
    assert [finding.lines for finding in audit.findings] == [(2,)]


def test_a_comma_that_may_be_either_is_not_read(audited: Audited) -> None:
    audit = audited("model;gpus;samples/s;step_ms;global_batch\nA;2;1,050;761.9;8\n")
    (cell,) = audit.unread
    assert (cell.line, cell.column, cell.text, cell.reason) == (2, "samples/s", "1,050", "it is no number")


def test_a_column_of_percent(audited: Audited) -> None:
    heads = "gpu,dtype,gpus,TFLOPs/GPU,MFU\n"
    # 156 / 312 = 50 %.
    assert audited(heads + "A100,bf16,8,156.0,50.0\nA100,bf16,16,140.4,45.0\n").findings == ()
    assert audited(heads + "A100,bf16,8,156.0,0.500\nA100,bf16,16,140.4,0.450\n").findings == ()


def test_prefixes(audited: Audited) -> None:
    # 10.0k tokens/s x 1.6384 s = 8 x 2048.
    heads = "params,gpus,tokens/s,step_s,global_batch,seq_len\n"
    audit = audited(heads + "350m,8,10.0k,1.6384,8,2048\n7b,8,10.0k,1.6384,8,2048\n")
    assert (audit.findings, audit.seen["work"]) == ((), 2)
    assert audit.read["parameters"] == 2


def _said(text: str) -> dict[str, str]:
    return {meant.name: digits for meant, digits in phrases(text).numbers}


def test_phrases() -> None:
    assert _said("microbatch 8 x grad_accum 1; GBS 4096; 2115 tok/s/GPU") == {
        "micro_batch": "8", "accumulation": "1", "global_batch": "4096", "tokens_per_s_device": "2115",
    }  # fmt: skip
    assert _said("FSDP8 x TP8 x PP8 x CP1 1F1B") == {
        "data_parallel": "8", "tensor": "8", "pipeline": "8", "context": "1",
    }  # fmt: skip
    assert _said("MFU 40.27%; HFU 53.69%; 398 model TFLOP/s per GPU") == {
        "mfu": "40.27", "hfu": "53.69", "flops_per_s_device": "398",
    }  # fmt: skip
    assert _said("TP=4, MBS=2, GA: 8") == {"tensor": "4", "micro_batch": "2", "accumulation": "8"}
    assert _said("FSDP 1 x CP 8") == {"data_parallel": "1", "context": "8"}
    assert phrases("line 12; GBS 8; dropout").rest == "; ; dropout"


@pytest.mark.parametrize(
    "text",
    [
        "MFU 33-39% stated",
        "GBS 8 or GBS 16",
        "DDP FP32",
        "FSDP FULL_SHARD",
        "30-40 tok/s/GPU",
        "GBS 8-16",
        "FSDP1",
        "FSDP2 + compile",
        "FSDP2 xformers",
        "IEEE TP 2025",
        "Proc. DP5a",
    ],
)
def test_what_says_nothing(text: str) -> None:
    assert _said(text) == {}


def test_precisions() -> None:
    assert precision("amp_bf16") == "bf16"
    assert precision("FSDP + Float8") == "fp8"
    assert precision("bf16 or fp16") is None
    assert precision("mixed") is None


NASTY = st.sampled_from(
    "0|1|2|8|0.0|0.4|1e308|1e30|1e-30|-1|inf|nan|1,000|8B|9e300T|50%|x|GBS 8|TP0 x PP2|all_reduce|a100_80gb|"
    "bf16|ms/step|tokens/s|A".split("|")
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(HEADERS)), min_size=1, max_size=14, unique=True).flatmap(
        lambda heads: st.tuples(
            st.just(heads),
            st.lists(st.lists(NASTY, min_size=len(heads), max_size=len(heads)), max_size=6),
        )
    )
)
def test_no_table_makes_it_stumble(drawn: tuple[list[str], list[list[str]]]) -> None:
    heads, rows = drawn
    found = audit(table(heads, list(enumerate(rows, start=2)), {}))
    assert found.rows == len(rows)
    assert audit_json(found, "table.csv")
    assert list(lines(found))
