"""The sentences and drawings of three sections of the page, and the size of the map of ranks."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from reports.analysis.stragglers import stragglers
from reports.page.section import Bullets, Drawings, Paragraph, Section
from reports.page.sections.communication import communication_section
from reports.page.sections.ranks import STEPS, MapRow, class_of, rank_map, ranks_section

MS = 1e6


def texts(section: Section) -> list[str]:
    """Every paragraph and bullet."""
    found: list[str] = []
    for block in section.blocks:
        if isinstance(block, Paragraph):
            found.append(str(block.text))
        elif isinstance(block, Bullets):
            found += block.items
    return found


def drawings(section: Section) -> list:
    found = [drawing for block in section.blocks if isinstance(block, Drawings) for drawing in block.drawings]
    for drawing in found:
        ElementTree.fromstring(str(drawing.svg).replace("xlink:", ""))
    return found


@pytest.fixture
def limited_runs(new_run, new_budget, new_communication, new_operation, new_ranks):
    """Three runs of a cell, 4 ms of communication in flight; the last rank's compute is `slow` ms, not 7."""

    def made(cell, exposed, *, peak, slow):
        recorded = new_communication(
            [new_operation("allreduce", cell.gpus, 4e6)],
            total_ns=4 * MS,
            blocked_ns=0.5 * MS,
            transfer_ns=1.5 * MS,
            wait_ns=0.25 * MS,
            bus_bytes_per_s=0.8 * peak,
            peak_bus_bytes_per_s=peak,
            step_ns=12 * MS,
        )
        fields = {
            "budget": new_budget(7.0, exposed, 0.5),
            "communication": recorded,
            "ranks": new_ranks([7.0] * (cell.gpus - 1) + [slow], 0.01),
            "losses": (2.0, 1.5),
        }
        return [new_run(cell, 10.0, exposed, **fields) for _ in range(3)]

    return made


@pytest.fixture
def limited(new_cell, limited_runs, study_of):
    """Two sizes of ddp and bf16: the larger one exchanges more, has a slow link and a slow rank."""

    def made(*, slow=8.0, large_peak=1e8, exposed=3.0):
        small, large = new_cell(4), new_cell(8)
        bf16 = new_cell(8, compression="bf16")
        return study_of(
            {
                small: limited_runs(small, 0.5, peak=1e9, slow=7.0),
                large: limited_runs(large, exposed, peak=large_peak, slow=slow),
                bf16: limited_runs(bf16, exposed / 2, peak=large_peak, slow=7.0),
            }
        )

    return made


def test_the_communication_section_says_what_limits(limited) -> None:
    section = communication_section(limited())
    found = texts(section)
    assert (
        "Slow link: plain all-reduces reach only 100 MB/s on 8 ranks (CPU) on 1 node, 10.0 % of the 1.00 "
        "GB/s on 4 ranks (CPU) on 1 node."
    ) in found
    # Of one piece of work the cell with the largest share exposed, alone.
    assert [text for text in found if "consistent with a full link" in text] == [
        "ddp on 8, batch 8 a replica: 30.0 % (30.0 to 30.0) of the step is exposed transfer; its "
        "collectives reach 80.0 % of the 100 MB/s that plain all-reduces reach: consistent with a full link."
    ]


def test_a_study_that_nothing_limits_says_nothing_of_it(limited) -> None:
    found = " ".join(texts(communication_section(limited(large_peak=1e9, exposed=0.5))))
    assert "Slow link" not in found
    assert "limits" not in found
    assert "the link is" not in found


@pytest.fixture
def disagreeing(new_cell, limited_runs, study_of):
    """ddp and bf16 on 8 ranks with different peaks in B/s, of which each reaches 80 %."""

    def made(ddp: float, bf16: float):
        cells = {new_cell(8): ddp, new_cell(8, compression="bf16"): bf16}
        return study_of({cell: limited_runs(cell, 3.0, peak=peak, slow=7.0) for cell, peak in cells.items()})

    return made


