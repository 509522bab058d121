"""`bench matrix --launcher kubernetes`: what is written, what is handed over, and how an end is found out."""

from __future__ import annotations

import kubernetes_validate
import msgspec
import pytest
import yaml
from launching import a_job_end

from harness.cli import run
from harness.launchers.jobs import job_statuses
from harness.machine.code import checkout, code_hash
from results.job_store import JobStore
from results.outcome import Outcome
from results.store import Study

MATRIX = [
    *("matrix", "--gpus", "8,16", "--workload", "gpt2-small", "--strategy", "ddp", "--repeats", "1"),
    *("--launcher", "kubernetes", "--site", "site.yaml", "--out", "volume/study"),
]


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(
        f"image: bench:1\nvolume_claim: results\nmount_path: {tmp_path}/volume\ngpus_per_node: 8\n"
        "price: {usd_per_gpu_hour: 2, source: a list}\n"
    )


def documents(text: str) -> list[dict[str, object]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def test_a_dry_run_prints_manifests_that_are_valid_and_writes_nothing(tmp_path, capsys) -> None:
    assert run([*MATRIX, "--dry-run", "--time", "30m"]) == 0
    printed = capsys.readouterr().out
    found = documents(printed)
    assert [document["kind"] for document in found] == ["Service", "Job", "Service", "Job"]
    for document in found:
        kubernetes_validate.validate(document, "1.31", strict=True)
    # 8 GPUs and 16 for half an hour, at two dollars.
    assert "12.00 at most" in printed
    assert "$24.00 at most" in printed
    assert not (tmp_path / "volume").exists()


def test_parts_of_a_gpu_are_not_shared_by_the_workers_of_a_pod(tmp_path, capsys) -> None:
    """CUDA shows a process only one part (MIG), so that 8 workers of a pod would have the same."""
    profile = (tmp_path / "site.yaml").read_text() + "gpu_resource: nvidia.com/mig-1g.10gb\n"
    (tmp_path / "site.yaml").write_text(profile)
    assert run([*MATRIX, "--dry-run"]) == 2
    assert "mig-1g.10gb is a part of a GPU" in capsys.readouterr().err
    # A pod for each worker.
    assert run([*MATRIX, "--gpus-per-node", "1", "--dry-run"]) == 0
    (tmp_path / "site.yaml").write_text("{gpu_type: 1g.10gb, gpus_per_node: 8}")
    slurm = [("slurm" if word == "kubernetes" else word) for word in MATRIX]
    assert run([*slurm, "--dry-run"]) == 2


def test_a_manifest_is_written_once_and_offered_until_it_is_applied(tmp_path, capsys) -> None:
    assert run(MATRIX) == 0
    first = capsys.readouterr()
    paths = sorted(tmp_path.glob("volume/study/jobs/*/manifest.yaml"))
    assert [path.parent.name for path in paths] == ["0001-1x8", "0002-2x8"]
    offers = [f"kubectl apply -f {path.relative_to(tmp_path)}" for path in paths]
    assert [line for line in first.out.splitlines() if line.startswith("kubectl")] == offers
    # The study is on the volume already.
    assert "copy" not in first.err
    assert run(MATRIX) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("kubectl")] == offers
    assert len(list(tmp_path.glob("volume/study/jobs/*"))) == 2


def test_what_is_applied_is_not_applied_again(tmp_path, kubectl) -> None:
    assert run([*MATRIX, "--apply"]) == 0
    applied = kubectl.read_text()
    assert [document["kind"] for document in documents(applied)] == ["Service", "Job"] * 2
    assert run([*MATRIX, "--apply"]) == 0
    assert kubectl.read_text() == applied
    store = JobStore(tmp_path / "volume" / "study")
    submissions = [store.submission(job.job_id) for job in store.jobs()]
    assert all(told is not None and told.scheduler_id.startswith("default/") for told in submissions)


def test_a_job_ends_by_its_own_word_and_leaves_the_rest_to_the_next(tmp_path) -> None:
    assert run(MATRIX) == 0
    study = Study(tmp_path / "volume" / "study")
    store = JobStore(study.root)
    [one, _] = store.jobs()
    assert one.code.code_hash == code_hash(checkout())
    end = a_job_end(Outcome.PREEMPTED, job_id=one.job_id, nodes=("pod-0",), reason="evicted")
    store.add_end(end)
    # The cluster replaces the pod.
    assert [status.is_live for status in job_statuses(study)] == [True, True]
    store.add_end(
        msgspec.structs.replace(end, start=1, outcome=Outcome.TIMED_OUT, reason="its time was over")
    )
    assert [(found.state, found.is_live) for found in job_statuses(study)] == [
        ("timed_out", False),
        ("not submitted", True),
    ]
    assert run(MATRIX) == 0
    assert [job.job_id for job in store.jobs()] == ["0001-1x8", "0002-2x8", "0003-1x8"]


def test_cancelled_jobs_are_closed_and_the_way_to_delete_them_is_told(tmp_path, capsys) -> None:
    assert run([*MATRIX, "--kind", "job"]) == 0
    # Earlier versions made StatefulSets as well.
    old = tmp_path / "volume/study/jobs/0001-1x8/manifest.yaml"
    old.write_text(old.read_text().replace("kind: Job", "kind: StatefulSet"))
    assert [found.state for found in job_statuses(Study(tmp_path / "volume/study"))] == ["not submitted"] * 2
    capsys.readouterr()
    assert run(["cancel", "volume/study"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 jobs cancelled",
        "kubectl delete -f volume/study/jobs/0001-1x8/manifest.yaml",
        "kubectl delete -f volume/study/jobs/0002-2x8/manifest.yaml",
    ]
    assert [found.state for found in job_statuses(Study(tmp_path / "volume/study"))] == ["cancelled"] * 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--site", "missing.yaml"], "missing.yaml"),
        (
            ["--device", "cpu", "--link", "1gbit"],
            "--link makes nodes with separate networks on this host",
        ),
        (["--max-gpu-hours", "1"], "--max-gpu-hours 1: the jobs may take"),
        (["--kind", "statefulset"], "--kind statefulset was removed: leave --kind out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, capsys, flags, words) -> None:
    assert run([*MATRIX, *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "volume").exists()


def test_the_budget_is_of_all_settings_together(tmp_path, capsys) -> None:
    # 8 GPUs and 16 for half an hour: 12 GPU-hours for each setting.
    call = [*MATRIX, "--time", "30m", "--seed"]
    assert run([*call, "0,1", "--max-gpu-hours", "23"]) == 2
    assert "--max-gpu-hours 23: the jobs may take 24.00" in capsys.readouterr().err
    assert not (tmp_path / "volume").exists()
    assert run([*call, "0", "--max-gpu-hours", "12"]) == 0
    # In a study that is there, jobs that hold their cells do not count.
    assert run([*call, "0,1,2", "--max-gpu-hours", "23"]) == 2
    assert len(list(tmp_path.glob("volume/study/jobs/*"))) == 2
    capsys.readouterr()
    assert run([*call, "0,1,2", "--max-gpu-hours", "24"]) == 0
    offers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kubectl")]
    assert len(offers) == len(set(offers)) == 6


def test_a_profile_is_asked_for(capsys) -> None:
    assert run(["matrix", "--gpus", "8", "--launcher", "kubernetes"]) == 2
    assert "--launcher kubernetes needs --site" in capsys.readouterr().err
