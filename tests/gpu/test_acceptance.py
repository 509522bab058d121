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


def test_with_one_gpu_lines_of_two_ranks_share_it(tmp_path: Path) -> None:
    acceptance = load()
    shared = ["--oversubscribe", "--backend", "gloo"]
    for gpus, names in ((1, {"strategies", "compressors"}), (2, set[str]())):
        words = {line.name: line.command("cuda", tmp_path, gpus) for line in acceptance.LINES}
        assert {name for name, given in words.items() if given[-6:-3] == shared} == names


def test_every_line_is_planned_without_a_refusal(tmp_path: Path) -> None:
    acceptance = load()
    for line in acceptance.LINES:
        words = line.command("cpu", tmp_path)[4:]
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            assert run([*words, "--dry-run"], debug=False) == 0, out.getvalue()
        assert " 0 points skipped" in out.getvalue(), (line.name, out.getvalue())


def test_ranks_share_a_gpu_over_gloo_alone(tmp_path: Path) -> None:
    acceptance = load()
    line = next(line for line in acceptance.LINES if line.name == "compressors")
    words = [*line.command("cuda", tmp_path, 1)[4:], "--dry-run"]
    for given, code, said in (
        (words, 0, " 0 points skipped"),
        ([word for word in words if word not in ("--backend", "gloo")], 2, "needs --backend gloo, not nccl"),
    ):
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            assert run(given, debug=False) == code, out.getvalue()
        assert said in " ".join(out.getvalue().split())


@pytest.mark.slow
def test_a_part_runs_on_a_cpu_and_a_second_call_has_nothing_left_to_do(tmp_path: Path) -> None:
    call = [sys.executable, str(HERE / "acceptance.py"), "smoke", "--device", "cpu", "--out", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(call, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        launches = list(tmp_path.glob("smoke-all/launches/*"))
        assert len(launches) == 1
