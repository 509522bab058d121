"""The files of docs/ci: their own linters and schemas, and their script steps, run here on a small study."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.features.gate.paired.sources import ACCEPTED
from harness.launchers.nights import night
from harness.plan.study_file import STUDY_FILE

CI = Path(__file__).parents[3] / "docs" / "ci"
BIN = Path(sys.executable).parent
SCRIPTS = ("gate.sh", "night.sh", "history.sh")
INSTALLATION = ("Install", "Remove what earlier jobs left")
"""Steps that make the machine ready; the tests' machine is."""
STUDY = """
workload: py:model:build
strategy: single
gpus: 1
device: cpu
batch_size: 8
repeats: 1
budget: 0s
warmup_steps: 10
block_steps: 5
quads: 0
"""
MODEL = """
import torch
from torch import nn

from workloads import Workload


def synthetic(generator, samples):
    return torch.randn(samples, 16, generator=generator), torch.randn(samples, 1, generator=generator)


def build():
    return Workload(module=nn.Sequential({layers}), loss=nn.functional.mse_loss, synthetic=synthetic)
"""


def github_steps(job: str) -> list[dict[str, Any]]:
    steps = yaml.safe_load((CI / "github.yml").read_text())["jobs"][job]["steps"]
    return [step for step in steps if "run" in step and step["name"] not in INSTALLATION]


def gitlab_script(job: str) -> list[str]:
    found: list[str] = yaml.safe_load((CI / "gitlab-ci.yml").read_text())[job]["script"]
    return found


def checked(words: list[str | Path], given: str | None = None) -> None:
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "name"), [("github-workflows", "github.yml"), ("gitlab-ci", "gitlab-ci.yml")]
)
def test_workflows_have_the_published_schema(schema, name) -> None:
    checked([BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", CI / name])


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_finds_nothing_but_the_runners_label() -> None:
    checked(["actionlint", "-ignore", 'label "bench" is unknown', CI / "github.yml"])


def test_shellcheck_finds_nothing_in_scripts_and_steps() -> None:
    checked([BIN / "shellcheck", *(CI / name for name in SCRIPTS)])
    steps = [step["run"] for job in ("gate", "night") for step in github_steps(job)]
    for text in [*steps, *("\n".join(gitlab_script(job)) for job in ("gate", "night"))]:
        checked([BIN / "shellcheck", "--shell", "bash", "-"], text)


def test_both_systems_run_the_same_commands_on_a_study_that_can_be_read() -> None:
    for job in ("gate", "night"):
        (step,) = [step["run"] for step in github_steps(job) if ".sh" in step["run"]]
        ours = [re.sub(r'"(origin/)?\$\w+"', "BASE", line) for line in step.strip().splitlines()]
        assert ours == [re.sub(r'"\$\w+"', "BASE", line) for line in gitlab_script(job)]
    (night,) = [line.partition(" ||")[0] for line in gitlab_script("night") if "night.sh" in line]
    assert night in (CI / "scrontab").read_text()
    assert STUDY_FILE.read(CI / "nightly.yaml").repeats == 5


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A user's checkout on a runner: `accepted` is a model of one layer, HEAD of two."""
    checkout = tmp_path / "project"
    folder = checkout / "bench"
    folder.mkdir(parents=True)
    for name in SCRIPTS:
        shutil.copy(CI / name, folder)
    (folder / "nightly.yaml").write_text(STUDY)
    (checkout / ".gitignore").write_text("/runs/\n/gate/\n/history/\n/baselines/\n/public/\n")
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "steps.md")
    monkeypatch.setenv("GITHUB_BASE_REF", "accepted")
    git("init", "--quiet", "--bare", str(tmp_path / "origin"))
    git("init", "--quiet")
    git("remote", "add", "origin", str(tmp_path / "origin"))
    for layers, name in (
        ("nn.Linear(16, 1)", "accepted"),
        ("nn.Linear(16, 16), nn.Linear(16, 1)", "changed"),
    ):
        (folder / "model.py").write_text(MODEL.format(layers=layers))
        git("add", "--all")
        git("commit", "--quiet", "--message", name)
        git("push", "--quiet", "origin", f"HEAD:refs/heads/{name}")
    return checkout


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)


