"""`bench export --to`, read back by wandb and MLflow; skipped without them (requirements.txt)."""

from __future__ import annotations

import json
import platform
from math import isnan
from typing import Any

import pytest

from harness.cli import run
from harness.features.trackers.send import sent

# The steps of ddp on 2 ranks took 12, 12.5 and 13 ms, and the exchange added 2.5 ms.
FIGURES = {"step_ns": 1.25e7, "step_ns_low": 1.2e7, "step_ns_high": 1.3e7, "exposed_ns": 2.5e6}


def of(rows: list[dict[str, Any]], **settings: object) -> dict[str, Any]:
    return next(row for row in rows if settings.items() <= row.items())


def holds_the_study(rows: list[dict[str, Any]], number: Any) -> None:
    """Assert what a tracker holds of the study `small`; its settings are read by `number`."""
    row = of(rows, strategy="ddp", gpus=number(2), micro_batch=number(8), workload="gpt-nano")
    assert (FIGURES | {"usd_per_hour": 6, "outcome": "ok"}).items() <= row.items()
    # 16 samples in 12.5 ms.
    assert row["samples_per_s"] == pytest.approx(1280)
    failed = of(rows, good=False)
    assert (failed["gpus"], failed["reason"]) == (number(8), "rank 0: allocating 2 GiB")
    assert "step_ns" not in failed


def test_ids_and_settings_stay_and_figures_change(small) -> None:
    root = small.study.root
    before = list(sent(small.analysed(), root, redact=False))
    after = list(sent(small.analysed(loss_first=2.5), root, redact=True))
    assert [one[:3] for one in before] == [one[:3] for one in after]
    assert len({one.id for one in before}) == 6
    assert "bench report planted" in before[0].words["absent.page"]
    assert not [word for one in after for word in one.words.values() if str(root) in word]
    assert {one.numbers.get("loss_first") for one in after if one.good} == {2.5}


def test_a_call_that_cannot_be_is_refused(small, monkeypatch, capsys) -> None:
    monkeypatch.setattr("harness.features.trackers.send.find_spec", lambda name: None)
    calls = {"--to wandb -o x": "--output", "": "--format", "--to mlflow": "pip install 'mlflow"}
    for words, says in calls.items():
        assert run(["export", str(small.study.root), *words.split()]) != 0
        assert says in capsys.readouterr().err


def test_wandb_holds_each_cell_once(small, tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for _ in range(2):
        assert run(["export", str(small.study.root), "--to", "wandb", "--price", "3"]) == 0
    rows: dict[str, dict[str, Any]] = {}
    for path in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        assert f'"{platform.node()}"'.encode() not in path.read_bytes()
        row, store, record = rows.setdefault(path.stem, {}), DataStore(), Record()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record.ParseFromString(data)
            told = (*record.run.config.update, *record.summary.update)
            row |= {one.key: json.loads(one.value_json) for one in told}
            if record.HasField("exit"):
                row["good"] = record.exit.exit_code == 0
        store.close()
    assert len(rows) == 6
    holds_the_study(list(rows.values()), int)


def test_mlflow_holds_each_cell_once_and_no_old_figure(small, tmp_path, monkeypatch, capsys) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.chdir(small.study.root.parent)

    def rows() -> list[dict[str, Any]]:
        found = mlflow.search_runs(experiment_names=["planted"], output_format="list")
        runs = [(one.data.params | one.data.metrics | one.data.tags, one.info.status) for one in found]
        return [row | {"good": status == "FINISHED"} for row, status in runs]

    for _ in range(2):
        assert run(["export", "planted", "--to", "mlflow", "--price", "3"]) == 0
    holds_the_study(rows(), str)
    excluded = [word for n in "123" for word in ("--exclude", f"ddp on 2, batch 8 a replica, run {n}")]
    assert run(["review", "planted", *excluded, "--reason", "hot", "--author", "Ann"]) == 0
    assert run(["export", "planted", "--to", "mlflow"]) == 0
    row = of(rows(), strategy="ddp", gpus="2", micro_batch="8")
    assert (len(rows()), row["outcome"], isnan(row["step_ns"])) == (6, "excluded", True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    assert run(["export", "planted", "--to", "mlflow"]) != 0
    assert "MLflow refused (nowhere://x)" in capsys.readouterr().err
