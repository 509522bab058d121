"""The image's recipe, as far as it can be checked without a build."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.machine.code import code_version

ROOT = Path(__file__).parents[3]


def test_the_linter_finds_nothing() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("no hadolint here")
    done = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_packages_go_in_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert kept == {
        *packages,
        "pyproject.toml",
        "constraints.txt",
        project["project"]["readme"],
        *project["project"]["license-files"],
    }


def test_every_dependency_is_pinned_to_a_version_that_the_project_takes() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in pairs}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Their versions are in the Makefile and beside their tests, and they have environments of their own.
    apart = ("deepspeed", "wandb", "mlflow")
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in apart]
    for wanted in map(Requirement, [*project["dependencies"], *(line for extra in extras for line in extra)]):
        assert pins[canonicalize_name(wanted.name)] in wanted.specifier, (
            f"{wanted}: renew it with `make constraints`"
        )


def test_the_image_installs_nothing_that_is_not_pinned() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert len(installs) == 3
    assert all("--constraint" in line for line in installs)


def test_the_runtime_hands_devices_and_their_driver_into_the_image() -> None:
    # Of the last stage: the one that is run.
    lines = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2].splitlines()
    given = [entry for line in lines if line.startswith("ENV ") for entry in line.split()[1:]]
    environment = dict(entry.split("=", 1) for entry in given)
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    # Compute: CUDA. Utility: NVML, which telemetry reads, and nvidia-smi.
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_the_image_has_the_libraries_by_which_nccl_uses_infiniband() -> None:
    last = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2].replace("\\\n", " ")
    (install,) = [line for line in last.splitlines() if "apt-get install" in line]
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(install.split())


def test_the_commit_of_the_image_is_that_of_the_records(tmp_path, monkeypatch) -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "ENV BENCH_COMMIT=$COMMIT" in lines
    monkeypatch.setattr("harness.machine.code.checkout", lambda: tmp_path)
    monkeypatch.setenv("BENCH_COMMIT", "0123abcd")
    assert code_version().commit == "0123abcd"
    monkeypatch.setenv("BENCH_COMMIT", "")
    assert code_version().commit is None


def test_the_commit_of_an_installation_from_git_is_that_of_the_records(tmp_path, monkeypatch) -> None:
    # As pip writes it: the "direct URL origin" record of the packaging specifications.
    folder = tmp_path / "bench-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: bench\nVersion: 0\n")
    url = {"url": "https://example.org/bench", "vcs_info": {"vcs": "git", "commit_id": "4567cdef"}}
    (folder / "direct_url.json").write_text(json.dumps(url))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("harness.machine.code.checkout", lambda: tmp_path)
    assert code_version().commit == "4567cdef"
