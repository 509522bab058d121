"""Overlap, bandwidth, disagreement and slow links by hand; what limits is said, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from reports.analysis.communication import (
    PooledLinkPeak,
    communication,
    communication_finding,
    link_peaks,
    slow_links,
)
from results.outcome import Evidence
from results.statistics import Metric

MS = 1e6


@pytest.fixture
def one(new_cell, new_run, new_budget, new_communication, figures_of):
    """A cell's communication from one run: times in ms, fields of what was recorded as they are."""

    def made(
        *,
        exposed: float | None = 2.0,
        budget: tuple[float, ...] | None = (7.0, 2.0, 1.0),
        method: str = "on-off",
        gpus: int = 4,
        link: float | None = None,
        run: dict[str, object] | None = None,
        **recorded: object,
    ):
        cell = new_cell(gpus, link_mbit_per_s=link)
        result = new_run(
            cell,
            10.0,
            **({"exposed_ms": exposed} if "exposed_ns" not in (run or {}) else {}),
            budget=None if budget is None else new_budget(*budget, method=method),
            communication=new_communication(**recorded) if recorded else None,
            **(run or {}),
        )
        return communication(figures_of(cell, [result]))

    return made


def test_the_overlap_is_what_is_in_flight_and_neither_exposed_nor_waited_for(one) -> None:
    found = one(exposed=2.4, total_ns=5 * MS)
    # 5 ms in flight, 2 of exposed transfer and 1 of exposed wait: 2 of 5 hide. The blocks are 2.4 ms apart,
    # some of it skew, which the budget has in the wait.
    assert found.seen_ns == pytest.approx(3 * MS)
    assert found.overlap == pytest.approx(0.4)
    # It is never negative, nor more than all.
    assert one(total_ns=2.5 * MS).overlap == 0.0
    assert one(exposed=-0.5, budget=(10.5, -0.5, 0.0), total_ns=5 * MS).overlap == 1.0


def test_unmeasured_figures_are_none(one) -> None:
    bare = one(exposed=None, budget=None)
    names = (
        *("exposed_ns", "transfer_ns", "transfer_share", "seen_ns", "overlap", "peak"),
        *("bus_bytes_per_s", "bandwidth_share"),
    )
    assert {name: getattr(bare, name) for name in names} == dict.fromkeys(names)
    assert (bare.disagreement, bare.recorder_share, bare.payloads) == (0, 0, {})
    assert one(total_ns=0.0).overlap is None


def test_without_on_off_blocks_there_is_the_recorders_transfer(one) -> None:
    found = one(exposed=None, budget=(7.0, 1.5, 0.5), method="recorded", total_ns=4 * MS, blocked_ns=9 * MS)
    assert found.exposed_ns is None
    assert found.transfer_ns.value == pytest.approx(1.5 * MS)
    assert found.overlap == pytest.approx(0.5)
    # It is the same method: there is nothing to disagree with.
    assert found.disagreement == 0


@pytest.mark.parametrize(("blocked", "apart"), [(5.1, -0.21), (3.0, 0.0), (0.9, 0.21)])
def test_methods_differ_by_a_share_of_the_step(one, blocked, apart) -> None:
    # On-off blocks see 2 + 1 ms of a step of 10.
    found = one(total_ns=5 * MS, blocked_ns=blocked * MS).disagreement
    assert found == pytest.approx(apart)


@pytest.mark.parametrize(("blocked", "apart"), [(7.0, 0.0), (9.1, -0.21), (0.9, 0.21)])
def test_waiting_for_a_thread_that_compresses_is_no_disagreement(one, blocked, apart) -> None:
    # 4 ms of the time blocked may be that of the thread: at 7, the rest are the 3 seen.
    found = one(total_ns=5 * MS, blocked_ns=blocked * MS, exchange_cpu_ns=4 * MS).disagreement
    assert found == pytest.approx(apart)


def test_figures_are_means_over_runs_the_bandwidth_bytes_over_time_and_the_peak_a_median(
    new_cell, new_run, new_communication, new_operation, figures_of
) -> None:
    cell = new_cell()
    runs = [
        new_run(
            cell,
            communication=new_communication(
                [new_operation("allreduce", 4, payload, count=count, transfer_ns=payload)],
                total_ns=total * MS,
                bus_bytes_per_s=bus,
                peak_bus_bytes_per_s=peak,
            ),
        )
        for payload, count, total, bus, peak in (
            (1000.0, 1.0, 4.0, 3e8, 1e9),
            (3000.0, 2.0, 6.0, 5e8, 8e8),
        )
    ]
    found = communication(figures_of(cell, runs))
    assert found.mean("total_ns") == pytest.approx(5 * MS)
    # 3e8 for 1 us and 5e8 for 3 us are 1,800 bytes in 4 us.
    assert found.bus_bytes_per_s == pytest.approx(4.5e8)
    assert found.peak.bytes_per_s == pytest.approx(9e8)
    assert found.bandwidth_share == pytest.approx(0.5)
    assert found.payloads == {("allreduce", 4): 2000.0}
    # With one run that recorded nothing, nothing is said of the cell.
    partial = communication(figures_of(cell, [*runs, new_run(cell)]))
    assert (partial.mean("total_ns"), partial.payloads, partial.bus_bytes_per_s) == (None, {}, None)


