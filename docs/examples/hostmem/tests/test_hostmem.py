"""The package, installed as pip does it: its command measures two ranks, and the page shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packages import first_on_the_path, install

from results.store import Study

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[2]
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
WORDS = ("--gpus", "2", "--mib", "4", "--repeats", "1", "--oversubscribe")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder on the path that has the package as its pyproject.toml describes it."""
    folder = tmp_path_factory.mktemp("hostmem") / "site"
    install(folder, PROJECT["name"], PROJECT["entry-points"], version=PROJECT["version"])
    (folder / "bench_hostmem").symlink_to(PACKAGE / "bench_hostmem")
    return folder


def bench(site: Path, *arguments: str, path: str | None = None, code: int = 0) -> str:
    """Call bench in the folder around `site`, with the package, or with another `path`."""
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": path or f"{ROOT}:{first_on_the_path(site)}", "COLUMNS": "400"},
        capture_output=True,
        text=True,
        cwd=site.parent,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def study(site) -> Study:
    """One run of two ranks."""
    assert "2 ranks copy 4 MiB each; 1 run to do" in bench(site, "hostmem", *WORDS)
    return Study(site.parent / "runs" / "hostmem")


def test_bench_lists_its_command_and_its_kind(site) -> None:
    assert re.search(r"hostmem +Is of the package bench-hostmem\.", bench(site, "--help"))
    listed = bench(site, "list", "commands", "kinds", "sections")
    assert len(re.findall(r"hostmem +is of bench-hostmem", listed)) == 3
    assert "--mib" in bench(site, "hostmem", "--help")


@pytest.mark.slow
def test_two_ranks_are_measured_and_recorded_with_the_source_of_the_package(study) -> None:
    (result,) = study.collect()
    assert result.outcome == "ok"
    records = study.rank_records(result.cell_id, result.run_id)
    assert [record.rank for record in records] == [0, 1]
    for record in records:
        assert record.measured["copied_bytes"] == 4 * 2**20
        assert len(record.measured["copy_ns"]) == 20
        assert min(record.measured["copy_ns"]) > 0
        (code,) = record.environment.code.packages.values()
        assert re.fullmatch(r"bench-hostmem 1\.0 [0-9a-f]{16}", code)


@pytest.mark.slow
def test_the_page_names_the_slowest_host_and_a_redacted_page_no_host(study, site) -> None:
    (record, *_) = study.rank_records(study.cell_ids()[0], study.collect()[0].run_id)
    for words, shown in (((), True), (("--redact",), False)):
        bench(site, "report", str(study.root), *words)
        page = (study.root / "report.html").read_text(encoding="utf-8")
        assert ('id="hostmem"' in page) == shown
        assert (f"The slowest host, {record.environment.host}, copies " in page) == shown


@pytest.mark.slow
def test_the_same_command_again_has_nothing_to_do(study, site) -> None:
    bench(site, "hostmem", *WORDS)
    assert len(study.collect()) == 1
    assert " done " in bench(site, "status", str(study.root))


def test_a_study_without_the_package_says_what_it_lacks(study, site) -> None:
    said = bench(site, "report", str(study.root), path=str(ROOT), code=2)
    assert "the study is 'hostmem', a kind that this installation lacks" in said
