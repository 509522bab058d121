"""One word for each concept: no identifier or sentence uses a word that docs/words.md gives up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from sources import PACKAGES, ROOT, sources

pytestmark = pytest.mark.xdist_group("sources")
GLOSSARY = ROOT / "docs" / "words.md"
ALSO_COMMON = {"carried", "copy", "kept", "left", "memory", "method", "reference", "task"}
"""Words of the third column that mean other things as well: a reader must judge them."""
ALLOWED = {
    "attempt": (
        "Attempt is stored in a study; a function that catches what another raises is an attempt, too",
        *("harness", "reports", "results", "strategies/ddp/hook.py", "strategies/saving/agreement.py"),
    ),
    "batch size": ("flags and stored plans have it", "harness/cli", "harness/plan", "results/plan.py"),
    "chunk": ("a piece of a message, and torch's pipelining", "harness/launch", "strategies"),
    "seat": ("where a side of a pair runs", "harness/features/gate/paired"),
    "world size": ("what DeepSpeed asks for", "strategies/deepspeed"),
    "session": (
        "a process that saves or trains",
        "harness/features/gate/paired",
        "results/checkpoint.py",
        "strategies/saving",
    ),
    "slot": ("Slot is stored in a launch", "harness", "results", "strategies/collectives"),
    "snapshot": (
        "a copy that is saved while training continues",
        "harness/worker/measure",
        "strategies/snapshot.py",
    ),
    "trial": (
        "a first packet over a link, and a run of the race of a tune",
        "harness/launch/preflight.py",
        "harness/features/tune",
    ),
    "turn": (
        "the protocol of turns.py, which old commits speak",
        "harness",
        "reports/analysis/exchange.py",
        "workloads/llama",
    ),
}


def given_up() -> list[str]:
    """The words of the third column."""
    text = GLOSSARY.read_text(encoding="utf-8")
    rows = text[text.index("| word | meaning | not |") :].partition("\n\n")[0].splitlines()[2:]
    return [word.strip() for row in rows for word in row.split("|")[3].split(",") if word.strip()]


def named(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives, in lower case with spaces between their words."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if not name.startswith("__"):
            yield re.sub(r"([a-z0-9])([A-Z])|_", r"\1 \2", name).lower()


def uses(word: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}s?(?!\w)", text) is not None


def test_identifiers_use_the_words_of_the_glossary() -> None:
    words = [word for word in given_up() if word not in ALSO_COMMON]
    assert len(words) > 10
    found = {
        (word, file)
        for file, tree in sources().items()
        for name in set(named(tree))
        for word in words
        if uses(word.replace("-", " "), name)
    }
    outside = [(word, file) for word, file in found if not file.startswith(ALLOWED.get(word, ("", "-"))[1:])]
    assert outside == []
    there = {
        word for word, (_, *places) in ALLOWED.items() if any((ROOT / place).exists() for place in places)
    }
    assert {word for word, _ in found} >= there, "allowed, and no longer there"


@pytest.mark.parametrize("word", [word for word in given_up() if " " in word or "-" in word])
def test_sentences_use_the_words_of_the_glossary(word) -> None:
    if word in ALLOWED:
        pytest.skip("flags have this word")
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    files = [page for page in pages if page not in (GLOSSARY, ROOT / "CHANGELOG.md")]
    files += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [str(file) for file in files if uses(word, file.read_text(encoding="utf-8").lower())] == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("class RunSlot: ...", ["run slot"]),
        ("def f(batch_size): x = 1", ["f", "batch size", "x"]),
        ("world_size += 1", ["world size"]),
    ],
)
def test_what_the_law_sees(code, names) -> None:
    assert list(named(ast.parse(code))) == names
