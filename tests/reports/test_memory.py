"""Memory against what there is, worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from reports.analysis.memory import CellMemory, cell_memories
from reports.analysis.study import StudyFigures, analyse
from reports.page.section import Paragraph, Table
from reports.page.sections.memory import memory_section
from reports.page.tables import frame_of
from reports.text import NOTHING
from results.outcome import Outcome

GIB = 2**30
MIB = 2**20


@pytest.fixture
def hosts(planted) -> object:
    """Four CPU ranks in two runs; a rank's record says 300 MiB (and its number, in bytes), 200 MiB idle."""
    planted.points("ddp", {4: [10.0, 11.0]})
    planted.plan(repeats=2)
    return planted


def only(study: StudyFigures) -> CellMemory:
    (memory,) = cell_memories(study)
    return memory


def test_on_a_cpu_the_largest_rank_stands_for_all_of_its_host(hosts) -> None:
    found = only(hosts.analysed())
    # Rank 3: 300 MiB and 3 bytes; 4 ranks on one host of 8 GiB.
    assert found.rss_peak_bytes == 300 * MIB + 3
    assert found.rss_over_idle_bytes == 100 * MIB + 3
    assert (found.ranks_per_host, found.host_bytes) == (4, 8 * GIB)
    assert found.host_share == pytest.approx(1200 / 8192, rel=1e-6)
    assert found.share == found.host_share
    assert (found.device_peak_bytes, found.device_bytes, found.device_share) == (None, None, None)


def test_ranks_on_more_hosts_share_less(hosts) -> None:
    assert only(hosts.analysed(hosts=("a", "b"))).ranks_per_host == 2
    assert only(hosts.analysed(hosts=("a", "b"))).host_share == pytest.approx(600 / 8192, rel=1e-6)
    # 4 ranks on 3 hosts: one host has 2.
    assert only(hosts.analysed(hosts=("a", "b", "c"))).ranks_per_host == 2


def test_the_largest_of_all_counted_runs_is_taken(hosts) -> None:
    first, second = hosts.study.collect()
    told = [msgspec.structs.replace(first, rss_peak_bytes=GIB), second]
    assert only(hosts.analysed(told)).rss_peak_bytes == GIB


def test_what_was_not_recorded_has_no_share(hosts) -> None:
    found = only(hosts.analysed(rss_peak_bytes=None))
    assert (found.rss_peak_bytes, found.host_share, found.share) == (None, None, None)


@pytest.fixture
def gpus(tmp_path, new_study, new_environment) -> object:
    """One cell of two GPUs of 80 GiB."""
    planted = new_study(tmp_path / "gpus", device="cuda")
    planted.points("ddp", {2: 10.0}, environment=new_environment(device_memory_bytes=80 * GIB))
    planted.plan(repeats=1)
    return planted


def test_on_a_gpu_it_is_a_share_of_one_device(gpus) -> None:
    found = only(gpus.analysed(device_allocated_peak_bytes=60 * GIB))
    assert (found.device_peak_bytes, found.device_bytes) == (60 * GIB, 80 * GIB)
    assert found.device_share == found.share == pytest.approx(0.75)
    assert (found.host_bytes, found.host_share) == (None, None)


def test_the_section_says_what_is_fullest(hosts, gpus) -> None:
    assert _texts(hosts.analysed()) == [
        "Fullest: ddp on 4, batch 8 a replica, at most 14.6 % of the host's 8.00 GiB.",
    ]
    assert _texts(gpus.analysed(device_allocated_peak_bytes=60 * GIB)) == [
        "Fullest: ddp on 2, batch 8 a replica, 75.0 % of a GPU's 80.0 GiB.",
    ]
    assert _texts(gpus.analysed(device_allocated_peak_bytes=76 * GIB)) == [
        "Fullest: ddp on 2, batch 8 a replica, 95.0 % of a GPU's 80.0 GiB: there is hardly room for more.",
    ]
    assert _texts(gpus.analysed()) == []


def test_cells_that_ran_out_of_memory_are_named_also_where_nothing_else_is(planted) -> None:
    planted.points("ddp", {2: 1}, outcome=Outcome.OUT_OF_MEMORY, reason="allocating 2 GiB")
    planted.points("ddp", {4: 1}, outcome=Outcome.CRASHED, reason="no kernel")
    assert _texts(planted.analysed()) == ["1 cell ran out of memory: ddp on 2, batch 8 a replica."]


