"""`make gpu`: every line is planned with small models, the first part runs on CPU; none without a GPU."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from harness.cli import run

HERE = Path(__file__).parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("acceptance", HERE / "acceptance.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["acceptance"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_all_parts_are_skipped_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    acceptance = load()
    monkeypatch.setattr(acceptance, "visible_gpus", list)
    assert acceptance.accept(acceptance.PARTS, None, tmp_path) == []
    said = capsys.readouterr().out
    assert said.startswith("smoke, correct, ranks, figures: skipped, as this machine has no GPU")
    assert list(tmp_path.iterdir()) == []


def test_with_one_gpu_lines_of_two_ranks_are_skipped_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    acceptance, ran = load(), []
    monkeypatch.setattr(acceptance, "visible_gpus", lambda: [object()])
    monkeypatch.setattr(
        acceptance, "run_line", lambda line, device, out: ran.append((line.name, device)) or []
    )
    monkeypatch.setattr(acceptance, "one_rank", lambda device: [])
    assert acceptance.accept(acceptance.PARTS, None, tmp_path) == []
    assert "strategies: skipped, as NCCL takes one rank a GPU, and there is 1 here" in capsys.readouterr().out
    assert ("resnet50", "cuda") in ran
    assert not {"strategies", "compressors"} & {name for name, _ in ran}


def test_every_line_is_planned_without_a_refusal(tmp_path: Path) -> None:
    acceptance = load()
    for line in acceptance.LINES:
        words = line.command("cpu", tmp_path)[4:]
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            assert run([*words, "--dry-run"], debug=False) == 0, out.getvalue()
        assert " 0 points skipped" in out.getvalue(), (line.name, out.getvalue())


@pytest.mark.slow
def test_a_part_runs_on_a_cpu_and_a_second_call_has_nothing_left_to_do(tmp_path: Path) -> None:
    call = [sys.executable, str(HERE / "acceptance.py"), "smoke", "--device", "cpu", "--out", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(call, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        launches = list(tmp_path.glob("smoke-all/launches/*"))
        assert len(launches) == 1
