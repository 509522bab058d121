"""Whole studies, really run: what was edited, and what other plans, cells and repeats do to a cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SLURM_WORDS, Shell

from harness.launch import campaign, supervise
from harness.launch.campaign import Campaign, CampaignContext
from harness.launch.starter import LocalStarter
from harness.machine.code import checkout, code_version
from harness.matrix import Matrix
from harness.plan.study_file import STUDY_FILE, StudyFile, merge
from harness.terminal.console import Console
from results.errors import MachineError
from results.files import study_lock
from results.job import RunOptions
from results.launch import Launch
from results.outcome import Outcome
from results.store import Study

FAILURE = """
  rank      : 1 (local_rank: 1)
  exitcode  : -{number} (pid: 7)
  error_file: <N/A>
"""
"""Torchrun 2.13 reports this of a rank that a signal ended."""


def _run(folder: Path, script: str, options: RunOptions, batches: str = "8", workload: str = "mlp") -> Study:
    """The study of a campaign in which every launch is this script, up to its MachineError."""
    given = StudyFile(
        workload=workload, gpus=2, strategy="ddp", batch_size=batches, repeats=1, device="cpu",
        oversubscribe=True, out=str(folder / "s"),
    )  # fmt: skip
    study = Study(folder / "s")
    with study_lock(study.root) as lock:
        plan = Matrix(given, study_file=None)._kept_plans(study)[0]
        context = CampaignContext(starter=Shell(script), checkout=checkout(), code=code_version(), lock=lock)
        Campaign(study, plan, options, Console()).run(context)
    return study


def test_verbose_prints_how_each_launch_is_started(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Console, "loudness", 1)
    study = _run(tmp_path, "exit 7", RunOptions(retries=0))
    (launch,) = study.launches()
    said = capsys.readouterr().err
    assert f"{study.launch_folder(launch.launch_id)} is started" in said
    assert "it ended with exit code 7: bash -c 'exit 7'" in said


@pytest.mark.parametrize(
    ("said", "starts", "outcome", "words"),
    [
        (
            "RendezvousTimeoutError",
            3,
            Outcome.MISSING_RANKS,
            r"3 launches in a row ended before their first cell began, the last one with .*: Rendezvous",
        ),
        (
            # Python says so when the site's own start-up file fails, and goes on.
            "RendezvousTimeoutError\nModuleNotFoundError: No module named 'x'",
            3,
            Outcome.MISSING_RANKS,
            r"3 launches in a row ended before their first cell began",
        ),
        (
            "/usr/bin/python3: Error while finding module specification for 'torch.distributed.run' "
            "(ModuleNotFoundError: No module named 'torch')",
            1,
            Outcome.CANCELLED,
            "workers cannot start on this machine: /usr/bin/python3: Error .*No module named 'torch'.; the",
        ),
    ],
)
def test_workers_that_did_not_meet_are_started_again_as_often_as_was_asked_and_others_are_not(
    tmp_path, said, starts, outcome, words
) -> None:
    with pytest.raises(MachineError, match=words):
        _run(tmp_path, f'echo "{said}"; exit 1', RunOptions(retries=2))
    study = Study(tmp_path / "s")
    assert len(study.launches()) == len(list(study.root.glob("launches/*/attempt.json"))) == starts
    results = study.results()
    assert [result.outcome for result in results] == [outcome] * starts
    first = said.partition("\n")[0]
    assert all(result.outcome.runs_again and first in str(result.reason) for result in results)


MISSING = "ModuleNotFoundError: No module named 'x'"
FAILED = FAILURE.replace("-{number}", "1")
"""Torchrun reports this of rank 1 when it has raised and left no error file."""


@pytest.mark.parametrize(
    ("launcher", "rank", "starts"),
    [
        (FAILED, (1, MISSING), 1),
        (f"{MISSING}\n{FAILED}", (1, f"{MISSING}\nSystemError: 7"), 3),
        (FAILED, (0, MISSING), 3),
        (MISSING, None, 1),
        (f"{MISSING}\nSystemError: 7", None, 3),
    ],
    ids=["failed rank", "optional", "other rank", "launcher", "launcher's optional"],
)
def test_a_missing_module_ends_a_campaign_only_as_the_last_words_of_what_failed(
    tmp_path, launcher, rank, starts
) -> None:
    """Amid a log it may be an optional module, or a site's own start-up file."""
    script = f'cat <<"END"\n{launcher}\nEND\n'
    if rank is not None:
        script += f"""
        for launch in {tmp_path}/s/launches/*; do
            mkdir -p $launch/torchrun/x/attempt_0/{rank[0]}
            cat > $launch/torchrun/x/attempt_0/{rank[0]}/stderr.log <<"END"\n{rank[1]}\nEND
        done
        """
    with pytest.raises(MachineError, match="workers cannot start" if starts == 1 else "3 launches in a row"):
        _run(tmp_path, f"{script}\nexit 1", RunOptions(prune=False), "4,8,16")
    assert len(Study(tmp_path / "s").launches()) == starts