def test_kinds_and_group_sizes_stay_apart(
    new_cell, new_run, new_communication, new_operation, figures_of
) -> None:
    cell = new_cell()
    operations = [
        new_operation("allreduce", 4, 10.0),
        new_operation("allreduce", 2, 20.0),
        new_operation("send", 2, 30.0, transfer_ns=None, wait_ns=None),
    ]
    run = new_run(cell, communication=new_communication(operations))
    assert communication(figures_of(cell, [run, run])).payloads == {
        ("allreduce", 4): 10.0,
        ("allreduce", 2): 20.0,
        ("send", 2): 30.0,
    }


PEAK = 1e8
LIMITS = [
    (2.0, 1.06e8, 4, "more than the link carries"),
    (2.0, 1.05e8, 4, "consistent with a full link"),
    (2.0, 0.70e8, 4, "consistent with a full link"),
    (2.0, 0.69e8, 4, "consistent with a link that is the main limit"),
    (2.0, 0.50e8, 4, "consistent with a link that is the main limit"),
    # Four operations of 1 MB are not small, 100 of 40 kB are.
    (
        2.0,
        0.20e8,
        4,
        "latency or contention that limits, not the bandwidth, with 4 operations of 977 KiB a step",
    ),
    (2.0, 0.20e8, 100, "latency that limits, not the bandwidth, with 100 operations of 39.1 KiB a step"),
    # Of a tenth of the step or less nothing is said.
    (1.0, 0.75e8, 4, None),
    (1.01, 0.75e8, 4, "consistent with a full link"),
    (-2.0, 0.75e8, 4, None),
    (2.0, None, 4, None),
]


@pytest.mark.parametrize(("exposed", "bus", "operations", "text"), LIMITS)
def test_bandwidth_and_size_of_operations_decide_what_limits(one, exposed, bus, operations, text) -> None:
    found = one(
        budget=(7.0, exposed, 1.0),
        bus_bytes_per_s=bus,
        peak_bus_bytes_per_s=PEAK,
        run={"exchange_operations": operations},
    )
    finding = communication_finding(found.figures)
    assert (finding is None) == (text is None)
    assert (text or "") in (finding or "")


def test_an_exposed_time_that_may_be_nothing_limits_nothing(
    new_cell, new_run, new_communication, figures_of
) -> None:
    cell = new_cell()
    recorded = new_communication(bus_bytes_per_s=0.8e8, peak_bus_bytes_per_s=PEAK)
    runs = [new_run(cell, 10.0, exposed, communication=recorded) for exposed in (-1.0, 6.0)]
    assert communication_finding(figures_of(cell, runs)) is None
    apart = [new_run(cell, 10.0, exposed, communication=recorded) for exposed in (1.0, 6.0)]
    assert communication_finding(figures_of(cell, apart)) is not None


@pytest.mark.parametrize(("peak", "slow"), [(61e6, True), (63e6, False), (125e6, False)])
def test_half_of_the_nominal_rate_is_a_slow_link(one, peak, slow) -> None:
    # 1 Gbit/s are 125 MB/s; nothing is exposed.
    found = one(exposed=0.0, link=1000.0, peak_bus_bytes_per_s=peak)
    expected = (
        "Slow link: plain all-reduces reach only 61.0 MB/s, 48.8 % of the 125 MB/s of a 1gbit link."
        if slow
        else None
    )
    assert communication_finding(found.figures) == expected


