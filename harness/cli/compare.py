"""`bench compare`: is NEW slower than BASE?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from reports.gate.comparison import Comparison, Rules

OF_PAIRS = (
    "base_options",
    "new_options",
    "base_python",
    "new_python",
    "looks",
    "alternate",
    "others_above",
    "max_time",
    "out",
)
"""Options of a paired comparison."""
DECIDES_AGAIN = ("looks", "others_above")
"""Options of a paired comparison that --again takes."""
FORMATS = ("markdown", "json", "junit", "github", "bencher", "github-action-benchmark")


@click.command(name="compare")
@click.argument("sides", nargs=-1, metavar="BASE NEW [-- MATRIX OPTIONS]")
@click.option("--ab", is_flag=True, help="BASE and NEW are revisions: run them side by side, in short blocks")
@click.option("--base-options", metavar="TEXT", default="", help="with --ab: matrix options of BASE only")
@click.option("--new-options", metavar="TEXT", default="", help="with --ab: matrix options of NEW only")
@click.option("--base-python", metavar="PATH", help="with --ab: interpreter of BASE, instead of this one")
@click.option("--new-python", metavar="PATH", help="with --ab: interpreter of NEW, instead of this one")
@click.option(
    "--looks",
    type=click.IntRange(1, 4),
    help="with --ab: maximum number of looks, of 6 pairs each; 4 if left out",
)
@click.option(
    "--alternate",
    type=click.Choice(("blocks", "launches")),
    help="with --ab: blocks, or whole launches where both sides do not fit in memory; blocks if left out",
)
@click.option(
    "--others-above",
    metavar="PERCENT",
    help="with --ab: leave out quads in which other processes took more of the cores; 25% if left out",
)
@click.option("--max-time", metavar="TIME", help="with --ab: begin no further pair after this, such as 3m")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="with --ab: folder of the records; runs/ab-TIME if left out",
)
@click.option(
    "--again",
    type=click.Path(path_type=Path),
    help="decide again from the records of a --ab, by the rules of its last call; runs nothing",
)
@click.option(
    "--fail-above",
    multiple=True,
    metavar="METRIC=PERCENT",
    help="the smallest change that matters, such as step_time=5%; may be repeated",
)
@click.option(
    "--across",
    metavar="FACTS",
    default="",
    help="facts that may differ because they are what is compared, such as torch,python",
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
@click.option("--json", "as_json", is_flag=True, help="the same as --format json, on stdout")
@click.option(
    "--on-regression",
    metavar="CMD",
    help="run CMD by sh if the exit code is 1; BENCH_VERDICT is the path of the verdicts as JSON",
)
@click.option(
    "--baselines", type=click.Path(path_type=Path), default=Path("baselines"), help="folder of kept baselines"
)
def compare_command(
    sides: tuple[str, ...], *, fail_above: tuple[str, ...], across: str, baselines: Path, **given: Any
) -> int:
    """Compare NEW with BASE: studies, runs, kept baselines, or files of pytest-benchmark (docs/gate.md).

    With --ab they are git revisions, measured now: bench compare --ab main HEAD -- --gpus 2. `.` is the
    working tree as it is.

    Exit codes: 0 nothing regressed, 1 something regressed, changed, failed or is missing, 2 no
    verdict: the call is wrong or a file is damaged, 3 nothing regressed and something is incomparable, or
    nothing was compared.
    """
    from dataclasses import replace

    from harness.cli import reading
    from harness.gate.nights import set_off
    from harness.terminal.console import Console
    from reports.gate.comparison import Rules
    from reports.gate.metrics import read_margins
    from reports.gate.text import json_text
    from results.errors import UsageError

    margins, targets = (
        read_margins(fail_above),
        _targets((*given["forms"], *(["json"] if given["as_json"] else []))),
    )
    facts = frozenset(fact.strip() for fact in across.split(",") if fact.strip())
    rules = Rules(margins=margins, across=facts)
    try:
        if given["ab"] or given["again"] is not None:
            found = _paired(sides, rules, given)
        else:
            _refuse(given, OF_PAIRS, "is for a paired comparison: add --ab, or leave it out")
            found = _kept(sides, rules, baselines)
        found = replace(found, strict=given["strict"])
        _show(found, targets, every=given["every"])
    except BrokenPipeError:
        # A reader that has closed the pipe needs no verdict.
        raise
    except Exception as error:
        # Whatever the error: exit code 1 would be read as a regression.
        text = reading(error)[0]
        if isinstance(error, OSError):
            text = f"{error}: make room, or name a folder that can be written; nothing was decided"
        raise UsageError(text) from error
    if found.exit_code == 1 and given["on_regression"] is not None:
        wrong = set_off(given["on_regression"], json_text(found))
        if wrong:
            Console().warn(wrong)
    return found.exit_code


def _kept(sides: Sequence[str], rules: Rules, baselines: Path) -> Comparison:
    """Compare two saved measurements."""
    from dataclasses import replace

    from harness.gate.baselines import machine_margins, read_side, require_figures
    from harness.terminal.console import Console
    from reports.gate.comparison import compare
    from reports.gate.metrics import require_margins
    from results.errors import UsageError, nearest

    if len(sides) != 2:
        raise UsageError(
            f"bench compare takes BASE and NEW, not {len(sides)} names; see bench compare --help"
        )
    console = Console()
    base, new = (read_side(side, baselines, console) for side in sides)
    require_figures(base)
    facts = {fact for side in (base, new) for subject in side.subjects for fact in subject.facts}
    for fact in sorted(rules.across - facts):
        known = f"{nearest(fact, facts)}; facts are {', '.join(sorted(facts))}"
        console.warn(f"--across {fact}: no side has that fact{known}")
    require_margins(base.fail_above, f"baseline {base.name}")
    of_machine, stated = machine_margins(new, baselines)
    for path in stated:
        console.note(f"margins of this machine's noise: {path}")
    return compare(base, new, replace(rules, margins=of_machine | base.fail_above | dict(rules.margins)))


def _paired(words: Sequence[str], rules: Rules, given: Mapping[str, Any]) -> Comparison:
    """Compare two revisions by measuring them now, or by the records of such a comparison."""
    from shlex import split

    from harness.gate.paired.comparison import PairedComparison, PairedRequest, SideRequest, decide_again
    from harness.plan.options import read_duration_s
    from harness.terminal.console import Console
    from reports.gate.effect import LOOKS, SPOILED_ABOVE
    from reports.gate.metrics import read_share
    from results.errors import UsageError

    above = given["others_above"]
    spoiled_above = None if above is None else read_share(above, f"--others-above {above}")
    if given["again"] is not None:
        if words:
            raise UsageError(f"--again takes no BASE and NEW, only a folder: leave out {' '.join(words)}")
        others = [name for name in OF_PAIRS if name not in DECIDES_AGAIN]
        _refuse(given, others, "is for a call that runs pairs, and --again runs nothing: leave it out")
        return decide_again(given["again"], rules, looks=given["looks"], spoiled_above=spoiled_above)
    if len(words) < 2:
        raise UsageError("--ab takes two revisions: bench compare --ab BASE NEW -- MATRIX OPTIONS")
    base, new, *options = words
    own = {}
    for side in ("base", "new"):
        try:
            own[side] = split(given[f"{side}_options"])
        except ValueError as error:
            flag = f"--{side}-options {given[f'{side}_options']}"
            raise UsageError(f"{flag}: {str(error).lower()}; close the quotation") from error
    request = PairedRequest(
        base=SideRequest(revision=base, python=given["base_python"], options=(*options, *own["base"])),
        new=SideRequest(revision=new, python=given["new_python"], options=(*options, *own["new"])),
        looks=given["looks"] or LOOKS,
        alternation=given["alternate"] or "blocks",
        spoiled_above=spoiled_above or SPOILED_ABOVE,
        max_time_s=None if given["max_time"] is None else read_duration_s(given["max_time"], "--max-time"),
        out=given["out"],
    )
    console = Console()
    comparison = PairedComparison(request, rules, console)
    try:
        return comparison.run()
    except KeyboardInterrupt:
        if comparison.folder.is_dir():
            console.note(f"interrupted; the same call with --out {comparison.folder} continues from here")
        raise


def _refuse(given: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """Raises UsageError for the first of these options that was given, as it would have no effect."""
    from results.errors import UsageError

    for name in names:
        if given[name]:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _show(found: Comparison, targets: Sequence[tuple[str, Path | None]], *, every: bool) -> None:
    """Write the forms, and print the comparison for people unless one of the forms goes to stdout."""
    from harness.terminal.console import Console
    from reports.gate.text import (
        FACES,
        comparison_headline,
        finding_sentence,
        finding_table,
        method_text,
    )
    from results import files

    console = Console()
    for form, path in targets:
        if path is None:
            console.result(FACES[form](found).rstrip("\n"))
        else:
            files.replace(path, FACES[form](found).encode())
    if any(path is None for _, path in targets):
        return
    console.sentence(comparison_headline(found))
    shown = finding_table(found, every=every)
    if shown.rows:
        console.table(shown.titles, shown.texts, numeric=shown.numeric)
    for finding in found.findings:
        if finding.reason:
            console.sentence(finding_sentence(finding))
    console.sentence(method_text(found))


def _targets(forms: tuple[str, ...]) -> list[tuple[str, Path | None]]:
    from results.errors import UsageError, nearest
    from results.files import is_stream

    targets: list[tuple[str, Path | None]] = []
    for text in forms:
        form, _, path = text.partition("=")
        if form not in FORMATS:
            raise UsageError(f"--format {text}: forms are {', '.join(FORMATS)}{nearest(form, FORMATS)}")
        targets.append((form, Path(path) if path else None))
    named = [path for _, path in targets if path is not None and not is_stream(path)]
    if len(set(named)) < len(named):
        raise UsageError("two --format name the same file; give each its own file")
    if sum(path is None for _, path in targets) > 1:
        raise UsageError(
            "two --format go to stdout; give all but one a file, such as --format junit=gate.xml"
        )
    return targets