@pytest.mark.parametrize(("kills", "outcome"), [(0, Outcome.CRASHED), (1, Outcome.OUT_OF_MEMORY)])
def test_deaths_in_start_up_have_the_outcome_of_their_first_slots_and_end_a_campaign_at_the_third(
    kills, outcome, tmp_path, monkeypatch, capsys
) -> None:
    """Five cells in one launch: whoever is first of it when rank 1 is killed has that outcome."""
    counts = iter([0, kills] * 3)
    monkeypatch.setattr(supervise, "out_of_memory_kills", lambda: next(counts))
    with pytest.raises(MachineError, match="3 launches in a row ended before their first cell began"):
        _run(
            tmp_path,
            # Rank 0 loses the connection to the killed rank; before, torch has warned.
            f"echo '{FAILURE.format(number=9)}'; echo DistNetworkError; echo 'W: No module named x'; exit 1",
            RunOptions(prune=False),
            "4,8,16,32,64",
            "gpt-nano",
        )
    study = Study(tmp_path / "s")
    first, second, third = sorted(study.launches(), key=lambda launch: -len(launch.slots))
    assert [len(launch.slots) for launch in (first, second, third)] == [5, 4, 3]
    found = {result.run_id: result for result in study.results()}
    assert found.keys() == {launch.slots[0].run_id for launch in (first, second, third)}
    for result in found.values():
        assert result.outcome is outcome
        assert str(result.reason).startswith("before any cell began: rank 1 was killed by SIGKILL")
    assert study.attempts()[first.slots[0].run_id].outcomes == {first.slots[0].run_id: outcome}
    # What is short of memory gets the option that may help; the third death ends the campaign.
    assert capsys.readouterr().err.count("instead: --accumulation 2 fits") == 2 * kills


AWAY = (
    "srun: error: Unable to confirm allocation for job 7: "
    "Unable to contact slurm controller (connect failure)"
)
"""srun of Slurm 22.05 prints this 30 s after its controller was killed."""


def test_a_launch_that_the_scheduler_did_not_answer_is_tried_again_until_it_does(
    tmp_path, monkeypatch
) -> None:
    """The fifth launch is answered, and shows that torch is not there."""
    monkeypatch.setattr(campaign, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(Shell, "log_words", SLURM_WORDS)
    last = "ModuleNotFoundError: No module named 'torch'"
    script = f"""
    if test $(ls {tmp_path}/s/launches | wc -l) -lt 5; then echo "{AWAY}"; else echo "{last}"; fi
    exit 1
    """
    with pytest.raises(MachineError, match="workers cannot start on this machine: ModuleNotFoundError"):
        _run(tmp_path, script, RunOptions(retries=0))
    results = Study(tmp_path / "s").results()
    unanswered = [result for result in results if result.outcome is Outcome.NODE_FAILED]
    assert (len(results), len(unanswered)) == (5, 4)
    words = AWAY.removeprefix("srun: error: ")
    for result in unanswered:
        assert result.reason == f"before any cell began: the scheduler did not answer: {words}"


def test_a_launch_that_the_scheduler_does_not_start_is_no_hang_and_is_tried_again(
    tmp_path, monkeypatch
) -> None:
    busy = "Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"

    def command(self: Shell, launch: Launch, path: Path) -> tuple[str, ...]:
        if len(list(path.parents[1].iterdir())) == 3:
            raise MachineError("a third launch")
        (path.parent / "srun.log").write_text(f"srun: {busy}\n")
        return "sleep", "600"

    monkeypatch.setattr(Shell, "command", command)
    monkeypatch.setattr(Shell, "log_words", SLURM_WORDS)
    with pytest.raises(MachineError, match="a third launch"):
        _run(tmp_path, "", RunOptions(retries=2, silence_s=1.0))
    first, second = Study(tmp_path / "s").results()
    reason = f"before any cell began: the scheduler started no process within 1 s: {busy}"
    assert [(run.outcome, run.reason) for run in (first, second)] == [(Outcome.NODE_FAILED, reason)] * 2


class Nothing(LocalStarter):
    """Starts a program that is not there, as in a job whose set-up has lost its PATH."""

    def command(self, launch: Launch, path: Path) -> tuple[str, ...]:
        return ("no-such-srun", "--nodes=1")


def test_a_program_that_is_not_there_is_an_error_of_the_machine(tmp_path) -> None:
    options = StudyFile(workload="mlp", gpus=1, strategy="single", device="cpu", out=str(tmp_path / "s"))
    study = Study(tmp_path / "s")
    plan = Matrix(options, study_file=None)._kept_plans(study)[0]
    context = CampaignContext(starter=Nothing(), checkout=checkout(), code=code_version())
    with pytest.raises(MachineError, match="cannot start no-such-srun, which starts the workers: No such"):
        Campaign(study, plan, RunOptions(), Console()).run(context)


MODEL = """
import torch
from torch import nn
from workloads import Workload


def build():
    def synthetic(generator, samples):
        return torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)

    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1))
    return Workload(module=model, loss=nn.functional.mse_loss, synthetic=synthetic)
"""


def _parameters(study: Study) -> dict[str, set[int]]:
    """Parameters of the models that were really trained, by cell."""
    found: dict[str, set[int]] = {}
    for cell_id in study.cell_ids():
        for run_id in study.run_ids(cell_id):
            for record in study.rank_records(cell_id, run_id):
                if record.work is not None:
                    found.setdefault(cell_id, set()).add(record.work.parameters)
    return found


@pytest.mark.slow
def test_each_plan_of_a_study_trains_the_model_of_its_own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for width in (8, 16):
        (tmp_path / f"w{width}").mkdir()
        (tmp_path / f"w{width}" / "model.py").write_text(MODEL.replace("WIDTH", str(width)))
        (tmp_path / f"w{width}" / "study.yaml").write_text(
            "{name: s, workload: 'py:model:build', gpus: 1, strategy: single, device: cpu, budget: 0, out: o}"
        )
    for width, repeats in ((8, 1), (16, 1), (8, 2)):
        path = tmp_path / f"w{width}" / "study.yaml"
        options = merge(STUDY_FILE.read(path), StudyFile(repeats=repeats))
        assert Matrix(options, study_file=path).run(report=False) == 0
    # 4 x 8 + 8 + 8 + 1 = 49 and 4 x 16 + 16 + 16 + 1 = 97 parameters.
    assert sorted(_parameters(Study(tmp_path / "o")).values(), key=min) == [{49}, {97}]


@pytest.mark.slow
def test_a_model_that_was_edited_after_planning_fails_its_run_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL.replace("WIDTH", "8"))
    options = StudyFile(workload="py:model:build", gpus=1, strategy="single", device="cpu", budget=0, out="o")
    matrix = Matrix(options, study_file=None)
    study = Study(tmp_path / "o")
    with study_lock(study.root) as lock:
        plan = matrix._kept_plans(study)[0]
        (tmp_path / "model.py").write_text(MODEL.replace("WIDTH", "16"))
        around = CampaignContext(starter=LocalStarter(), checkout=checkout(), code=code_version(), lock=lock)
        Campaign(study, plan, RunOptions(), Console()).run(around)
    results = study.collect()
    assert [result.outcome for result in results] == [Outcome.SKIPPED]
    assert "was edited after the cell was planned" in str(results[0].reason)


