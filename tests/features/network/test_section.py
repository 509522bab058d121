"""The network of a study's page: its table and drawings, and a table of another network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import NETWORK_HERE, a_network

from harness.features.network.order import NetworkOrder
from harness.features.network.section import network_section, stranger, summary_table
from harness.reporting.assumptions import CostFlags
from harness.reporting.studies import read_figures
from harness.terminal.console import Console
from reports.page.contents import contents
from reports.page.section import Drawings, Paragraph, Table
from results import schemas
from results.errors import StoreError
from results.network import NETWORK_FILE, NetworkFacts, NetworkTable


def test_each_collective_has_a_drawing_with_a_line_a_group_and_each_size_a_row(small) -> None:
    section = network_section(replace(small.analysed(), added={"network": a_network()}))
    (drawings,) = [block for block in section.blocks if isinstance(block, Drawings)]
    assert len(drawings.drawings) == 2
    assert all(one.svg.count('class="series"') == 2 for one in drawings.drawings)
    (rows,) = [block for block in section.blocks if isinstance(block, Table)]
    assert len(rows.data.rows) == 8
    # 1 MiB in 10.5 ms is 100 MB/s; of 4 ranks busbw is 1.5 times that.
    assert any("150 MB/s" in row for row in rows.data.texts)


def test_a_drawing_of_many_groups_keeps_the_smallest_and_the_largest(small) -> None:
    many = a_network(groups=[(ranks, 1) for ranks in range(2, 25)])
    section = network_section(replace(small.analysed(), added={"network": many}))
    (drawings,) = [block for block in section.blocks if isinstance(block, Drawings)]
    assert drawings.drawings[0].svg.count('class="series"') == 8
    for group in ("2 ranks inside a node", "24 ranks inside a node"):
        assert group in drawings.drawings[0].svg


def test_two_nodes_and_gloo_carry_their_remarks(small) -> None:
    def plain(known: NetworkTable) -> list[str]:
        section = network_section(replace(small.analysed(), added={"network": known}))
        return [one.text for one in section.blocks if isinstance(one, Paragraph) and one.look == "plain"]

    assert len(plain(a_network())) == 2
    assert len(plain(a_network(groups=((2, 1), (4, 2), (6, 3))))) == 1
    assert plain(a_network(NetworkFacts(backend="nccl"), groups=((2, 1),))) == []


def test_a_table_of_another_network_is_named(small) -> None:
    study = small.analysed()
    assert stranger(a_network(), study) is None
    for other in (
        replace_facts(device_name="Another CPU"),
        replace_facts(link_mbit_per_s=100.0),
        replace_facts(library="Gloo of torch 2.12.0"),
    ):
        foreign = stranger(a_network(other), study)
        assert foreign is not None
        section = network_section(replace(study, added={"network": a_network(other)}))
        assert any(isinstance(one, Paragraph) and foreign in one.text for one in section.blocks)


def replace_facts(**fields: Any) -> NetworkFacts:
    return NetworkFacts(
        **{"backend": "gloo", "device_name": NETWORK_HERE.device_name, "library": NETWORK_HERE.library}
        | fields
    )


def test_a_table_in_the_folder_or_given_is_read_and_a_damaged_one_is_left_out(
    small, tmp_path, capsys
) -> None:
    root = small.study.root

    def read(given: Path | None = None) -> NetworkTable | None:
        named = {} if given is None else {"network": str(given)}
        (found,) = read_figures([str(root)], CostFlags(), Console(), given=named)
        return found.added["network"]

    assert read() is None
    (root / NETWORK_FILE).write_bytes(schemas.NETWORK.encode(a_network()))
    assert read() == a_network()
    other = tmp_path / "other.json"
    other.write_bytes(schemas.NETWORK.encode(a_network(replace_facts(link_mbit_per_s=5.0))))
    assert read(other) == a_network(replace_facts(link_mbit_per_s=5.0))
    (root / NETWORK_FILE).write_bytes(b'{"schema":"bench/network"')
    assert read() is None
    assert NETWORK_FILE in capsys.readouterr().err
    for damaged in (root / NETWORK_FILE, tmp_path / "missing.json"):
        with pytest.raises(StoreError):
            read(damaged)


def test_a_study_of_the_network_has_no_sections_about_steps(planted) -> None:
    planted.series("weak", "ddp", [2], batch=1)
    planted.plan(order=NetworkOrder().stored)
    study = replace(planted.analysed([], name="net"), added={"network": a_network()})
    assert [section.anchor for section in contents(study)] == ["network", "outcomes"]
    running = replace(
        study, running=({"cell": "a", "state": "running", "ok": "0", "planned": "1", "others": ""},)
    )
    assert next(iter(contents(running))).anchor == "running"


def test_the_summary_names_each_group_once() -> None:
    shown = summary_table(a_network())
    assert len(shown.rows) == 4
    assert shown.texts[1][:2] == ("all-reduce", "4 ranks on 2 nodes")
