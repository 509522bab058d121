"""`make gpu`: all that it asks for can be planned, and runs on a CPU; it runs nothing without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from results.outcome import Evidence, Outcome
from results.record import Proof, ProofMethod
from results.run import RunResult
from results.store import Study
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from workloads.catalog import MEMBERS

HERE = Path(__file__).parent
CALL = [sys.executable, str(HERE / "acceptance.py"), "--device", "cpu", "--out"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("acceptance", HERE / "acceptance.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["acceptance"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells_of(part: str, device: str, gpus: int = 1) -> list[Any]:
    acceptance = load()
    plans = [
        plan for line in acceptance.lines(part, device) for plan in acceptance.planned(line, device, gpus)
    ]
    assert not [skip.reason for plan in plans for skip in plan.skips]
    return [cell for plan in plans for cell in plan.cells]


def test_without_a_gpu_all_parts_are_skipped_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    acceptance = load()
    monkeypatch.setattr(acceptance, "visible_gpus", list)
    assert acceptance.accept(acceptance.PARTS, None, tmp_path) == []
    said = capsys.readouterr().out
    assert said.startswith("smoke, correct, ranks, figures: skipped, as this machine has no GPU")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("gpus", "backend", "shared"), [(1, "gloo", True), (2, "nccl", None)])
def test_with_one_gpu_two_ranks_share_it_over_gloo(gpus: int, backend: str, shared: bool | None) -> None:
    for line in load().lines("ranks", "cuda"):
        if line.ranks == 2:
            options = line.placed("cuda", gpus)
            assert (options.gpus, options.backend, options.oversubscribe) == (2, backend, shared)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_that_go_together_meet(device: str) -> None:
    acceptance = load()
    possible = {pair for row in acceptance.possible(device) for pair in combinations(row.items(), 2)}
    met = {pair for row in acceptance.pairwise(device) for pair in combinations(row.items(), 2)}
    assert met == possible
    values = {value for pair in possible for value in pair}
    assert {("compile", True), ("memory_format", "channels_last"), ("precision", "fp16")} < values
    assert {("activation_checkpointing", True), ("activation_checkpointing", "selective")} < values


def test_every_workload_is_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    workloads = {cell.workload for part in ("smoke", "correct", "figures") for cell in cells_of(part, "cuda")}
    # What is predicted not to fit is left out with a sentence.
    told = capsys.readouterr().out
    missing = set(MEMBERS) - {"py"} - {workload.partition(":")[0] for workload in workloads}
    assert all(f"{workload}, batch 1: left out" in told for workload in missing)
    assert missing <= {"llama-7b"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_that_is_offered_on_gpus_is_run_on_two_ranks(device: str) -> None:
    assert cells_of("ranks", device)
    lines = load().lines("ranks", device)
    for catalog, field in (
        (STRATEGIES, "strategy"),
        (COMPRESSIONS, "compression"),
        (COLLECTIVES, "collective"),
    ):
        kinds = [kind for kind in catalog.all_facts if getattr(kind, "on_cuda", None) is None]
        offered = {entry.name for kind in kinds for entry in kind.entries()}
        asked = [getattr(line.options, field) or "" for line in lines]
        used = {text.partition(":")[0] for texts in asked for text in texts.split(",")}
        assert offered - used <= {"single", "auto", "none", "default"}


def test_figures_take_the_largest_batch_that_is_predicted_to_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    acceptance = load()
    settings = {"precision": "bf16"}

    def chosen(gib: float) -> tuple[object, object] | None:
        monkeypatch.setattr(acceptance, "_room", lambda cell: int(gib * 2**30))
        line = acceptance._largest("gpt2-small", 64, settings, "cuda")
        return None if line is None else (line.options.batch_size, line.options.activation_checkpointing)

    plenty, little = chosen(100), chosen(6)
    assert plenty == (64, False)
    assert little is not None
    # Where eight samples do not fit, activations are computed again.
    assert little[1] is not False
    assert chosen(1) is None
    assert "gpt2-small, batch 1: left out, as it is predicted to need" in capsys.readouterr().out


def test_what_is_left_out_is_planned_and_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    acceptance = load()
    monkeypatch.setattr(acceptance, "_room", lambda cell: 1)
    assert list(acceptance.run_part("figures", "cpu", tmp_path, 0)) == []
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if "left out" in line]) == len(acceptance.CPU.figures)


def _result(proof: Proof | None, outcome: Outcome = Outcome.OK, reason: str | None = None) -> RunResult:
    return RunResult(
        cell_id="c",
        run_id="r",
        launch_id="l",
        repeat=0,
        outcome=outcome,
        reason=reason,
        evidence=Evidence.MEASURED,
        started_at=None,
        ranks_expected=1,
        ranks_present=1,
        proof=proof,
    )


@pytest.mark.parametrize(
    ("method", "passed", "detail", "wrong", "wrong_of_figures"),
    [
        ("serial-simulation", True, "3 steps", [], []),
        ("serial-simulation", False, "off", ["c: not proven: off"], ["c: not proven: off"]),
        ("sampled-gradients", True, "1 step", ["c: proven by sampled-gradients alone: 1 step"], []),
        ("sampled-gradients", False, "off", ["c: not proven: off"], ["c: not proven: off"]),
        ("replica-agreement", True, "equal", ["c: proven by replica-agreement alone: equal"], []),
        ("replica-agreement", False, "differ", ["c: not proven: differ"], ["c: not proven: differ"]),
        ("sampled-gradients", True, "1 step; where parameters are off by one rounding of bf16", [], []),
        # fp16 may overflow in each of the first steps.
        ("replica-agreement", True, "equal; the loss scaler left out every step of the simulation", [], []),
    ],
)
def test_less_than_a_simulation_proves_the_cells_of_figures_alone(
    method: ProofMethod, passed: bool, detail: str, wrong: list[str], wrong_of_figures: list[str]
) -> None:
    acceptance = load()
    result = _result(Proof(method=method, passed=passed, detail=detail))
    assert acceptance._wrong(acceptance._line("correct"), result) == wrong
    assert acceptance._wrong(acceptance._line("figures", simulated=False), result) == wrong_of_figures


def test_a_run_that_failed_or_has_no_proof_is_wrong_and_figures_may_run_out_of_memory() -> None:
    acceptance = load()
    correct, figures = acceptance._line("correct"), acceptance._line("figures", simulated=False)
    assert acceptance._wrong(correct, _result(None)) == ["c: not proven: no proof"]
    too_large = _result(None, Outcome.OUT_OF_MEMORY, "16 GiB")
    assert acceptance._wrong(correct, too_large) == ["c: out_of_memory: 16 GiB"]
    assert acceptance._wrong(figures, too_large) == []
    failed = _result(None, Outcome.CRASHED, "rank 0 ended")
    assert acceptance._wrong(figures, failed) == ["c: crashed: rank 0 ended"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_line_runs_on_a_cpu_and_a_second_call_has_nothing_left_to_do(tmp_path: Path) -> None:
    acceptance = load()
    for count in range(2):
        parts = acceptance.PARTS if count == 0 else ("smoke",)
        done = subprocess.run(
            [*CALL, str(tmp_path), *parts], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        # A part has one start of workers: nothing was left in memory by a cell for the next one.
        for study in ("smoke", "correct", "ranks-2", "ranks-4", "figures"):
            assert len(list(tmp_path.glob(f"{study}/launches/*"))) == 1
    for part, folders in (("smoke", ["smoke"]), ("correct", ["correct"]), ("ranks", ["ranks-2", "ranks-4"])):
        results = [result for folder in folders for result in Study(tmp_path / folder).results()]
        assert {result.cell_id for result in results} == {cell.id for cell in cells_of(part, "cpu")}
        assert {result.outcome for result in results} == {Outcome.OK}
    assert (tmp_path / "bare").is_dir()
