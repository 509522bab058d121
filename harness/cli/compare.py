"""`bench compare`: is NEW slower than BASE?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from reports.gate.comparison import Comparison

FORMATS = ("markdown", "json", "junit", "github", "bencher", "github-action-benchmark")


@click.command(name="compare")
@click.argument("base")
@click.argument("new")
@click.option(
    "--fail-above",
    multiple=True,
    metavar="METRIC=PERCENT",
    help="the smallest change that matters, such as step_time=5%; may be repeated",
)
@click.option(
    "--across", metavar="FACTS", default="", help="facts that may differ, such as torch,python: the subject"
)
@click.option("--strict", is_flag=True, help="exit with 1 where something is inconclusive, too")
@click.option("--all", "every", is_flag=True, help="list what is unchanged, too")
@click.option(
    "--format",
    "forms",
    multiple=True,
    metavar="FORM=FILE",
    help=f"write it for CI, too: {', '.join(FORMATS)}; FORM alone goes to stdout; may be repeated",
)
@click.option(
    "--on-regression",
    metavar="CMD",
    help="run CMD by sh if the exit code is 1; BENCH_VERDICT is the path of the verdicts as JSON",
)
@click.option(
    "--baselines", type=click.Path(path_type=Path), default=Path("baselines"), help="folder of kept baselines"
)
def command(
    base: str, new: str, *, fail_above: tuple[str, ...], across: str, baselines: Path, **shown: Any
) -> int:
    """Compare NEW with BASE: studies, runs, kept baselines, or files of pytest-benchmark (docs/gate.md).

    Exit codes: 0 nothing regressed, 1 something regressed, changed, failed or is missing, 2 the call is
    wrong, 3 nothing regressed and something is incomparable.
    """
    from harness.console import Console
    from harness.gate import machine_margins, read_side
    from harness.nights import set_off
    from reports.gate.comparison import Rules, compare
    from reports.gate.faces import json_text
    from reports.gate.metrics import read_margins

    margins, targets = read_margins(fail_above), _targets(shown["forms"])
    facts = frozenset(fact.strip() for fact in across.split(",") if fact.strip())
    one, other = read_side(base, baselines), read_side(new, baselines)
    of_machine, stated = machine_margins(other, baselines)
    for path in stated:
        Console().note(f"margins of this machine's noise: {path}")
    rules = Rules(margins=of_machine | one.fail_above | margins, across=facts)
    found = compare(one, other, rules)
    _show(found, targets, every=shown["every"])
    code = found.exit_code(strict=shown["strict"])
    if code == 1 and shown["on_regression"] is not None:
        wrong = set_off(shown["on_regression"], json_text(found))
        if wrong:
            Console().warn(wrong)
    return code


def _show(found: Comparison, targets: Sequence[tuple[str, Path | None]], *, every: bool) -> None:
    """On stdout the form that has no file, else for people."""
    from harness.console import Console
    from reports.gate.faces import FACES
    from reports.gate.text import HEADS, headline, method, rows, sentence
    from results import files

    console = Console()
    for form, path in targets:
        if path is None:
            console.result(FACES[form](found).rstrip("\n"))
        else:
            files.replace(path, FACES[form](found).encode())
    if any(path is None for _, path in targets):
        return
    console.result(headline(found))
    if shown := rows(found, every=every):
        console.table(HEADS, shown, numeric=[head in ("BASE", "NEW", "change") for head in HEADS])
    for finding in found.findings:
        if finding.reason:
            console.result(sentence(finding))
    console.result(method(found))


def _targets(forms: tuple[str, ...]) -> list[tuple[str, Path | None]]:
    from results.errors import UsageError, nearest

    targets: list[tuple[str, Path | None]] = []
    for text in forms:
        form, _, path = text.partition("=")
        if form not in FORMATS:
            raise UsageError(f"--format {text}: forms are {', '.join(FORMATS)}{nearest(form, FORMATS)}")
        targets.append((form, Path(path) if path else None))
    if sum(path is None for _, path in targets) > 1:
        raise UsageError(
            "two --format go to stdout; give all but one a file, such as --format junit=gate.xml"
        )
    return targets