@pytest.mark.slow
@pytest.mark.long
def test_a_cell_gives_the_same_figures_in_every_repeat_before_and_after_another(
    tmp_path, monkeypatch
) -> None:
    """Losses bit for bit, bytes and operations: of a run that proves and of one that does not.

    The second launch takes the cells the other way round.
    """
    monkeypatch.chdir(tmp_path)
    options = StudyFile(
        workload="mlp,gpt-nano", gpus=2, strategy="ddp", repeats=2, device="cpu", budget=0, block_steps=2,
        quads=2, out="o",
    )  # fmt: skip
    assert Matrix(options, study_file=None).run(report=False) == 0
    study = Study(tmp_path / "o")
    orders = [[slot.cell_id for slot in launch.slots] for launch in study.launches()]
    assert len(orders) == 2
    assert orders[0] == orders[1][::-1]
    for cell_id in study.cell_ids():
        # Warm-up ends by the clock, so that runs differ in length: what both took is compared.
        first, second = (
            [((r.warmup_loss + r.steps.loss)[:12], r.work) for r in study.rank_records(cell_id, run_id)]
            for run_id in study.run_ids(cell_id)
        )
        assert first == second
        # The replicas see different data and draw different dropout.
        assert first[0][0] != first[1][0]


@pytest.mark.slow
def test_compiled_cells_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = StudyFile(
        workload="mlp", gpus=1, strategy="single", repeats=1, device="cpu", budget=0, block_steps=2,
        warmup_steps=0, compile=True, out="c",
    )  # fmt: skip
    assert Matrix(options, study_file=None).run(report=False) == 0


def test_settings_that_run_together_know_the_folder_of_the_users_file(tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text("a user's text " * 100)
    options = StudyFile(
        workload="gpt-nano:seq=8", gpus=1, strategy="single", dataset="synthetic,text:corpus.txt",
        device="cpu", out=str(tmp_path / "s"),
    )  # fmt: skip
    matrix = Matrix(options, study_file=tmp_path / "study.yaml")
    (plan,) = matrix._to_run(matrix._plans(Study(tmp_path / "s")))
    assert [cell.dataset for cell in plan.cells] == ["synthetic", "text:corpus.txt"]
    assert plan.request.source_folder == str(tmp_path)
