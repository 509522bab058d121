"""`bench compare --ab`: two revisions side by side, and calls that cannot be compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import a_cell, an_environment

from harness.cli import run
from harness.features.gate.comparison import FAILING, Comparison, Finding, Rules
from harness.features.gate.effect import (
    FEWEST_QUADS,
    LOOKS,
    PAIRS_A_LOOK,
    SPOILED_ABOVE,
    Effect,
    PairedSample,
    Verdict,
)
from harness.features.gate.paired.comparison import (
    SIDES,
    PairedComparison,
    SideRequest,
    decide,
    read_pairs,
)
from harness.features.gate.paired.pair import (
    PairContext,
    Pairs,
    both_can_be_only_timed,
    runs_of,
    share_of_others,
    study_of,
)
from harness.features.gate.paired.seat import LostError, Seat
from harness.features.gate.paired.sources import Repository, Source
from harness.features.gate.records.paired import PAIR, PAIRED_CALL, Pair, PairedBlock, PairedCell, Side
from harness.machine.processes import temporary_folder
from harness.terminal.console import Console
from harness.worker.turns import Turns
from results import files
from results.errors import MachineError, UsageError
from results.outcome import Evidence, Outcome
from results.run import RunResult

MODEL = """
import torch
from torch import nn

from workloads import Workload


def synthetic(generator, samples):
    return torch.randn(samples, 16, generator=generator), torch.randn(samples, 1, generator=generator)


def build():
    return Workload(module=nn.Sequential({layers}), loss=nn.functional.mse_loss, synthetic=synthetic)
