"""The files that nccl-tests and rccl-tests write, against what they print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.features.network.nccl_tests import read_nccl_tests
from results.errors import UsageError
from results.network import NetworkTable

GPU = "NVIDIA H100 80GB HBM3"
SIZES = ((1048576, 50.0, 20.97152, 36.70016), (33554432, 386.4, 86.838592, 151.967536))
"""Bytes, microseconds, algbw and busbw of eight ranks: algbw is 1,048,576 B / 50 us, busbw is 7 / 4 of it."""
PRINTED = "# nccl-tests version 2.17.9 nccl-library=22809\n# Collective test starting: all_reduce_perf\n" + (
    "".join(f"#  Rank {rank} Group  0 Pid {rank} on h1 device {rank} [0x07] {GPU}\n" for rank in range(8))
    + "#  size count type redop root time algbw busbw #wrong\n"
    + "".join(f"{size} 9 float sum -1 {us} {alg:.2f} {bus:.2f} 0\n" for size, us, alg, bus in SIZES)
)


def nccl(*, hosts: str = "h1 " * 8, group: int = 0, **more: int) -> dict[str, Any]:
    """A file of `-J` of a process a name of `hosts`, each with one device unless `more` says otherwise."""
    devices = [{"group": group, "hostname": host, "device_info": GPU} for host in hosts.split()]
    results = [
        {"size": size, "out_of_place": {"time": us, "alg_bw": alg, "bus_bw": bus, "nwrong": 0.0}}
        for size, us, alg, bus in SIZES
    ]
    config = {"nthreads": 1, "ngpus": 1, "devices": devices} | more
    return {"args": ["./all_reduce_perf"], "nccl_version": 22809, "config": config, "results": results}


def rccl(name: str = "AllReduce", *, mpi: bool = True, **more: object) -> list[dict[str, Any]]:
    """The rows of `-Z json`, out of place and in place."""
    counts = {"nodes": 1, "ranks": 8, "ranksPerNode": 8, "gpusPerRank": 1} if mpi else {"gpus": 8}
    return [
        {"numCycle": 0, "name": name, **counts, "size": size, "type": "float", "redop": "sum"}
        | {"inPlace": place, "time": us + 500 * place, "algBw": alg, "busBw": bus, "wrong": "0", **more}
        for size, us, alg, bus in SIZES
        for place in (0, 1)
    ]


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Strings are in quotes, as rccl-tests writes them."""
    head = [{"name": "collective", "wrong": "#wrong"}.get(name, name) for name in rows[0]]
    return "\n".join([",".join(head), *(",".join(map(json.dumps, row.values())) for row in rows)])


@pytest.fixture
def read(tmp_path):
    def of(text: str | list[Any] | dict[str, Any], ranks_per_node: int | None = 8) -> NetworkTable:
        (tmp_path / "file").write_text(text if isinstance(text, str) else json.dumps(text, indent=1))
        return read_nccl_tests([tmp_path / "file"], ranks_per_node)

    return of


@pytest.mark.parametrize(
    "form", [nccl(), rccl(), rccl(mpi=False), as_csv(rccl()), as_csv(rccl(mpi=False)), rccl(wrong="N/A")]
)
def test_a_file_gives_the_table_of_the_text(form, read) -> None:
    text, found = read(PRINTED), read(form)
    assert found.measurements == text.measurements
    assert [one.median_s for one in found.measurements] == pytest.approx([50e-6, 386.4e-6])
    assert found.facts == text.facts or isinstance(form, list | str)


def test_ranks_and_hosts_follow_from_devices_or_from_the_ranks_on_each(read) -> None:
    for form, on_each in ((nccl(hosts="h1 h2", ngpus=4), None), (rccl(), 4)):
        assert set(read(form, on_each).groups) == {("all-reduce", 8, 2)}


def test_wrong_and_torn_rows_are_left_out(read) -> None:
    document = nccl()
    document["results"][1]["out_of_place"]["nwrong"] = 17.0
    for form, reason in ((document, "17"), (as_csv(rccl()[:3])[:-12], "busbw")):
        table = read(form)
        assert [one.payload_bytes for one in table.measurements] == [SIZES[0][0]]
        assert reason in next(iter(table.absent.values()))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (rccl(), "--gpus-per-node"),
        (json.dumps(nccl())[:-400], "damaged"),
        ({"benchmarks": []}, "config"),
        ([{}], "inplace"),
        ([row for row in rccl() if row["inPlace"]], "without -O 0"),
        (nccl(group=1), "one at a time"),
        (rccl(nodes=2), "one at a time"),
        (rccl("AlltoAllv", mpi=False), "AlltoAllv"),
    ],
)
def test_what_is_no_table_is_refused_with_a_sentence(form, words, read) -> None:
    with pytest.raises(UsageError, match=words):
        read(form, None)