def test_without_figures_and_failures_of_memory_there_is_nothing_to_show(planted) -> None:
    planted.series("weak", "ddp", [2], batch=8)
    assert memory_section(planted.analysed([])) is None


def test_the_page_has_a_row_a_way_to_train_and_the_full_table_one_a_cell(hosts, gpus, full_rows) -> None:
    (table,) = [block for block in memory_section(hosts.analysed()).blocks if isinstance(block, Table)]
    assert table.data.texts == (("ddp", "4", "8", "300 MiB", "14.6 %", "300 MiB"),)
    (row,) = full_rows(hosts.analysed())
    told = {name: row[name] for name in ("peak on the host, MiB", "over idle, MiB", "of the memory, %")}
    assert told == {"peak on the host, MiB": "300", "over idle, MiB": "100", "of the memory, %": "14.6"}
    (row,) = full_rows(gpus.analysed(device_allocated_peak_bytes=60 * GIB))
    assert (row["peak of a device, GiB"], row["memory of a device, GiB"]) == ("60.0", "80.0")


def test_measured_memory_stands_beside_its_prediction(planted, full_rows) -> None:
    """On a CPU the memory above idle is compared with it: 100 MiB on one rank, 150 on two."""
    cells = [planted.points("ddp", {n: 10.0}, memory_mib=mib)[0] for n, mib in ((1, 100), (2, 152), (4, 200))]
    planted.plan(repeats=1, predicted_bytes={cells[0].id: 80 * MIB, cells[1].id: 160 * MIB})
    study = planted.analysed()
    # 100 / 80 = 1.25, 152 / 160 = 0.95.
    assert [one.over_prediction for one in cell_memories(study)] == [1.25, pytest.approx(0.95), None]
    (text,) = _texts(study)
    told = (
        "2 cells took 0.95 times (ddp on 2, batch 8 a replica) to 1.25 times (ddp on 1, batch 8 a replica) "
        "the memory predicted."
    )
    assert text.endswith(f" {told}")
    (table,) = [block for block in memory_section(study).blocks if isinstance(block, Table)]
    # The fullest cell has no prediction.
    assert table.data.titles[-3:] == ("over idle", "predicted", "measured over predicted")
    assert table.data.texts[0][-3:] == ("200 MiB", NOTHING, NOTHING)
    rows = full_rows(study)
    assert [row["predicted, MiB"] for row in rows] == ["80.0", "160", ""]
    assert [row["measured over predicted"] for row in rows] == ["1.25", "0.950", ""]
    assert list(frame_of([study], "cells")["predicted_peak_bytes"].dropna()) == [80 * MIB, 160 * MIB]


def test_a_workload_without_a_prediction_says_why(planted) -> None:
    (cell,) = planted.points("ddp", {2: 10.0}, memory_mib=100)
    planted.plan(repeats=1, unpredicted={cell.workload: "it reads values"})
    (text,) = _texts(planted.analysed())
    assert text.endswith(f" The memory of {cell.workload} was not predicted, because it reads values.")
    planted.plan(repeats=1, predicted_bytes={cell.id: 80 * MIB})
    (text,) = _texts(planted.analysed())
    assert text.endswith(" the memory predicted.")


def test_on_a_gpu_the_peak_of_the_allocator_is_held_against_the_prediction(gpus) -> None:
    (plan,) = gpus.study.plans()
    told = msgspec.structs.replace(plan, predicted_bytes={plan.cells[0].id: 48 * GIB})
    results = gpus.analysed(device_allocated_peak_bytes=60 * GIB).runs
    study = analyse("memory", [told], results)
    (text,) = _texts(study)
    assert text.endswith(" ddp on 2, batch 8 a replica took 1.25 times the memory predicted.")
    (table,) = [block for block in memory_section(study).blocks if isinstance(block, Table)]
    assert table.data.texts[0][-2:] == ("48.0 GiB", "1.25")


def _texts(study: StudyFigures) -> list[str]:
    return [block.text for block in memory_section(study).blocks if isinstance(block, Paragraph)]