"""
ONE, TWO = "nn.Linear(16, 1)", "nn.Linear(16, 16), nn.Linear(16, 1)"
OLDER = {"harness/__init__.py": "", "harness/matrix.py": "", "harness/worker/__init__.py": ""}
"""A `bench` from before the paired mode."""
CELL = ("--workload", "py:model:build", "--gpus", "2", "--strategy", "ddp", "--device", "cpu")
QUICK = ("--batch-size", "8", "--warmup-steps", "10", "--block-steps", "5", "--quads", "1", "--oversubscribe")


def git(folder: Path, *arguments: str) -> str:
    words = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path) -> Path:
    """A user's repository in which `main~1` is a model of one layer, and `main` of two."""
    folder = tmp_path / "user"
    folder.mkdir()
    git(folder, "init", "--quiet")
    commit(folder, {"model.py": MODEL.format(layers=ONE)})
    commit(folder, {"model.py": MODEL.format(layers=TWO)})
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """The folder in which this test's comparisons make theirs; with a short name, as sockets lie in them."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def until(condition: Callable[[], bool], what: str, patience_s: float = 60) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_the_help_says_how_many_pairs_a_look_has(capsys) -> None:
    assert run(["compare", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"{PAIRS_A_LOOK} pairs each; {LOOKS} if" in told


@pytest.mark.slow
def test_real_pairs_name_the_counter_that_a_commit_changed(
    bench, repository, temporary, tmp_path, monkeypatch, capsys
) -> None:
    before = everything(repository)
    folder = tmp_path / "ab"
    monkeypatch.chdir(repository)
    # The fewest quads: what they say is not the subject.
    monkeypatch.setattr("harness.features.gate.paired.pair.QUADS_S", 0)
    words = ["--others-above", "100%", "--out", str(folder), "--format", f"json={tmp_path / 'found.json'}"]
    code = run(["compare", "--ab", "main~1", "main", *words, "--", *CELL, *QUICK])
    told, warned = capsys.readouterr()
    assert code == 1, told + warned
    found = json.loads((tmp_path / "found.json").read_text())
    changed = {finding["metric"]: finding for finding in found["findings"]}["parameters"]
    [startup] = [finding for finding in found["findings"] if finding["metric"] == "startup"]
    assert (startup["verdict"], len(startup["base"]), len(startup["new"])) == ("shown", 1, 1)
    # 16 weights and a bias; 16 x 16 weights and 16 biases more.
    assert (changed["verdict"], changed["base"], changed["new"]) == ("changed", [17], [17 + 16 * 17])
    pair = PAIR.read(folder / "0001" / "pair.json")
    sides = [block.side for block in pair.cells[0].blocks]
    assert len(sides) >= 4 * FEWEST_QUADS
    assert sides == ["base", "new", "new", "base"] * (len(sides) // 4)
    for side in ("base", "new"):
        study = study_of(folder, pair, side)
        [result] = runs_of(pair, study.results())
        assert result.outcome == "ok"
        # The records of the runs have the blocks that the driver timed.
        [*records] = study.rank_records(result.cell_id, result.run_id)
        walls = [max(ns) for ns in zip(*(record.blocks_ns for record in records), strict=True)]
        assert walls == [block.ns for block in pair.cells[0].blocks if block.side == side]
    # A counter decides at once; the user's repository is as it was, and no work tree is left.
    assert not (folder / "0002").exists()
    assert everything(repository) == before
    assert list(temporary.iterdir()) == []
    again = bench("compare", "--again", str(folder), cwd=repository)
    assert again.returncode == 1
    assert "parameters of py:model:build, ddp, 2 x 8: changed, 17 to 289" in again.stdout
    assert "forked from warm ranks" in again.stdout


@pytest.mark.slow
def test_whole_launches_alternate_where_they_are_asked_to(bench, repository, tmp_path) -> None:
    done = bench(
        *("compare", "--ab", "main~1", "main", "--alternate", "launches", "--out", str(tmp_path / "ab")),
        *("--", *CELL, *QUICK, "--budget", "1s"),
        cwd=repository,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "whole launches of both sides alternated" in done.stdout
    pair = PAIR.read(tmp_path / "ab" / "0001" / "pair.json")
    assert [block.side for block in pair.cells[0].blocks] == ["base", "new"]
    [base, new] = [
        runs_of(pair, study_of(tmp_path / "ab", pair, side).results())[0] for side in ("base", "new")
    ]
    assert pair.cells[0].blocks[0].ns == round(base.step_ns.value)
    # Of the two cores of its two ranks.
    assert base.foreign_cpu_cores is not None
    assert pair.cells[0].blocks[0].foreign == base.foreign_cpu_cores / 2
    assert str(new.started_at) > str(base.started_at)


def test_the_share_of_others_is_of_the_cores_that_a_rank_looks_at() -> None:
    """A rank on a GPU looks at all cores of its node; pinned ranks on CPU look at their own."""
    run_on = RunResult(
        cell_id="c",
        run_id="r",
        launch_id="l",
        repeat=1,
        outcome=Outcome.OK,
        reason=None,
        evidence=Evidence.MEASURED,
        started_at=None,
        ranks_expected=1,
        ranks_present=1,
        foreign_cpu_cores=7.0,
        environment=an_environment(cores=128, threads=16, gpus_per_node=1, pinned_cores=tuple(range(16))),
    )
    assert share_of_others(run_on, on_cpu=False) == 7 / 128
    ranks = an_environment(cores=128, threads=4, gpus_per_node=2, pinned_cores=(0, 1, 2, 3))
    assert share_of_others(msgspec.structs.replace(run_on, environment=ranks), on_cpu=True) == 7 / 8
    free = an_environment(cores=128, threads=4, gpus_per_node=2)
    assert share_of_others(msgspec.structs.replace(run_on, environment=free), on_cpu=True) == 7 / 128
    assert share_of_others(msgspec.structs.replace(run_on, foreign_cpu_cores=None), on_cpu=True) is None


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.mark.slow
@pytest.mark.parametrize("forks", [True, False], ids=["forked", "a thread of user code forbids it"])
def test_pairs_are_forked_from_warm_ranks_that_have_one_thread(
    repository, tmp_path, monkeypatch, *, forks
) -> None:
    if not forks:
        commit(repository, {"model.py": THREAD + MODEL.format(layers=TWO)})
    monkeypatch.chdir(repository)
    # The fewest quads: what they say is not the subject.
    monkeypatch.setattr("harness.features.gate.paired.pair.QUADS_S", 0)
    folder = tmp_path / "ab"
    with temporary_folder("bench-ab-") as (temporary, held):
        source = Repository(repository).source("NEW", "main", None, temporary)
        source = replace(source, options=(*CELL, *QUICK))
        context = PairContext(
            sides={"base": source, "new": source},
            folder=folder,
            temporary=temporary,
            held=held,
            spoiled_above=1.0,
            repeats=3,
        )
        with closing(Pairs(context)) as running:
            pairs = [running.run(number, "blocks") for number in ((1, 2) if forks else (1,))]
    study = study_of(folder, pairs[0], "new")
    results = [run for pair in pairs for run in runs_of(pair, study.results())]
    assert [result.outcome for result in results] == ["ok"] * len(pairs)
    assert [result.run_id for result in results] == [pair.cells[0].new_run for pair in pairs]
    assert [pair.forked for pair in pairs] == [forks] * len(pairs)
    if not forks:
        # The next repeat was on its way in a launch of its own.
        assert len(study.launches()) == 2
        return
    assert len(study.launches()) == 1
    assert not (folder / "0002").exists()
    second = pairs[1]
    assert (second.first, second.launched_with, second.repeat) == ("new", 1, 2)
    assert results[0].first_hash == results[1].first_hash
    assert [result.proof.method == "earlier-run" for result in results if result.proof] == [False, True]
    # Only the first records its exchange and ends with a proof.
    assert [result.exchange_buckets is not None for result in results] == [True, False]
    assert [result.proof.late_steps > 0 for result in results if result.proof] == [True, False]
    assert [result.exchange_operations for result in results] == [results[0].exchange_operations] * 2


STUDY = """
workload: py:model:build
strategy: {strategies}
gpus: 2
device: cpu
batch_size: 8
warmup_steps: 10
block_steps: 5
quads: 0
oversubscribe: true
launcher: slurm
"""


def run_pairs(repository: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, count: int) -> list[Pair]:
    """The first pairs of `main~1` and `main`, which both plan what their study.yaml says."""
    monkeypatch.chdir(repository)
    # The fewest quads: what they say is not the subject.
    monkeypatch.setattr("harness.features.gate.paired.pair.QUADS_S", 0)
    with temporary_folder("bench-ab-") as (temporary, held):
        user = Repository(repository)
        sources: dict[Side, Source] = {
            side: replace(user.source(name, revision, None, temporary), options=("study.yaml",))
            for side, name, revision in (("base", "BASE", "main~1"), ("new", "NEW", "main"))
        }
        context = PairContext(
            sides=sources, folder=folder, temporary=temporary, held=held, spoiled_above=1.0, repeats=2
        )
        with closing(Pairs(context)) as running:
            return [running.run(number, "blocks") for number in range(1, count + 1)]


@pytest.mark.slow
def test_a_cell_that_a_change_adds_runs_alone_and_the_others_are_held_against_their_own(
    repository, tmp_path, monkeypatch
) -> None:
    for strategies in ("[ddp, zero1]", "[ddp, fsdp, zero1]"):
        commit(repository, {"study.yaml": STUDY.format(strategies=strategies)})
    folder = tmp_path / "ab"
    pairs = run_pairs(repository, folder, monkeypatch, count=2)
    study = study_of(folder, pairs[0], "new")
    for pair in pairs:
        assert all(cell.base_cell == cell.new_cell and cell.blocks for cell in pair.cells)
        assert {study.cell(cell.new_cell).strategy for cell in pair.cells} == {"ddp", "zero1"}
    ran = sorted(study.cell(result.cell_id).strategy for result in study.results())
    assert ran == ["ddp", "ddp", "fsdp", "fsdp", "zero1", "zero1"]
    found = decide(folder, pairs, Rules(margins={}), {"base": "a", "new": "b"}, SPOILED_ABOVE)
    verdicts = {(finding.subject, finding.metric): finding.verdict for finding in found.findings}
    assert verdicts["py:model:build, fsdp, 2 x 8", None] is Verdict.NEW
    assert not set(FAILING).intersection(verdicts.values())


NO_MEMORY = """
def loss(outputs, targets):
    if len(outputs) >= 4:
        raise torch.OutOfMemoryError("planted")
    return nn.functional.mse_loss(outputs, targets)

