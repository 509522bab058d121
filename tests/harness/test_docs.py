"""The docs name things that exist: links lead somewhere, and commands and flags that are named exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from harness.cli import COMMANDS, bench
from harness.launchers.reference import reference
from harness.plan.study_file import STUDY_FILE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/ci/*.md")])
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages that name only what exists today: the changelog also names what was removed."""


def _flags(command: click.Command) -> set[str]:
    """The flags of a command and its subcommands."""
    own = {word for parameter in command.params for word in parameter.opts if word.startswith("--")}
    context = click.Context(command)
    below = (
        [command.get_command(context, name) for name in command.list_commands(context)]
        if isinstance(command, click.Group)
        else []
    )
    return own.union(*(_flags(one) for one in below if one is not None))


FLAGS = {*_flags(bench), "--help", "--version"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_commands_that_are_named_exist(page) -> None:
    named = set(re.findall(r"\bbench ([a-z]+)\b(?! is| are| does)", _code(page)))
    assert named <= {*COMMANDS, "bench"}, named - COMMANDS.keys()


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_flags_that_are_named_exist(page) -> None:
    lines = [line for line in _code(page).splitlines() if "bench" in line and "torch" not in line]
    named = {flag for line in lines for flag in re.findall(r"(?<!\S)(--[a-z-]+)", line)}
    assert named <= FLAGS, named - FLAGS


def test_the_studies_in_the_docs_can_be_read() -> None:
    studies = sorted(ROOT.glob("docs/studies/*.yaml"))
    assert studies
    for path in studies:
        assert STUDY_FILE.read(path).gpus is not None


@pytest.mark.needs("slurm", "kubernetes", "manual")
def test_the_page_of_options_says_what_they_declare() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == reference(), "make reference writes it anew"


def test_the_distribution_ships_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == sorted(path.parent.name for path in ROOT.glob("[a-z]*/__init__.py"))


def _code(page: Path) -> str:
    """Text between backquotes or in fenced blocks."""
    text = page.read_text()
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
