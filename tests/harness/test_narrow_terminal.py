"""Commands on a terminal of 80 columns: every line fits, and no word is lost or torn."""

from __future__ import annotations

import pytest

from harness.cli import run
from harness.worker.check_report import CheckReport, StrategyWord

WIDTH = 80
REPORT = CheckReport(
    module="Cancelling",
    parameters=1283,
    trained=1283,
    parameter_bytes=5132,
    trained_bytes=5132,
    blocks=("blocks.0", "blocks.1"),
    batch=("['image'] float32 (8, 3, 224, 224)", "['label'] int64 (8,)"),
    loss=2.3,
    step_s=0.0688,
    activation_bytes=9_520_000,
    optimizer_bytes=5132,
    absent={"flops": "the FLOPs of py:models:build cannot be counted on the meta device: it reads values"},
    strategies=(
        StrategyWord(strategy="ddp", verdict="proven", words="3 steps of 2 replicas recomputed; " * 4),
        StrategyWord(strategy="pipeline:gpipe", verdict="refused", words="it has no place to be cut " * 6),
    ),
)


def said(
    call: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    capsys.readouterr()
    run(call)
    return capsys.readouterr().out


def rows_of_words(out: str) -> list[str]:
    """All words of an output, in no order: a row that is wrapped has those of the row that is not."""
    return sorted(out.split())


@pytest.mark.parametrize(
    "call",
    [
        ["status", "STUDY"],
        ["status", "FOLDER"],
        ["compare", "STUDY", "STUDY"],
        ["list"],
        ["doctor"],
        ["check", "mlp"],
    ],
    ids=" ".join,
)
def test_every_line_fits_and_has_the_words_of_a_wide_terminal(call, small_study, monkeypatch, capsys) -> None:
    monkeypatch.setattr("harness.cli.check.check", lambda request: REPORT)
    monkeypatch.setattr("harness.cli.doctor.warnings", lambda device: ["the machine was busy " * 6])
    root = small_study[0].root
    places = {"STUDY": str(root), "FOLDER": str(root.parent)}
    words = [places.get(word, word) for word in call]
    wide = said(words, 400, monkeypatch, capsys)
    narrow = said(words, WIDTH, monkeypatch, capsys)
    assert [line for line in narrow.splitlines() if len(line) > WIDTH] == []
    assert rows_of_words(narrow) == rows_of_words(wide)
