"""The output of nccl-tests as a network table, in the forms that its versions and launchers print."""

from __future__ import annotations

import pytest

from harness.features.network.nccl_tests import read_nccl_tests
from results.errors import StoreError, UsageError
from results.network import NetworkTable

HEAD = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
"""
COLUMNS = """\
#
#                                              out-of-place                     in-place
#       size    count  type redop root  time  algbw   busbw #wrong   time  algbw   busbw #wrong
#        (B) (elements)                 (us) (GB/s)  (GB/s)          (us) (GB/s)  (GB/s)
"""
ALL_REDUCE = """\
           8        2 float  sum   -1  22.32   0.00    0.00      0  21.97   0.00    0.00      0
    33554432  8388608 float  sum   -1  386.4  86.84  151.97      0  387.1  86.68  151.69    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 75.9
#
"""
ALL_GATHER = "  1048576  32768 float none  -1  100.0  10.49  9.18  0  99.0  10.59  9.27  0\n"
"""A row of 8 ranks has algbw 1,048,576 B / 100 us = 10.49 GB/s, and busbw 7 / 8 of it."""
OLDER = "  33554432  8388608 float sum  386.4  86.84  151.97  0e+00  387.1  86.68  151.69  0e+00\n"
GPU = "NVIDIA A100-SXM4-80GB"


def ranks(*hosts: str, gpu: str = GPU, group: str = "Group  0 ") -> str:
    lines = []
    for rank, host in enumerate(hosts):
        lines.append(f"#  Rank {rank:2} {group}Pid {100 + rank} on {host:>10} device {rank:2} [0x07] {gpu}\n")
    return "".join(lines)


EIGHT = ranks(*["node-a"] * 8)


@pytest.fixture
def read(tmp_path):
    """Write outputs under the names of their keywords, and read them."""

    def of(**outputs: str) -> NetworkTable:
        paths = [tmp_path / f"{name}.txt" for name in outputs]
        for path, text in zip(paths, outputs.values(), strict=True):
            path.write_text(text)
        return read_nccl_tests(paths)

    return of


def test_an_output_is_read_with_its_devices_and_library(read) -> None:
    version = "# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809\n"
    starting = "# Collective test starting: all_reduce_perf\n"
    table = read(log=version + starting + HEAD + EIGHT + COLUMNS + ALL_REDUCE)
    small, large = table.measurements
    assert (large.collective, large.payload_bytes, large.ranks, large.nodes) == ("all-reduce", 2**25, 8, 1)
    # The out-of-place columns.
    assert large.median_s == pytest.approx(386.4e-6)
    assert large.busbw == pytest.approx(151.97e9, rel=1e-3)
    assert small.payload_bytes == 8
    assert (table.facts.device_name, table.facts.library) == (GPU, "NCCL 2.28.9")
    assert (table.source, table.facts.backend, table.absent) == ("nccl-tests", "nccl", {})


def test_the_shard_of_an_all_gather_is_a_part_of_the_size(read) -> None:
    (found,) = read(all_gather_8=HEAD + EIGHT + COLUMNS + ALL_GATHER).measurements
    assert (found.payload_bytes, found.array_bytes) == (131072, 1048576)
    assert found.busbw == pytest.approx(9.18e9, rel=1e-3)


def test_older_columns_and_what_launchers_put_before_lines_are_read(read) -> None:
    older = COLUMNS.replace(" root", "").replace("#wrong", " error")
    text = "".join(
        f"[1,0]<stdout>:{line}\n"
        for line in (HEAD + ranks(*["node-a"] * 8, group="") + older + OLDER).splitlines()
    )
    labelled = "".join(f"0: {line}\n" for line in (HEAD + EIGHT + COLUMNS + ALL_REDUCE).splitlines())
    assert read(all_reduce=text).measurements[0].median_s == pytest.approx(386.4e-6)
    assert len(read(all_reduce=labelled).measurements) == 2


def test_hosts_are_nodes_and_files_are_one_table(read) -> None:
    # 16 ranks: busbw 86.84 x 2 x 15 / 16.
    two = ALL_REDUCE.replace("151.97", "162.83")
    hosts = [*["node-a"] * 8, *["node-b"] * 8]
    table = read(
        all_reduce_1=HEAD + EIGHT + COLUMNS + ALL_REDUCE,
        all_reduce_2=HEAD + ranks(*hosts) + COLUMNS + two,
    )
    assert set(table.groups) == {("all-reduce", 8, 1), ("all-reduce", 16, 2)}


def test_one_size_several_times_is_pooled_unless_the_times_disagree(read) -> None:
    again = ALL_REDUCE.replace("386.4  86.84  151.97", "430.2  78.00  136.49")
    found = read(
        all_reduce_1=HEAD + EIGHT + COLUMNS + ALL_REDUCE, all_reduce_2=HEAD + EIGHT + COLUMNS + again
    ).measurements[1]
    assert (found.runs, found.low_s, found.high_s) == (2, pytest.approx(386.4e-6), pytest.approx(430.2e-6))
    assert found.median_s == pytest.approx((386.4e-6 + 430.2e-6) / 2)
    far = ALL_REDUCE.replace("386.4  86.84  151.97", "843.0  39.80   69.66")
    with pytest.raises(
        UsageError, match=r"386\.4 us in line 17 of .*1\.txt and 843 us in line 17 of .*2\.txt"
    ):
        read(all_reduce_1=HEAD + EIGHT + COLUMNS + ALL_REDUCE, all_reduce_2=HEAD + EIGHT + COLUMNS + far)


@pytest.mark.parametrize(
    "row",
    [
        # Torn: fewer columns; a digit of the time; of the bandwidth.
        "    67108864 16777216 float  sum   -1  772.8   86.8\n",
        ALL_REDUCE.splitlines()[1].replace("386.4", "86.4") + "\n",
        ALL_REDUCE.splitlines()[1].replace("151.97", "15.97") + "\n",
        # The test found wrong sums.
        ALL_REDUCE.splitlines()[1].replace("151.97      0", "151.97     17") + "\n",
        ALL_REDUCE.splitlines()[1].replace("386.4", "nan") + "\n",
    ],
)
def test_a_damaged_row_is_left_out_with_its_reason(read, row) -> None:
    table = read(all_reduce=HEAD + EIGHT + COLUMNS + ALL_REDUCE.splitlines()[0] + "\n" + row)
    assert [found.payload_bytes for found in table.measurements] == [8]
    assert len(table.absent) == 1


def test_ranks_that_are_not_all_named_contradict_the_bandwidth(read) -> None:
    with pytest.raises(UsageError, match="busbw"):
        read(all_reduce=HEAD + ranks(*["node-a"] * 4) + COLUMNS + ALL_REDUCE.splitlines()[1] + "\n")


@pytest.mark.parametrize(
    ("outputs", "word"),
    [
        ({"all_reduce": "hello\n"}, "row"),
        ({"all_reduce": ""}, "row"),
        ({"log": HEAD + EIGHT + COLUMNS + ALL_REDUCE}, "all_reduce.txt"),
        ({"all_reduce": HEAD + ranks("a", "a", group="Group  1 ") + COLUMNS + ALL_REDUCE}, "groups"),
        ({"all_reduce": HEAD + COLUMNS + ALL_REDUCE}, "0 ranks"),
        (
            {
                "all_reduce_1": HEAD + EIGHT + COLUMNS + ALL_REDUCE,
                "all_reduce_2": HEAD + ranks(*["b"] * 8, gpu="NVIDIA H100") + COLUMNS + ALL_REDUCE,
            },
            "H100",
        ),
    ],
)
def test_what_cannot_be_one_table_is_refused(read, outputs, word) -> None:
    with pytest.raises(UsageError, match=word):
        read(**outputs)


def test_two_tests_in_one_log_are_two_collectives(read) -> None:
    first = "# Collective test starting: all_reduce_perf\n" + HEAD + EIGHT + COLUMNS + ALL_REDUCE
    second = "# Collective test starting: all_gather_perf\n" + HEAD + EIGHT + COLUMNS + ALL_GATHER
    assert set(read(log=first + second).groups) == {("all-reduce", 8, 1), ("all-gather", 8, 1)}


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(StoreError, match=r"missing\.txt"):
        read_nccl_tests([tmp_path / "missing.txt"])
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match="row"):
        read_nccl_tests([tmp_path / "binary.txt"])