@pytest.fixture
def peaks(new_cell, new_run, new_communication, new_ranks, figures_of):
    """Cells of some sizes by the peak of their link in MB/s, four ranks a node."""

    def made(by_size: dict[int, float], *, run: dict[str, object] | None = None, **fields: object):
        cells = []
        for gpus, peak in by_size.items():
            cell = new_cell(gpus, **fields)
            ranks = new_ranks([10.0] * gpus, node=[rank // 4 for rank in range(gpus)])
            recorded = new_communication(peak_bus_bytes_per_s=peak * 1e6)
            cells.append(
                figures_of(cell, [new_run(cell, communication=recorded, ranks=ranks, **(run or {}))])
            )
        return cells

    return made


def test_a_size_with_half_of_the_peak_of_a_smaller_one_has_a_slow_link(peaks) -> None:
    [(gpus, finding)] = slow_links(peaks({2: 900, 4: 1000, 8: 490, 16: 510, 32: 480, 64: 100}))
    assert gpus == 8
    assert finding == (
        "Slow link: plain all-reduces reach only 490 MB/s on 8 ranks (CPU) on 2 nodes, 49.0 % of the 1.00 "
        "GB/s on 4 ranks (CPU) on 1 node; below half at 32, 64 too."
    )


def test_a_link_that_is_quicker_at_larger_sizes_is_not_slow_at_small_ones(peaks) -> None:
    assert slow_links(peaks({2: 100, 4: 500, 8: 1000})) == []


def test_networks_devices_and_stand_ins_are_not_compared(peaks) -> None:
    fast = peaks({4: 1000})
    assert slow_links([*fast, *peaks({8: 100}, link_mbit_per_s=1000.0)]) == []
    assert slow_links([*fast, *peaks({8: 100}, device="cuda")]) == []
    assert slow_links([*fast, *peaks({8: 100}, run={"evidence": Evidence.EMULATED})]) == []
    assert len(slow_links([*fast, *peaks({8: 100})])) == 1


def test_the_median_peak_of_several_launches_of_a_size_counts(peaks) -> None:
    # The median of 480 and 530 is 505.
    good, bad = peaks({8: 530}), peaks({8: 480}, compression="bf16")
    assert slow_links([*peaks({4: 1000}), *bad, *good]) == []
    assert slow_links([*peaks({4: 1000}), *good, *bad]) == []
    assert len(slow_links([*peaks({4: 1000}), *bad])) == 1


def test_every_run_disturbed_is_said_beside_the_finding(one) -> None:
    recorded = {"bus_bytes_per_s": 0.8e8, "peak_bus_bytes_per_s": PEAK}
    found = communication_finding(one(run={"disturbed": True}, **recorded).figures)
    assert found.endswith("consistent with a full link; other processes disturbed every run.")


def test_a_size_whose_peak_varied_is_neither_slow_nor_a_measure_of_others(peaks) -> None:
    steady, low, high = peaks({4: 1000}), peaks({8: 200}), peaks({8: 410}, compression="bf16")
    assert len(slow_links([*steady, *low])) == len(slow_links([*steady, *high])) == 1
    assert slow_links([*steady, *low, *high]) == []
    assert len(slow_links([*high, *peaks({16: 190})])) == 1
    assert slow_links([*low, *high, *peaks({16: 190})]) == []


def test_the_peak_is_of_all_cells_on_one_network_at_one_size(peaks) -> None:
    cells = [*peaks({8: 100}), *peaks({8: 200}, compression="bf16"), *peaks({8: 150}, compression="fp16")]
    others = [
        *peaks({4: 900}),
        *peaks({8: 900}, device="cuda"),
        *peaks({8: 900}, backend="mpi"),
        *peaks({8: 900}, link_mbit_per_s=1e5),
        *peaks({8: 900}, node_size=2),
        *peaks({8: 900}, run={"evidence": Evidence.EMULATED}),
        *peaks({8: 900}, run={"environment": None}),
    ]
    known = link_peaks([*cells, *others])
    assert len(known) == 8
    found = [communication(one, known).peak for one in cells]
    assert (
        found == [PooledLinkPeak(bytes_per_s=150e6, lowest_bytes_per_s=100e6, highest_bytes_per_s=200e6)] * 3
    )
    # By itself a cell has its own.
    assert communication(cells[0]).peak.bytes_per_s == 100e6


def test_a_peak_that_varied_makes_no_claim_about_the_nominal_rate(peaks) -> None:
    cells = [*peaks({8: 10}, link_mbit_per_s=1000.0), *peaks({8: 21}, link_mbit_per_s=1000.0, seed=1)]
    assert communication_finding(cells[0]) is not None
    assert communication_finding(cells[0], link_peaks(cells)) is None


def test_the_interval_of_one_run_is_asked_too(one) -> None:
    unsure = Metric(value=2 * MS, unit="ns", low=-1.0, high=4 * MS, samples=8, interval="t95-quads")
    recorded = {"bus_bytes_per_s": 0.8e8, "peak_bus_bytes_per_s": PEAK}
    found = one(budget=None, run={"exposed_ns": unsure}, **recorded)
    assert communication_finding(found.figures) is None
    sure = msgspec.structs.replace(unsure, low=1.0)
    found = one(budget=None, run={"exposed_ns": sure}, **recorded)
    assert communication_finding(found.figures) is not None
