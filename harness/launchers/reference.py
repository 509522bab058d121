"""docs/options.md: `make reference` writes it from the declarations of the options."""

from __future__ import annotations

from harness.launchers.registry import launchers
from harness.plan.launchers import OWN_HELP, in_a_line
from harness.plan.options import MOST, PlanOption
from harness.plan.study_file import by_heading
from results.value_types import takes

_HEAD = """\
# Options

Every option of `bench matrix`: as a flag, and as a key of a [study file](guide.md#a-study-file) (without
the leading dashes, `_` for `-`). Where both give one, the flag wins. A study file may have a list instead
of names or numbers joined by commas; false is `--no-...` as a flag. `bench list` says what can be named. No
number may be above 1000000000. The last column names the launchers that read an option, if not all do.

`make reference` writes this page from `harness/plan/study_file.py`.
"""
_COLUMNS = """\
| flag | takes | default | meaning | launchers |
|---|---|---|---|---|
"""


def reference() -> str:
    """The page as Markdown."""
    sections = (
        f"\n## {heading}\n\n{_COLUMNS}{''.join(map(_row, options))}"
        for heading, options in by_heading().items()
    )
    return _HEAD + "".join(sections)


def _row(option: PlanOption) -> str:
    rule, meaning = takes(option.type).replace(f" and at most {MOST}", ""), option.help
    if option.name == "launcher":
        # The page is of bench alone, whatever is installed beside it.
        *names, last = OWN_HELP
        rule, meaning = f"{', '.join(names)} or {last}", in_a_line(OWN_HELP)
    readers = ", ".join(each.name for each in launchers() if option.name in each.options)
    return f"| `{option.flag}` | {rule} | {option.default.strip('()')} | {meaning} | {readers} |\n"


if __name__ == "__main__":
    print(reference(), end="")