def revision(name: str) -> str:
    done = subprocess.run(["git", "rev-parse", name], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def shell(text: str) -> subprocess.CompletedProcess[str]:
    """Run a script as both systems call it: by bash, which stops at the first failure."""
    return subprocess.run(["bash", "-eo", "pipefail", "-c", text], capture_output=True, text=True)


def test_a_night_that_meets_another_one_ends_with_4_and_keeps_nothing(project) -> None:
    with night("nightly", Path("runs")):
        done = shell("bench/night.sh bench/nightly.yaml main")
    assert done.returncode == 4, done.stderr
    assert "another night measures on this host" in done.stderr
    assert not Path("history").exists()


def test_a_gate_refuses_the_folder_of_an_earlier_one(project) -> None:
    Path("gate").mkdir()
    done = shell("bench/gate.sh bench/nightly.yaml main")
    assert done.returncode == 2
    assert "gate is there already" in done.stderr


@pytest.mark.parametrize("accepted", [False, True], ids=["none", "a commit"])
def test_a_gate_compares_with_the_accepted_commit_where_one_is_named(
    project, monkeypatch, *, accepted
) -> None:
    """Not with the branch that the change is for: a drift of 1 % a change stays below the margin there."""
    program = project / "bin" / "bench"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@" >> called\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    if accepted:
        guide = (CI / "README.md").read_text().partition("```sh\n")[2].partition("```")[0]
        named = guide.replace("HEAD", "origin/accepted").replace("git add", "git add --force")
        assert shell(named).returncode == 0
        assert ACCEPTED.read(Path("baselines/accepted.yaml")).commit == revision("origin/accepted")
    assert shell("bench/gate.sh bench/nightly.yaml origin/accepted").returncode == 0
    base = "baselines/accepted.yaml" if accepted else "origin/accepted"
    compared, shown = Path("called").read_text().splitlines()
    assert compared.startswith(f"compare --ab {base} HEAD ")
    assert shown == "site gate/pairs -o gate/site"


@pytest.fixture
def canary(tmp_path) -> Callable[[str, str], subprocess.CompletedProcess[str]]:
    """`canary(text, script)` runs .ci/canary in a clone with this accepted.yaml; its bench is `script`."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    git("init", "--quiet", str(origin))
    for number in range(3):
        git("-C", str(origin), "commit", "--quiet", "--allow-empty", "--message", str(number))
    git("clone", "--quiet", origin.as_uri(), str(clone))
    for folder in (".ci", "baselines", ".venv/bin"):
        (clone / folder).mkdir(parents=True)
    shutil.copy(CI.parents[1] / ".ci" / "canary", clone / ".ci")

    def ran(text: str, script: str) -> subprocess.CompletedProcess[str]:
        (clone / "baselines/accepted.yaml").write_text(text)
        (clone / ".venv/bin/bench").write_text(f"#!/bin/sh\n{script}\n")
        (clone / ".venv/bin/bench").chmod(0o755)
        return subprocess.run([clone / ".ci/canary"], capture_output=True, text=True)

    return ran


MADE_A_PAIR = """
while [ "$1" != --out ]; do shift; done
mkdir -p "$2/0001"
touch "$2/0001/pair.json"
"""


NOTHING_COMPARED = """
for word; do case $word in json=*) echo '{"verdict": "nothing compared"}' > "${word#json=}";; esac; done
while [ "$1" != --out ]; do shift; done
mkdir -p "$2/0001"
touch "$2/0001/pair.json"
"""


def test_a_gate_on_a_busy_runner_is_green_and_says_so(project, monkeypatch) -> None:
    program = project / "bin" / "bench"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{NOTHING_COMPARED.partition('while')[0]}exit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    done = shell("bench/gate.sh bench/nightly.yaml origin/accepted")
    assert (done.returncode, "nothing was compared" in done.stderr) == (0, True)


@pytest.mark.parametrize(
    ("quote", "script", "ends", "told"),
    [
        ('"', "exit 0", 0, ""),
        ("'", "exit 1", 1, "this tree trains worse, or otherwise, than commit 0123456789ab: see"),
        ("", "exit 2", 2, ""),
        ("", "exit 3", 0, "the accepted commit cannot be compared with, which is no failure"),
        ("", f"{NOTHING_COMPARED}exit 3", 0, "too busy to compare anything"),
        ("", f"{MADE_A_PAIR}exit 3", 3, "a fact differs between this tree and commit 0123456789ab: see"),
    ],
    ids=["green", "red", "no verdict", "incomparable", "nothing compared", "another fact"],
)
def test_the_canary_ends_with_what_the_comparison_says_and_leaves_the_clone_its_history(
    canary, tmp_path, quote, script, ends, told
) -> None:
    done = canary(f"# The commit.\ncommit: {quote}{'0123456789abcdef' * 2}01234567{quote}\n", script)
    assert (done.returncode, done.stderr) == (ends, "")
    assert told in done.stdout
    assert bool(done.stdout) == bool(told)
    listed = subprocess.run(
        ["git", "-C", tmp_path / "clone", "rev-list", "--count", "HEAD"], capture_output=True, text=True
    )
    assert listed.stdout.strip() == "3"


@pytest.mark.slow
def test_the_gate_of_a_pull_request_is_red_where_a_counter_changed(project) -> None:
    measure, show, _ = github_steps("gate")
    done = shell(measure["run"])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "parameters of py:model:build" in done.stdout
    shown = shell(show["run"])
    assert shown.returncode == 0, shown.stderr
    assert "::error title=changed%3A parameters" in shown.stdout
    assert Path("steps.md").read_text() == Path("gate/summary.md").read_text()
    assert json.loads(Path("gate/verdict.json").read_text())["exit_code"] == 1
    for name in ("junit.xml", "bencher.json", "benchmark.json"):
        assert Path("gate", name).stat().st_size


@pytest.mark.slow
def test_a_night_of_failures_alone_is_red_and_tells_so(project, monkeypatch) -> None:
    """Its study's name is not the plain one, and the verdicts of the night before are there."""
    study = project / "bench/my_night.yml"
    study.write_text(STUDY)
    assert shell(f"bench matrix {study} --out runs/ok && bench baseline save main runs/ok").returncode == 0
    Path("runs/my_night.md").write_text("all is well")
    broken = MODEL.format(layers="nn.Linear(16, 1)").replace("nn.functional.mse_loss", "lambda *_: 1 / 0")
    (project / "bench/model.py").write_text(broken)
    git("commit", "--quiet", "--all", "--message", "broken")
    monkeypatch.setenv("ON_REGRESSION", "cp $BENCH_VERDICT told.json")
    done = shell(f"bench/night.sh {study} main")
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(Path("told.json").read_text())["findings"][0]["verdict"] == "failed"
    assert "| failed |" in Path("runs/my_night.md").read_text()
    assert not Path("history").exists()


