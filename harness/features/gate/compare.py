"""`bench compare`: reads its options, compares two sides, and writes and prints the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import split
from typing import Any

from harness.cli import reading
from harness.features.gate.baselines import machine_margins, read_side, require_figures
from harness.features.gate.comparison import Comparison, Rules
from harness.features.gate.comparison import compare as compare_sides
from harness.features.gate.effect import LOOKS, SPOILED_ABOVE
from harness.features.gate.metrics import read_margins, read_share, require_margins
from harness.features.gate.nights import set_off
from harness.features.gate.paired.comparison import PairedComparison, SideRequest, decide_again
from harness.features.gate.text import (
    FACES,
    comparison_headline,
    finding_sentence,
    finding_table,
    json_text,
    method_text,
)
from harness.plan.options import read_duration_s
from harness.terminal.console import Console
from results import files
from results.errors import UsageError, nearest
from results.files import is_stream

OF_PAIRS = (
    *("base_options", "new_options", "base_python", "new_python"),
    *("looks", "alternate", "others_above", "max_time", "out"),
)
"""Options of a paired comparison."""


def compare(
    sides: Sequence[str], fail_above: tuple[str, ...], across: str, baselines: Path, given: Mapping[str, Any]
) -> int:
    """Carry out `bench compare` with the options `given` by name, and return its exit code."""
    facts = frozenset(fact.strip() for fact in across.split(",") if fact.strip())
    rules = Rules(margins=read_margins(fail_above), across=facts)
    targets = _targets((*given["forms"], *(["json"] if given["as_json"] else [])))
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
        set_off(given["on_regression"], json_text(found), Console())
    return found.exit_code


def _kept(sides: Sequence[str], rules: Rules, baselines: Path) -> Comparison:
    """Compare two saved measurements."""
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
    return compare_sides(
        base, new, replace(rules, margins=of_machine | base.fail_above | dict(rules.margins))
    )


def _paired(words: Sequence[str], rules: Rules, given: Mapping[str, Any]) -> Comparison:
    """Compare two revisions by measuring them now, or by the records of such a comparison."""
    above = given["others_above"]
    spoiled_above = None if above is None else read_share(above, f"--others-above {above}")
    if given["again"] is not None:
        if words:
            raise UsageError(f"--again takes no BASE and NEW, only a folder: leave out {' '.join(words)}")
        others = [name for name in OF_PAIRS if name not in ("looks", "others_above")]
        _refuse(given, others, "is for a call that runs pairs, and --again runs nothing: leave it out")
        return decide_again(given["again"], rules, looks=given["looks"], spoiled_above=spoiled_above)
    if len(words) < 2:
        raise UsageError("--ab takes two revisions: bench compare --ab BASE NEW -- MATRIX OPTIONS")
    base, new, *options = words
    own = {side: _side_options(side, given[f"{side}_options"]) for side in ("base", "new")}
    console = Console()
    comparison = PairedComparison(
        base=SideRequest(revision=base, python=given["base_python"], options=(*options, *own["base"])),
        new=SideRequest(revision=new, python=given["new_python"], options=(*options, *own["new"])),
        looks=given["looks"] or LOOKS,
        alternation=given["alternate"] or "blocks",
        spoiled_above=spoiled_above or SPOILED_ABOVE,
        max_time_s=None if given["max_time"] is None else read_duration_s(given["max_time"], "--max-time"),
        out=given["out"],
        rules=rules,
        console=console,
    )
    try:
        return comparison.run()
    except KeyboardInterrupt:
        if comparison.folder.is_dir():
            console.note(f"interrupted; the same call with --out {comparison.folder} continues from here")
        raise


def _side_options(side: str, text: str) -> list[str]:
    try:
        return split(text)
    except ValueError as error:
        raise UsageError(f"--{side}-options {text}: {str(error).lower()}; close the quotation") from error


def _refuse(given: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """Raises UsageError for the first of these options that was given, as it would have no effect."""
    for name in names:
        if given[name]:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _show(found: Comparison, targets: Sequence[tuple[str, Path | None]], *, every: bool) -> None:
    """Write the forms, and print the comparison for people unless one of the forms goes to stdout."""
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
    targets: list[tuple[str, Path | None]] = []
    for text in forms:
        form, _, path = text.partition("=")
        if form not in FACES:
            raise UsageError(f"--format {text}: forms are {', '.join(FACES)}{nearest(form, FACES)}")
        targets.append((form, Path(path) if path else None))
    named = [path for _, path in targets if path is not None and not is_stream(path)]
    if len(set(named)) < len(named):
        raise UsageError("two --format name the same file; give each its own file")
    if sum(path is None for _, path in targets) > 1:
        raise UsageError(
            "two --format go to stdout; give all but one a file, such as --format junit=gate.xml"
        )
    return targets
