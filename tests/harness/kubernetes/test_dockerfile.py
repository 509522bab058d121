"""The image's recipe, as far as it can be held to something without building it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

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
        project["project"]["readme"],
        *project["project"]["license-files"],
    }


def test_the_torch_of_the_image_is_one_that_the_project_takes() -> None:
    versions = re.findall(r"^ARG TORCH=(\d+)\.(\d+)\.\d+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = next(line for line in project["project"]["dependencies"] if line.startswith("torch"))
    low, high = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", wanted).groups()  # type: ignore[union-attr]
    assert len(versions) == 2
    for major, minor in versions:
        assert major == "2"
        assert int(low) <= int(minor) < int(high)