"""


@pytest.mark.slow
@pytest.mark.long
def test_a_side_that_leaves_out_what_cannot_fit_either_comes_to_no_other_order(
    repository, tmp_path, monkeypatch
) -> None:
    """NEW has no memory for four samples, and then does not try more; BASE runs all of its cells."""
    limited = MODEL.format(layers=TWO).replace("\ndef build", f"{NO_MEMORY}\ndef build")
    limited = limited.replace("loss=nn.functional.mse_loss", "loss=loss")
    study = STUDY.format(strategies="ddp").replace("batch_size: 8", "batch_size: [2, 4, 8, 16, 32, 64]")
    commit(repository, {"study.yaml": study})
    commit(repository, {"model.py": limited})
    folder = tmp_path / "ab"
    [pair] = run_pairs(repository, folder, monkeypatch, count=1)
    outcomes = {
        side: [result.outcome for result in runs_of(pair, study_of(folder, pair, side).results())]
        for side in SIDES
    }
    assert Outcome.OUT_OF_MEMORY in outcomes["new"]
    assert outcomes["base"] == [Outcome.OK] * 6


HANGING = """
import pathlib
import signal


def hang_in(part):
    logs = pathlib.Path(OUT).glob("0001/new/launches/*/*.jsonl")
    if any(f'"event": "{part}"' in log.read_text() for log in logs):
        print("reads weights", flush=True)
        pathlib.Path(OUT, "hangs").touch()
        signal.pause()


