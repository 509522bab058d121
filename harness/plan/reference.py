"""docs/options.md: `make reference` writes it from the declarations of the options."""

from __future__ import annotations

from harness.plan.options import MOST, PlanOption
from harness.plan.study_file import OPTIONS
from results.value_types import takes

_HEAD = """\
# Options

Every option of `bench matrix`: as a flag, and as a key of a [study file](guide.md#a-study-file) (without
the leading dashes, `_` for `-`). Where both give one, the flag wins. A study file may have a list instead
of texts or numbers joined by commas; false is `--no-...` as a flag. `bench list` says what can be named. No
number may be above 1000000000.

`make reference` writes this page from `harness/plan/study_file.py`.

| flag | takes | meaning |
|---|---|---|
"""


def reference() -> str:
    """The page as Markdown."""
    rows = (f"| `{option.flag}` | {_rule(option)} | {option.help} |" for option in OPTIONS)
    return _HEAD + "\n".join(rows) + "\n"


def _rule(option: PlanOption) -> str:
    return takes(option.type).replace(f" and at most {MOST}", "")


if __name__ == "__main__":
    print(reference(), end="")
