"""`make gpu`: all that it asks for can be planned and runs on a CPU; it keeps its time, and needs a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from packages import module_at

from harness.plan.schedule import schedule
from results.outcome import Evidence, Outcome
from results.record import Proof
from results.run import RunResult
from results.statistics import Metric
from results.store import Study
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from workloads.catalog import MEMBERS

HERE = Path(__file__).parent
CALL = [sys.executable, str(HERE / "acceptance.py"), "--device", "cpu", "--out"]


def load(name: str = "acceptance") -> ModuleType:
    return module_at(HERE / f"{name}.py")


def cells_of(part: str, device: str, gpus: int = 1) -> list[Any]:
    acceptance = load()
    plans = [
        plan for line in acceptance.lines(part, device) for plan in acceptance.planned(line, device, gpus)
    ]
    assert not [skip.reason for plan in plans for skip in plan.skips]
    return [cell for plan in plans for cell in plan.cells]


def test_packages_that_are_missing_or_too_old_are_installed_and_never_torch(tmp_path, monkeypatch) -> None:
    environment = load("environment")
    for name in ("msgspec-0.18.5", "PyYAML-6.0.1"):
        (tmp_path / f"{name}.dist-info").mkdir()
        version = name.partition("-")[2]
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [])
    missing = {needed.partition(">")[0] for needed in environment.missing(tmp_path)}
    assert missing == {
        *("click", "jinja2", "matplotlib", "msgspec", "numpy", "nvidia-ml-py", "pandas", "psutil", "rich"),
        "scipy",
    }


def test_without_a_gpu_all_parts_are_skipped_in_a_sentence(capsys, monkeypatch, tmp_path) -> None:
    acceptance = load()
    monkeypatch.setattr(acceptance, "visible_gpus", list)
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--out", str(tmp_path)])
    assert acceptance.main() == 0
    assert capsys.readouterr().out.startswith("skipped, as this machine has no GPU")
    assert list(tmp_path.iterdir()) == []


@dataclass
class Step:
    """A step that takes `longer` times its estimate, and no real time."""

    name: str
    estimate_s: float
    longer: float = 1
    limits: list[float] = field(default_factory=list)

    def left_s(self) -> float:
        return max(0.0, self.estimate_s - sum(self.limits) / self.longer)

    def run(self, limit_s: float) -> None:
        self.limits.append(min(limit_s, self.longer * self.left_s()))

    def figures(self) -> list[str]:
        return []

    wrong = figures


def test_steps_run_by_worth_within_the_time_and_those_that_are_left_are_named() -> None:
    acceptance = load()
    asked = [Step("slow", 50, longer=5), Step("small", 30), Step("large", 900), Step("late", 40)]
    assert acceptance.run_all(asked, lambda: 600 - sum(sum(step.limits) for step in asked)) == []
    # Of 250 s twice the estimate and a slow start; of 900 s what is left, but for 20 s for the end.
    assert [step.limits for step in asked] == [[160], [30], [600 - 160 - 30 - 20], []]
    # 18 of the 50 s that were estimated, 510 of 900 and all 40 are left: 648 s with a slow start and the end.
    assert acceptance.summary(asked, "make gpu")[-4:] == [
        *("slow (about 18 s)", "large (about 510 s)", "late (about 40 s)"),
        "continue with: make gpu MINUTES=11",
    ]


def test_the_same_work_is_measured_first_last_and_between_other_work_of_its_launch() -> None:
    for device in ("cpu", "cuda"):
        cells, again = cells_of("order", device), load().scale(device).again
        [launch] = schedule(cells, repeats=1)
        places = [cell.workload == again for cell in launch.cells]
        assert places[0]
        assert places[-1]
        assert sum(places) > 2


def test_curves_are_flat_from_the_last_value_on_that_is_far_from_their_second_half() -> None:
    acceptance = load()
    # The steps end after 0.5, 1.1 and 1.3 s.
    assert acceptance.by_second([5 * 10**8, 6 * 10**8, 2 * 10**8]) == [(0, 500), (1, 400)]
    assert acceptance.flat_from([(0, 120), (1, 101), (2, 90), (3, 100), (4, 101), (5, 99)]) == 3
    assert acceptance.flat_from([(0, 100), (1, 100), (2, 110)]) == math.inf


@pytest.mark.parametrize(("gpus", "backend", "shared"), [(1, "gloo", True), (2, "nccl", None)])
def test_with_one_gpu_two_ranks_share_it_over_gloo(gpus, backend, shared) -> None:
    for line in load().lines("correct", "cuda"):
        if line.ranks == 2:
            options = line.placed("cuda", gpus)
            assert (options.gpus, options.backend, options.oversubscribe) == (2, backend, shared)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_that_go_together_meet(device) -> None:
    acceptance = load()
    possible = {pair for row in acceptance.possible(device) for pair in combinations(row.items(), 2)}
    met = {pair for row in acceptance.pairwise(device) for pair in combinations(row.items(), 2)}
    assert met == possible
    values = {value for pair in possible for value in pair}
    assert {("compile", True), ("memory_format", "channels_last"), ("precision", "fp16")} < values
    assert {("activation_checkpointing", True), ("activation_checkpointing", "selective")} < values


def test_every_workload_is_run_on_a_gpu(capsys) -> None:
    parts = "correct", "figures", "models"
    workloads = {cell.workload for part in parts for cell in cells_of(part, "cuda")}
    # What is predicted not to fit is left out with a sentence.
    told = capsys.readouterr().out
    missing = set(MEMBERS) - {"py"} - {workload.partition(":")[0] for workload in workloads}
    assert all(f"{workload}, batch 1: left out" in told for workload in missing)
    assert missing <= {"llama-7b", "granite-3b", "mixtral-8x7b", "mixtral-8x22b"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_that_is_offered_on_gpus_is_run_on_two_ranks(device) -> None:
    assert {cell.id for cell in cells_of("ranks", device)} < {cell.id for cell in cells_of("correct", device)}
    lines = load().lines("correct", device)
    for catalog, option in (
        (STRATEGIES, "strategy"),
        (COMPRESSIONS, "compression"),
        (COLLECTIVES, "collective"),
    ):
        kinds = [kind for kind in catalog.all_facts if getattr(kind, "on_cuda", None) is None]
        kinds = [kind for kind in kinds if getattr(kind, "engine", None) is None]
        offered = {entry.name for kind in kinds for entry in kind.entries()}
        asked = [getattr(line.options, option) or "" for line in lines]
        used = {text.partition(":")[0] for texts in asked for text in texts.split(",")}
        assert offered - used <= {"single", "auto", "none", "default"}


def test_figures_take_the_largest_batch_that_is_predicted_to_fit(monkeypatch, capsys) -> None:
    acceptance = load()
    settings = {"precision": "bf16"}

    def chosen(gib: float) -> tuple[object, object] | None:
        monkeypatch.setattr(acceptance, "_room", lambda cell: int(gib * 2**30))
        line = acceptance._largest("gpt2-small", 64, settings, "cuda")
        return None if line is None else (line.options.batch_size, line.options.activation_checkpointing)

    plenty, little = chosen(100), chosen(6)
    assert plenty == (64, False)
    # Where eight samples do not fit, activations are computed again.
    assert little[1] is not False
    assert chosen(1) is None
    assert "gpt2-small, batch 1: left out, as it is predicted to need" in capsys.readouterr().out


def test_what_is_left_out_is_planned_and_told_once(monkeypatch, capsys, tmp_path) -> None:
    acceptance = load()
    monkeypatch.setattr(acceptance, "_room", lambda cell: 1)
    assert acceptance.steps(["figures", "models"], "cpu", tmp_path) == []
    said = capsys.readouterr().out.splitlines()
    left_out = [line for line in said if "left out" in line]
    assert len(left_out) == len(acceptance.CPU.figures + acceptance.CPU.models)


@pytest.mark.parametrize(("times_ms", "said"), [
    ([20], "20.00 ms a step (1 run), 100.0 samples/s"),
    ([30, 10], "30.00 ms a step (10.00 to 30.00 in 2 runs), 100.0 samples/s"),
    ([40, 10, 20], "20.00 ms a step (10.00 to 40.00 in 3 runs), 100.0 samples/s (aim MFU 50 %)"),
])  # fmt: skip
def test_an_aim_is_compared_with_three_runs_or_more(times_ms, said) -> None:
    runs = [
        msgspec.structs.replace(
            _result(None),
            cell_id="gpt2-x",
            run_id=f"r{number}",
            step_ns=Metric(value=each * 1e6, unit="ns", low=None, high=None, samples=1, interval=None),
            samples_per_s=100.0,
        )
        for number, each in enumerate(times_ms)
    ]
    assert load().figures_of(runs, None) == f"  gpt2-x: {said}"


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
    method, passed, detail, wrong, wrong_of_figures
) -> None:
    acceptance = load()
    result = _result(Proof(method=method, passed=passed, detail=detail))
    assert acceptance._wrong(acceptance._line("correct"), result) == wrong
    assert acceptance._wrong(acceptance._line("figures"), result) == wrong_of_figures


def test_a_run_that_failed_or_has_no_proof_is_wrong_and_figures_may_run_out_of_memory() -> None:
    acceptance = load()
    correct, figures = acceptance._line("correct"), acceptance._line("figures")
    assert acceptance._wrong(correct, _result(None)) == ["c: not proven: no proof"]
    too_large = _result(None, Outcome.OUT_OF_MEMORY, "16 GiB")
    assert acceptance._wrong(correct, too_large) == ["c: out_of_memory: 16 GiB"]
    assert acceptance._wrong(figures, too_large) == []
    failed = _result(None, Outcome.CRASHED, "rank 0 ended")
    assert acceptance._wrong(figures, failed) == ["c: crashed: rank 0 ended"]


def call(folder: Path, minutes: str, *words: str) -> str:
    command = [*CALL, str(folder / "out"), "--minutes", minutes, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def until_nothing_is_left(folder: Path, *words: str) -> str:
    """Call it, several times on a busy machine, and return the last output."""
    while "\nleft:\n" in (said := call(folder, "20", *words)):
        pass
    return said


SOME = ("figures", "calls")
"""Parts of a few launches each, which together use both programs."""
# `correct` has a test below.
ALL = tuple(part for part in load().PARTS if part != "correct")


@pytest.mark.slow
@pytest.mark.parametrize("parts", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
def test_figures_come_first_every_part_runs_on_a_cpu_and_all_is_packed(tmp_path, parts) -> None:
    said = until_nothing_is_left(tmp_path, *parts, "--archive", "a.tar.gz")
    begun = [line for line in said.splitlines() if "at most" in line]
    assert begun == [] or begun[0].startswith("figures of gpt-nano:seq=8: about")
    summary = said[said.index("\ndone:\n") :]
    assert call(tmp_path, "0", *parts).endswith(summary.partition("packed: ")[0])
    assert ("repeats" not in parts) or (" in 3 runs), " in summary and " in 3 processes; aim " in summary)
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        names = packed.getnames()
        assert packed.extractfile("out/summary.txt").read().decode() in said
    assert [name for name in names if name.endswith("rank-00000.json")]
    for part, study in {"figures": "figures", "ranks": "ranks-2"}.items():
        results = [run for run in Study(tmp_path / "out" / study).results() if not run.outcome.runs_again]
        if part in parts:
            assert {cell.id for cell in cells_of(part, "cpu")} <= {run.cell_id for run in results}
            assert {run.outcome for run in results} == {Outcome.OK}


@pytest.mark.slow
@pytest.mark.long
def test_every_cell_of_correct_is_proven_on_a_cpu(tmp_path) -> None:
    until_nothing_is_left(tmp_path, "correct")
    results = [
        result
        for folder in ("correct", "ranks-2", "ranks-4")
        for result in Study(tmp_path / "out" / folder).results()
        if not result.outcome.runs_again
    ]
    assert {result.cell_id for result in results} == {cell.id for cell in cells_of("correct", "cpu")}
    assert {result.outcome for result in results} == {Outcome.OK}