def loss(outputs, targets):
    hang_in("measure")
    return nn.functional.mse_loss(outputs, targets)

"""


@pytest.mark.slow
def test_a_pair_that_never_ends_names_the_silent_side_its_part_and_its_last_lines(
    repository, tmp_path, monkeypatch
) -> None:
    """The alarm rings when the side hangs: no time is long enough on a busy machine."""
    folder = tmp_path / "ab"
    hanging = MODEL.format(layers=ONE).replace(
        "\ndef build", HANGING.replace("OUT", repr(str(folder))) + "\ndef build"
    )
    hanging = hanging.replace("loss=nn.functional.mse_loss", "loss=loss")
    head = commit(repository, {"model.py": hanging})
    monkeypatch.chdir(repository)
    sides = {
        side: SideRequest(revision=name, options=(*CELL, *QUICK))
        for side, name in zip(SIDES, ("main~1", "main"), strict=True)
    }
    rules, console = Rules(margins={}), Console()
    comparison = PairedComparison(**sides, rules=rules, console=console, max_time_s=300, out=folder)

    def ring() -> None:
        until((folder / "hangs").exists, "NEW does not hang", 120)
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=ring, daemon=True).start()
    with pytest.raises(MachineError) as raised:
        comparison.run()
    told = str(raised.value)
    # Where one rank alone hangs, the others may be in another part.
    assert f"the pair waited for NEW (main, {head[:12]}): " in told
    assert "measuring (rank" in told
    assert "reads weights" in told
    assert "BASE" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("main", "mian", "--", *CELL), "there is no revision mian in"),
        (("main", "--", *CELL[:2]), "--ab takes two revisions"),
        (("main", "main~1", "--", "--repeats", "3"), "--repeats is not for a paired comparison"),
        (("main", "main~1", "--others-above", "lots"), "--others-above lots: a percentage above 0"),
        (("main", "main~1", "--new-options", "'"), "--new-options ': no closing quotation; close"),
        (
            ("main", "main~1", "--new-python", "/bin/true"),
            "/bin/true is not a Python interpreter (--new-python)",
        ),
        (("main", "main~1", "--again", "runs/ab"), "--again takes no BASE and NEW, only a folder"),
    ],
    ids=[
        "no such revision",
        "one revision",
        "an option of the driver",
        "no percentage",
        "an open quotation",
        "no interpreter",
        "revisions to decide again",
    ],
)
def test_wrong_calls_are_one_line_and_exit_with_2(bench_in, repository, words, told) -> None:
    if told.startswith("--ab takes"):
        words = ("main",)
    done = bench_in(repository)("compare", "--ab", *words)
    assert done.code == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (repository / "runs").exists()


def test_no_repository_a_shallow_one_and_a_dirty_tree_are_refused_with_the_fix(repository, tmp_path) -> None:
    with pytest.raises(UsageError, match="is in no git repository"):
        Repository(tmp_path)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), str(shallow))
    with pytest.raises(UsageError, match="shallow: git fetch --depth=1 origin main~1"):
        Repository(shallow).commit("main~1")
    (repository / "model.py").write_text("# edited")
    user = Repository(repository)
    head = user.commit("HEAD")
    with pytest.raises(UsageError, match=r"has changes that main lacks, such as in model.py: commit them"):
        user.require_committed({"main": head})
    user.require_committed({"main~1": user.commit("main~1")})


def test_the_working_tree_is_known_by_its_files(repository) -> None:
    user = Repository(repository)
    first = user.files_hash()
    before = everything(repository)
    (repository / "model.py").write_text("# edited")
    (repository / "new.py").write_text("# new")
    (repository / "notes.txt").write_text("no code")
    edited = user.files_hash()
    assert edited != first
    source = user.source("NEW", ".", None, repository)
    # What is staged or committed is the same code, and where the comparison began does not matter.
    git(repository, "add", "model.py", "new.py")
    assert Repository(repository).files_hash() == edited
    git(repository, "commit", "--quiet", "--message", "change")
    source.require_unedited()
    (repository / "deep").mkdir()
    assert Repository(repository / "deep").files_hash() == edited
    (repository / "new.py").unlink()
    with pytest.raises(UsageError, match="were edited while they were compared: begin a new comparison"):
        source.require_unedited()
    git(repository, "reset", "--quiet", "--hard", "HEAD~1")
    (repository / "notes.txt").unlink()
    assert user.files_hash() == first
    assert before.keys() - everything(repository).keys() == set()


def test_a_revision_of_a_shallow_clone_is_checked_out_in_a_folder_below_the_users(
    repository, tmp_path
) -> None:
    commit(repository, {"deep/er/model.py": "print(1)\n"})
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), str(shallow))
    before = everything(shallow)
    source = Repository(shallow / "deep" / "er").source("BASE", "HEAD", None, tmp_path / "under")
    assert (source.folder / "model.py").read_text() == "print(1)\n"
    assert git(source.tree, "rev-parse", "HEAD") == source.commit
    assert git(source.tree, "status", "--porcelain") == ""
    assert everything(shallow) == before
    (shallow / "other").mkdir()
    with pytest.raises(UsageError, match="has no folder other"):
        Repository(shallow / "other").source("NEW", "HEAD", None, tmp_path / "under")


@pytest.mark.parametrize(
    ("turns", "code", "told"),
    [
        (None, 3, "is older than the paired mode"),
        ("PROTOCOL = 0", 3, "takes turns by protocol 0"),
        ("import nowhere", 2, "cannot be imported"),
    ],
    ids=["before the protocol", "another protocol", "does not import"],
)
def test_revisions_of_bench_that_take_no_turns(bench_in, repository, turns, code, told) -> None:
    commit(repository, OLDER if turns is None else {**OLDER, "harness/worker/turns.py": turns})
    done = bench_in(repository)("compare", "--ab", "main", "main~1", "--", *CELL)
    assert done.code == code, done.stderr
    assert told in (done.stdout if code == 3 else done.stderr)
    assert not (repository / "runs").exists()


def test_what_git_tracks_on_the_import_path_is_that_of_each_side(repository, tmp_path, monkeypatch) -> None:
    commit(repository, {"src/code.py": "VALUE = 2\n"})
    (repository / "untracked").mkdir()
    monkeypatch.chdir(repository)
    given = [str(repository / "src"), str(repository / "untracked"), str(tmp_path / "elsewhere"), "relative"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
    here = Repository(repository)
    # BASE is from before `src`: what the user has there is not its code.
    for name, revision in (("NEW", "HEAD"), ("BASE", "HEAD~1")):
        side = here.source(name, revision, None, tmp_path / "sides")
        assert side.environment()["PYTHONPATH"].split(os.pathsep) == [str(side.tree / "src"), *given[1:]]
    as_it_is = here.source("NEW", ".", None, tmp_path / "sides")
    assert as_it_is.environment()["PYTHONPATH"].split(os.pathsep) == given


def test_the_accepted_commit_is_that_of_its_file_or_the_last_tag(bench_in, repository) -> None:
    bench = bench_in(repository)
    (repository / "accepted.yaml").write_text(f"commit: '{'0' * 40}'\n")
    lost = bench("compare", "--ab", "accepted.yaml", ".", "--", *CELL)
    assert lost.code == 3
    assert f"there is no revision {'0' * 40}" in lost.stdout
    assert "the repository has no tag" in lost.stdout
    # The tag is of a tree with a `bench` that has no turns, which says that it was chosen.
    commit(repository, OLDER)
    git(repository, "tag", "v1")
    # Changes that no revision has are those of the working tree.
    (repository / "model.py").write_text("# edited")
    tagged = bench("compare", "--ab", "accepted.yaml", ".", "--", *CELL)
    assert tagged.code == 3
    assert "BASE (v1, " in tagged.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("comit: main~1", "did you mean 'commit'"),
        (
            "commit: main\nchanges: {operation: new}",
            "there is no metric 'operation' (did you mean 'operations'?)",
        ),
        ("commit: main\nchanges: {operations: ' '}", "operations has no reason: say why the change is meant"),
        (
            "commit: main\nfail_above: {step_tim: 3%}",
            "there is no metric 'step_tim' (did you mean 'step_time'?)",
        ),
        ("commit: main\nfail_above: {step_time: '0.03'}", "step_time 0.03: a percentage above 0"),
        ("commit: ' '", "it is empty; name the last accepted commit"),
    ],
    ids=["no such key", "no such metric", "no reason", "a margin of no metric", "no percentage", "no commit"],
)
def test_a_file_of_the_accepted_commit_that_would_accept_nothing_is_refused(
    text, told, repository, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(repository)
    Path("accepted.yaml").write_text(f"{text}\n")
    assert run(["compare", "--ab", "accepted.yaml", ".", "--", *CELL]) == 2
    assert told in capsys.readouterr().err


def accepting(folder: Path, *metrics: str) -> PairedComparison:
    """A comparison that takes changes of these metrics for right, and has its records in `folder`."""
    file = folder.with_suffix(".yaml")
    file.write_text("commit: main\n")
    side = SideRequest(revision=str(file))
    rules = Rules(margins={}, accepted=dict.fromkeys(metrics, "meant"))
    return PairedComparison(base=side, new=side, rules=rules, console=Console(), out=folder)


@pytest.mark.parametrize(
    ("verdicts", "stale"),
    [
        ([Verdict.UNCHANGED, Verdict.UNCHANGED], True),
        ([Verdict.UNCHANGED, Verdict.IMPROVED], True),
        ([Verdict.UNCHANGED, Verdict.ACCEPTED], False),
        # What cannot be judged may still be there.
        ([Verdict.UNCHANGED, Verdict.INCONCLUSIVE], False),
        ([Verdict.UNCHANGED, Verdict.SHOWN], False),
        ([], False),
    ],
)
def test_an_accepted_change_that_is_there_no_more_is_told(verdicts, stale, tmp_path, capsys) -> None:
    """Its line would hide the next change. `verdicts` are of the cells."""
    findings = [
        Finding(subject=str(number), key=str(number), metric="buckets", verdict=verdict, reason="")
        for number, verdict in enumerate(verdicts)
    ]
    found = Comparison(base="a", new="b", findings=tuple(findings), confidence=0.99)
    comparison = accepting(tmp_path, "buckets")
    comparison._warn_of_stale(found)
    words = "accepts a change of buckets, which no longer shows: remove the line"
    assert (words in capsys.readouterr().err) == stale
    # A cell that failed has no finding of the metric.
    failed = Finding(subject="c", key="c", metric=None, verdict=Verdict.FAILED, reason="")
    comparison._warn_of_stale(replace(found, findings=(*findings, failed)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("verdicts", "stale"),
    [
        ([], True),
        ([Verdict.NEW], True),
        ([Verdict.ACCEPTED], False),
        # A cell without figures may be the one.
        ([Verdict.INCOMPARABLE], False),
    ],
)
def test_an_accepted_missing_cell_that_is_back_is_told(verdicts, stale, tmp_path, capsys) -> None:
    """`verdicts` are of complete cells, next to one that is unchanged."""
    unchanged = Finding(subject="a", key="a", metric="buckets", verdict=Verdict.UNCHANGED, reason="")
    whole = [Finding(subject="b", key="b", metric=None, verdict=verdict, reason="") for verdict in verdicts]
    found = Comparison(base="a", new="b", findings=(unchanged, *whole), confidence=0.99)
    accepting(tmp_path, "missing")._warn_of_stale(found)
    assert ("accepts a change of missing" in capsys.readouterr().err) == stale


def test_the_records_of_a_comparison_have_the_changes_that_its_last_call_accepts(tmp_path) -> None:
    folder = tmp_path / "ab"
    base, new = (
        Source(name=name, revision=name, commit=None, folder=tmp_path, tree=tmp_path, python="python")
        for name in ("BASE", "NEW")
    )
    sources: dict[Side, Source] = {"base": base, "new": new}
    for metrics in (("buckets", "flops"), ("flops",)):
        accepting(folder, *metrics)._claim(sources)
        kept = PAIRED_CALL.read(folder / "call.json")
        assert kept.changes == dict.fromkeys(metrics, "meant")
    for other in (replace(new, options=("--gpus", "2")), replace(new, files="0123")):
        with pytest.raises(UsageError, match="holds another comparison"):
            accepting(folder)._claim({**sources, "new": other})


def test_a_look_is_taken_when_every_cell_has_its_pairs_and_not_again_while_one_catches_up(
    tmp_path, monkeypatch
) -> None:
    """A further look at more pairs of the other cells would have no share of the error rate."""
    spoiled_pairs = {"a": (), "b": (7,)}

    def samples(_: Path, pairs: Sequence[int], __: object) -> dict[str, PairedSample]:
        logs = {
            key: [0.01 for pair in pairs if pair not in spoiled] for key, spoiled in spoiled_pairs.items()
        }
        return {key: PairedSample(logs=tuple(found), means=(1.0, 1.0)) for key, found in logs.items()}

    monkeypatch.setattr("harness.features.gate.paired.comparison.paired_samples", samples)
    effect = Effect(value=0.0, low=-0.01, high=0.01, error=0.01, runs=(6, 6))
    finding = Finding(
        subject="a", key="a", metric="step_time", verdict=Verdict.UNCHANGED, reason="", effect=effect
    )
    found = Comparison(base="a", new="b", findings=(finding,), confidence=0.99)
    comparison: Any = accepting(tmp_path)
    looks = [last for last in range(1, 15) if comparison._is_over(found, range(1, last + 1))]
    # The seventh pair gives `b` none, so that it has six for two pairs, and twelve at the thirteenth.
    assert looks == [6, 13]


def test_pairs_that_have_no_run_of_a_cell_end_the_comparison_after_the_fifth(tmp_path) -> None:
    """BASE ran in the first pair, and then never reached the cell."""
    at = "2026-01-02T03:04:05.000Z"
    sides: list[Side] = ["base", "new", "new", "base"]
    blocks = tuple(PairedBlock(side=side, steps=10, ns=10**9) for side in sides * FEWEST_QUADS)
    cell = a_cell()
    cells = (PairedCell(base_cell=cell.id, base_run="r", new_cell=cell.id, new_run="s", blocks=blocks),)
    for number in range(1, 8):
        pair = Pair(
            number=number,
            first="base",
            alternation="blocks",
            started_at=at,
            ended_at=at,
            cells=cells if number == 1 else (),
        )
        study = study_of(tmp_path, pair, "base")
        study.add_cell(cell)
        files.write_once(tmp_path / f"{number:04d}" / "pair.json", PAIR.encode(pair))
    pairs, found = read_pairs(tmp_path), Comparison(base="a", new="b", findings=(), confidence=0.99)
    comparison = accepting(tmp_path)
    assert [comparison._is_over(found, pairs[:number]) for number in (2, 5, 6)] == [False, False, True]


def test_a_folder_whose_name_is_too_long_for_a_socket_is_refused_with_the_fix(tmp_path) -> None:
    with pytest.raises(UsageError, match="set TMPDIR to a local folder with a short name"):
        Seat(tmp_path / ("x" * 110))


HOLDER = """
import sys, time
from harness.machine.processes import temporary_folder
with temporary_folder("bench-ab-") as (folder, held):
    (folder / "file").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_work_trees_of_a_killed_driver_are_removed() -> None:
    driver = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    folder = Path(driver.stdout.readline().strip())
    assert (folder / "file").exists()
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    until(lambda: not folder.exists(), f"{folder} is still there")


