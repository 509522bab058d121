"""The page of a study marks runs on nodes that a preflight named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from packages import module_at

from harness.cli import run
from harness.features.preflight.verdict import PREFLIGHT, PREFLIGHT_FILE, Verdict

figures = module_at(Path(__file__).with_name("figures.py"))


def page(study: Path, verdict: Verdict, *words: str) -> str:
    (study.parent / PREFLIGHT_FILE).write_bytes(PREFLIGHT.encode(verdict))
    assert run(["report", str(study), *words]) == 0
    return (study / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def study(small) -> Path:
    """All of its runs are on node-a."""
    root: Path = small.study.root
    return root


def test_runs_on_the_host_of_a_named_node_are_marked_unless_names_are_redacted(study, capsys) -> None:
    found = page(study, figures.a_verdict(host="node-a"))
    assert 'id="preflight"' in found
    assert "n2 is slow; 16 runs used it: " in found
    assert "16 runs used n2" in capsys.readouterr().err
    assert 'id="preflight"' not in page(study, figures.a_verdict(host="node-a"), "--redact")


def test_a_damaged_verdict_is_told_and_costs_no_page(study, capsys) -> None:
    (study.parent / PREFLIGHT_FILE).write_text("{")
    assert run(["report", str(study)]) == 0
    assert "no run is marked by the preflight" in capsys.readouterr().err


def test_runs_on_other_nodes_are_not_marked(study) -> None:
    assert 'id="preflight"' not in page(study, figures.a_verdict(host="node-b"))
    # Of a host with several nodes, only a job knows which one a run was on.
    shared = figures.a_verdict(host="node-a")
    first = msgspec.structs.replace(shared.nodes[0], host="node-a")
    twice = msgspec.structs.replace(shared, nodes=(first, shared.nodes[1]))
    assert 'id="preflight"' not in page(study, twice)
