"""Collectives, links and virtual nodes, from the command line to the launch."""

from __future__ import annotations

import re
from functools import partial

import builders
import pytest

from harness import matrix
from harness.cli import run
from harness.terminal.console import Console
from results.outcome import Evidence

MATRIX = ("matrix", "--workload", "mlp", "--device", "cpu", "--batch-size", "8", "--oversubscribe")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Console, "width", 300)
    # Planned as where links can be made, whatever this machine allows.
    monkeypatch.setattr(matrix, "link_obstacle", lambda: None)


plan_of = partial(builders.plan_of, workload="mlp", batch_size=8, device="cpu", strategy="ddp")


@pytest.mark.parametrize(
    ("options", "cores", "evidence", "pin", "link"),
    [
        ({"gpus": 4}, 4, Evidence.MEASURED, True, None),
        ({"gpus": 4}, 2, Evidence.EMULATED, False, None),
        # Virtual nodes are made up on any machine; their ranks can have cores of their own.
        ({"gpus": 4, "node_size": 2}, 4, Evidence.EMULATED, True, None),
        ({"gpus": 4, "node_size": 4}, 4, Evidence.MEASURED, True, None),
        ({"gpus": 4, "link": "1gbit"}, 4, Evidence.EMULATED, True, 1000.0),
        ({"gpus": 4, "link": "1gbit", "node_size": 2}, 2, Evidence.EMULATED, False, 1000.0),
    ],
)
def test_a_launch_says_what_its_figures_will_be(options, cores, evidence, pin, link) -> None:
    launch = builders.launch_of(plan_of(**options), cores=cores)
    assert (launch.evidence, launch.pin, launch.link_mbit_per_s) == (evidence, pin, link)


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run([*MATRIX, "--dry-run", "-v", *flags]) == 0
    return capsys.readouterr().out


def axes(text: str) -> list[list[str]]:
    """Which axes have a column in the tables of cells and of skips; heads take two lines."""
    lines = text.splitlines()
    starts = [lines.index(name) + 1 for name in ("cells", "skipped")]
    heads = [" ".join(lines[start : start + 2]).split() for start in starts]
    return [[word for word in head if word in ("compression", "collective", "link")] for head in heads]


def test_plan_tables_have_a_column_for_an_axis_that_somebody_uses(capsys) -> None:
    assert axes(shown(capsys, "--gpus", "1..2")) == [[], []]
    every = ["compression", "collective", "link"]
    ring = shown(capsys, "--gpus", "1..2", "--collective", "default,ring")
    assert axes(ring) == [["collective"], ["collective"]]
    assert "  ddp       ring  " in ring
    asked = ("--compression", "none,bf16", "--collective", "default,ring", "--link", "none,1gbit")
    assert axes(shown(capsys, "--gpus", "1..2", *asked)) == [every, every]
    # What would be under a link is a skip, and the cells need no column.
    text = shown(capsys, "--gpus", "1", "--strategy", "single", "--link", "none,1gbit")
    assert axes(text) == [[], ["link"]]
    assert "single has no network" in text


def test_the_summary_names_the_axes_that_are_more_than_default(capsys) -> None:
    text = shown(capsys, "--gpus", "2", "--compression", "none,bf16", "--link", "1gbit")
    assert "mlp x single, ddp x compression none, bf16 x link 1gbit on 2 ranks (CPU)" in text
    assert "mlp x single, ddp on 2 ranks (CPU)" in shown(capsys, "--gpus", "2")


def test_launches_over_a_link_say_so(capsys) -> None:
    text = shown(
        capsys, "--gpus", "4", "--strategy", "ddp", "--link", "2.5gbit", "--node-size", "2", "--repeats", "1"
    )
    assert "repeat 1, 2 nodes x 2 over 2.5gbit: 1 cell" in text
    assert "-m harness.launch.nodes" in text


def test_a_machine_is_asked_for_links_where_somebody_wants_one(capsys, monkeypatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(matrix, "link_obstacle", lambda: asked.append(None) or "no veth here")
    assert "no veth here" not in shown(capsys, "--gpus", "2")
    assert asked == []
    text = shown(capsys, "--gpus", "2", "--strategy", "ddp", "--link", "none,1gbit")
    assert "skipped 1 x: no veth here" in text
    assert "1 cell x 3 repeats" in text


def test_the_list_has_the_collectives(capsys) -> None:
    assert run(["list"]) == 0
    text = capsys.readouterr().out
    assert "\ncollectives\n" in text
    assert "hierarchical:via=" in text
    # What must be given is said as well.
    assert re.search(r"\n  topk:\.\.\. +the share that is sent", text)
    assert re.search(r"\n  text:\.\.\. +stdlib +PATH", text)
