"""planted.md lists the defects that are planted, no other, and says of each what its test asserts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "planted.md"
FILES = (
    "mutations",
    "exchange",
    "strategies",
    "context",
    "sequence",
    "router",
    "choices",
    "experts",
    "sampled",
)
PLANTED_IN = tuple(HERE / f"test_proof_{name}.py" for name in FILES) + tuple(
    HERE / f"test_{name}.py" for name in ("promises", "late_proof")
)
NO_DEFECTS = {
    "_right",
    "_nothing_is_watched",
    "_nothing_is_wrong",
    "_one_step_at_the_place",
    "_one_step_before_the_place",
    "_no_time",
    "_simulated_in_1200_ms",
    "_simulated_in_100_s",
    "_little_memory_on_the_last_rank",
    "_little_memory_and_gradients_doubled_after_step_8",
    "_another_generator_on_the_last_rank",
    "_beats_are_counted",
    "_choices_not_repeated",
    "_nearest_sent_elsewhere",
    "_nearest_sent_elsewhere_and_not_repeated",
    "_only_timed",
    "_other_time_on_each_rank",
    "_three_of_five_steps",
    "_weighted",
}
"""Without a defect of ours, or the same defect with a check at a given place."""
FEWEST = 40


def _planted(path: Path) -> Iterator[tuple[str, str]]:
    """The defects of a test file, with the names of the tests that use each."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    tests = {node.name: ast.dump(node) for node in functions if node.name.startswith("test_")}
    for node in functions:
        if [argument.arg for argument in node.args.args] == ["rank", "size"] and node.name not in NO_DEFECTS:
            users = [name for name, code in tests.items() if f"id='{node.name}'" in code]
            assert users, f"{node.name} in {path.name} is planted by no test"
            yield node.name.strip("_").replace("_", " "), users[0]


def _caught(test: str) -> str:
    """Return what the page says of a defect whose test has this name."""
    if test.endswith("escapes"):
        return "no"
    return "with a probability" if test.endswith("with_probability_a_tenth") else "always"


def _listed() -> dict[str, str]:
    """Whether each defect of the page is caught: its lists are `- CHECK: DEFECT; DEFECT.`"""
    lists = PAGE.read_text(encoding="utf-8")
    listed = {}
    for item in re.findall(r"^- (.+?)\.$", lists, re.MULTILINE | re.DOTALL):
        check, colon, defects = " ".join(item.split()).rpartition(": ")
        assert colon, item
        caught = re.match(r"no \(|with a probability \(", check)
        for defect in defects.split("; "):
            assert defect not in listed, f"{defect} is listed twice"
            listed[defect] = caught[0].removesuffix(" (") if caught else "always"
    return listed


def test_the_page_lists_every_planted_defect_as_its_test_finds_it() -> None:
    planted = {defect: _caught(test) for path in PLANTED_IN for defect, test in _planted(path)}
    listed = _listed()
    assert listed == planted
    assert len(listed) >= FEWEST