def test_the_work_trees_stay_as_long_as_somebody_works_in_them() -> None:
    with temporary_folder("bench-ab-") as (folder, held):
        worker = subprocess.Popen(["sleep", "600"], pass_fds=(held,))
        threading.Timer(0.3, worker.kill).start()
    # The end of the block has waited for the worker.
    assert worker.wait(60) == -signal.SIGKILL
    assert not folder.exists()


class Speaker:
    """One of two ranks, on a thread: it times blocks until it may continue, or dies before the first."""

    def __init__(self, path: Path, rank: int, run: str, *, dies: bool = False) -> None:
        self.blocks: list[int] = []
        self.beats = 0
        self.only_timed: bool | None = None
        self._turns = Turns(str(path), self._beat)
        self._dies = dies
        self.thread = threading.Thread(target=self._talk, args=(rank, run), daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        self.beats += 1

    def _talk(self, rank: int, run: str) -> None:
        # A run whose other rank never comes is left alone.
        with closing(self._turns), suppress(ConnectionError):
            self._turns.wait("begin", run=run, rank=rank, gpus=2, cell="c", cores=[0])
            steps = 0 if self._dies else self._turns.wait("measure", step_ns=1e6)
            self.only_timed = self._turns.only_timed
            while steps:
                self.blocks.append(steps)
                steps = self._turns.wait("block", ns=steps * (rank + 1), steps=steps)


@pytest.fixture
def seat(tmp_path, monkeypatch) -> Iterator[Seat]:
    monkeypatch.setattr("harness.worker.turns.BEAT_S", 0.05)
    seat = Seat(tmp_path / "seat")
    yield seat
    seat.close()


def test_ranks_that_wait_give_signs_of_life_and_time_the_blocks_that_they_are_given(seat, tmp_path) -> None:
    ranks = [Speaker(tmp_path / "seat", rank, "first") for rank in (0, 1)]
    first = seat.next_run(lambda: None)
    assert (first["run"], first["rank"]) == ("first", 0)
    until(lambda: all(rank.beats for rank in ranks), "the logs of ranks that wait do not grow", 10)
    assert [told["at"] for told in seat.go(only_timed=True)] == ["measure", "measure"]
    assert [told["ns"] for told in seat.go(7)] == [7, 14]
    seat.end()
    for rank in ranks:
        rank.thread.join(60)
    assert [(rank.blocks, rank.only_timed) for rank in ranks] == [([7], True), ([7], True)]
    assert seat.next_run(lambda: os.EX_OK) is None


@pytest.mark.parametrize(
    ("base", "new", "both"),
    [({"only_timed": True}, {"only_timed": True}, True), ({}, {"only_timed": True}, False)],
)
def test_later_pairs_are_timed_alone_where_the_revisions_of_both_sides_know_that(base, new, both) -> None:
    assert both_can_be_only_timed({"base": base, "new": new}) is both


def test_a_rank_that_ends_loses_its_run_and_no_other(seat, tmp_path) -> None:
    # It connects, says nothing, and ends.
    Turns(str(tmp_path / "seat"), lambda: None).close()
    ranks = [Speaker(tmp_path / "seat", rank, "second", dies=rank == 0) for rank in (0, 1)]
    assert seat.next_run(lambda: None) is not None
    with pytest.raises(LostError):
        seat.go()
    seat.end()
    ranks[1].thread.join(60)
    # Alone it times one block, so that its record is whole.
    assert (len(ranks[1].blocks), ranks[1].only_timed) == (1, False)
    lonely = Speaker(tmp_path / "seat", 0, "third")
    whole = [Speaker(tmp_path / "seat", rank, "fourth") for rank in (0, 1)]
    fourth = seat.next_run(lambda: None)
    assert fourth["run"] == "fourth"
    seat.go()
    seat.end()
    for rank in (lonely, *whole):
        rank.thread.join(60)