def test_cells_of_one_network_and_size_have_one_peak(disagreeing, full_rows) -> None:
    study = disagreeing(1e8, 1.6e8)
    section, traffic = communication_section(study), full_rows(study)
    assert [row["link's peak, MB/s"] for row in traffic] == ["130", "130"]
    # 80 and 128 of 130 MB/s.
    assert [row["of the peak, %"] for row in traffic] == ["61.5", "98.5"]
    assert any("reach 61.5 % of the 130 MB/s (100 MB/s to 160 MB/s)" in text for text in texts(section))


def test_a_bandwidth_is_not_divided_by_a_peak_that_varied(disagreeing, full_rows) -> None:
    study = disagreeing(1e8, 3e8)
    section, traffic = communication_section(study), full_rows(study)
    assert [row["link's peak, MB/s"] for row in traffic] == ["200", "200"]
    assert "of the peak, %" not in traffic[0]
    assert (
        "ddp on 8, batch 8 a replica: 30.0 % (30.0 to 30.0) of the step is exposed transfer; the link's own "
        "peak of 200 MB/s (100 MB/s to 300 MB/s) varied too much to judge the bandwidth."
    ) in texts(section)


def test_methods_that_disagree_and_a_recorder_that_disturbs_are_pointed_out(limited) -> None:
    found = texts(communication_section(limited()))
    # 3.5 ms by on-off blocks, 0.5 ms blocked; the others are 2 ms and 0.5 ms apart, a fifth at most.
    assert sum("blocked differ by 30.0 % of the step." in text for text in found) == 1
    assert (
        sum("slows a step by 20.0 % of the step, and 2 other cells by less." in text for text in found) == 1
    )


def test_the_full_table_shows_what_is_exposed_hidden_and_carried(limited, full_rows) -> None:
    row = full_rows(limited())[1]
    shown = {
        "exposed transfer, ms": "3.00",
        "exposed wait, ms": "0.500",
        "added by the exchange, %": "30.0",
        "added by the exchange, from, %": "30.0",
        # 1 - 3.5 / 4.
        "hidden, %": "12.5",
        "payload, MiB": "3.81",
        "operations": "4.00",
        "buckets": "4.00",
        "early buckets": "3.00",
        "bandwidth, MB/s": "80.0",
        "link's peak, MB/s": "100",
        "of the peak, %": "80.0",
    }
    assert {name: row[name] for name in shown} == shown


def test_a_section_without_data_is_left_out(new_cell, new_run, study_of) -> None:
    one, two = new_cell(1, strategy="single"), new_cell(2)
    assert communication_section(study_of({one: [new_run(one)]})) is None
    assert ranks_section(study_of({two: [new_run(two)]})) is None


def test_a_slow_rank_is_named_in_words(limited) -> None:
    section = ranks_section(limited())
    assert section is not None
    (finding,) = [text for text in texts(section) if "persistently slow:" in text]
    assert finding.startswith(
        "ddp on 8, batch 8 a replica: Rank 7 is persistently slow: 14.3 % above the median rank"
    )


def test_without_a_slow_rank_none_is_named(limited) -> None:
    section = ranks_section(limited(slow=7.0))
    assert section is not None
    assert "none in any of 3 cells" in texts(section)
    assert not any("is persistently slow:" in text for text in texts(section))


def test_the_full_table_has_loss_and_break_even_of_an_exchange(limited, full_rows) -> None:
    row = full_rows(limited())[-1]
    assert row["strategy"] == "ddp + bf16"
    assert row["loss against the dense"] == "1.500 against 1.500 after 2 steps"
    assert row["pays below"] == "sends no fewer bytes"


@pytest.mark.parametrize(
    ("excess", "kind"),
    [
        (0.0, 0),
        (0.03, 0),
        (0.031, 1),
        (0.061, 2),
        (0.121, 3),
        (5.0, 3),
        (-0.029, 0),
        (-0.031, -1),
        (-0.5, -3),
    ],
)
def test_classes_of_the_map(excess, kind) -> None:
    assert pytest.approx((0.03, 0.06, 0.12)) == STEPS
    assert class_of(excess) == kind