@pytest.mark.slow
def test_a_night_is_kept_and_tells_what_changed(project, monkeypatch) -> None:
    git("checkout", "--quiet", "origin/accepted")
    made = shell(
        "bench matrix bench/nightly.yaml --out runs/accepted && bench baseline save main runs/accepted"
    )
    assert made.returncode == 0, made.stderr
    git("checkout", "--quiet", "origin/changed")
    monkeypatch.setenv("ON_REGRESSION", "cp $BENCH_VERDICT told.json")
    done = shell("\n".join(gitlab_script("night")))
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads(Path("told.json").read_text())["findings"]
    assert {"parameters"} <= {finding["metric"] for finding in told if finding["verdict"] == "changed"}
    assert "parameters" in Path("runs/nightly.md").read_text()
    # Another runner gets the night from the branch.
    git("clone", "--quiet", "--branch", "bench-history", "../origin", "../other")
    kept = [path.relative_to("../other") for path in Path("../other").glob("*/*.json")]
    assert kept == [path.relative_to("history") for path in Path("history").glob("*/*.json")]
    assert len(kept) == 1
    assert 'href="studies/' in Path("public/index.html").read_text()


def test_a_history_of_two_runners_is_one_and_a_folder_on_no_branch_is_left(project) -> None:
    git("worktree", "add", "--quiet", "../second", "HEAD")
    for runner in (project, project.parent / "second"):
        script = (
            "bench/history.sh pull && mkdir -p history/m && touch history/m/$$.json && bench/history.sh push"
        )
        done = subprocess.run(["bash", "-ec", script], cwd=runner, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert shell("bench/history.sh pull").returncode == 0
    assert len(list(Path("history/m").iterdir())) == 2
    Path("../second/history/.git").unlink()
    done = subprocess.run(["bench/history.sh", "pull"], cwd="../second", capture_output=True, text=True)
    assert (done.returncode, len(list(Path("../second/history/m").iterdir()))) == (2, 2)