@pytest.fixture
def map_rows(new_cell, new_run, figures_of, ranks_of):
    """Rows of a map from the excess of each rank by seeded noise."""

    def made(cells: int, ranks: int, spread: float) -> list[MapRow]:
        rng = np.random.default_rng(2)
        found = []
        for place in range(cells):
            steps = (10 + 10 * spread * rng.standard_normal((ranks, 1))) + 0.1 * rng.standard_normal(
                (ranks, 2)
            )
            cell = new_cell(ranks)
            one = stragglers(figures_of(cell, [new_run(cell, ranks=ranks_of(steps * MS))]))
            assert one is not None
            found.append((f"cell {place} <&>", one))
        return found

    return made


@pytest.mark.parametrize(("spread", "most"), [(0.01, 12_000), (0.06, 62_000), (0.5, 96_000)])
def test_a_map_of_24_cells_of_256_ranks_is_small(map_rows, spread, most) -> None:
    svg = str(rank_map(map_rows(24, 256, spread), "GPUs").svg)
    assert len(svg) < most
    ElementTree.fromstring(svg)
    # Labels, ticks, the scale, and a path a class: no element a rank.
    assert svg.count("<rect") == 7
    assert svg.count("<path") <= 2 + 6 + 24
    assert "<image" not in svg
    assert not re.search(r"#[0-9a-f]{6}", svg)


def test_the_map_strokes_classes_and_marks_slow_ranks(new_ranks, new_cell, new_run, figures_of) -> None:
    cell = new_cell(8)
    compute = [10.0, 10.0, 10.4, 10.4, 10.0, 13.0, 9.5, 10.0]
    one = stragglers(figures_of(cell, [new_run(cell, ranks=new_ranks(compute, 0.001))]))
    assert one is not None
    svg = str(rank_map([("a", one)], "GPUs").svg)
    # 4 % above: ranks 2 and 3, the lowest class; 30 % above: rank 5, the highest; 5 % below: rank 6.
    assert re.search(r'vermillion\); stroke-opacity: 0.35" d="M2 0h2"', svg)
    assert re.search(r'vermillion\); stroke-opacity: 1.0" d="M5 0h1"', svg)
    assert re.search(r'blue\); stroke-opacity: 0.35" d="M6 0h1"', svg)
    assert svg.count("stroke-opacity") == 3
    # A mark in the middle of each of ranks 2, 3 and 5, 30 units wide.
    assert re.findall(r"M([\d.]+) [\d.]+l3 5h-6z", svg)[:3] == ["75.0", "105.0", "165.0"]
    assert "between -5.0 % and 30.0 % of it. Persistently slow: a: rank 2, rank 3, rank 5." in svg


def test_a_map_is_ordered_by_number_of_ranks(map_rows) -> None:
    drawing = rank_map([*map_rows(2, 8, 0.1), *map_rows(1, 2, 0.1)], "ranks (CPU)")
    svg = str(drawing.svg)
    assert drawing.title.endswith(", 2 to 8 ranks (CPU)")
    assert "cell 0 &lt;&amp;&gt;" in svg
    # Each size has a band and numbers of ranks of its own.
    assert svg.count("var(--rule)") == 2 + 1
    assert re.findall(r">(\d)</text>", svg) == [*"01", *"01234567"]


def test_cells_with_the_same_slow_ranks_are_one_sentence_and_few_are_drawn(
    new_cell, new_run, new_ranks, study_of
) -> None:
    runs = {}
    for size in range(1, 8):
        cell = new_cell(8, strategy=f"ddp:bucket_mb={size}.0")
        runs[cell] = [new_run(cell, ranks=new_ranks([7.0] * 7 + [8.0], 0.01))]
    section = ranks_section(study_of(runs))
    assert section is not None
    (finding,) = texts(section)
    assert "is persistently slow" in finding
    assert (
        "The same in ddp:bucket_mb=2.0 on 8, batch 8 a replica; ddp:bucket_mb=3.0 on 8, batch 8 a replica"
        in finding
    )
    assert finding.endswith("; 3 more.")
    (drawing,) = drawings(section)
    assert str(drawing.svg).count('<text x="0" y=') >= 4
