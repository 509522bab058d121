"""Every registered name has its tests and docs; a failure lists what each lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from harness.plan.launchers import OWN
from reports.page.contents import SECTIONS
from results.registry import load
from strategies.catalog import COLLECTIVES, COMPRESSIONS, OPTIMIZERS, STRATEGIES
from strategies.compression.base import Compressor
from strategies.training.parallel import ParallelModel
from workloads.catalog import WORKLOADS
from workloads.datasets.facts import DATASETS

ROOT = Path(__file__).parents[2]
FROZEN = json.loads((ROOT / "tests/frozen/ids.json").read_text())
Has = Callable[[str], bool]


def mentioned(*patterns: str) -> Has:
    """Whether a file that matches one of the patterns has the name as a separate word."""
    texts = [path.read_text() for pattern in patterns for path in ROOT.glob(pattern)]
    assert texts

    def has(name: str) -> bool:
        return any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) for text in texts)

    return has


def stated(file: str, form: str) -> Has:
    """Whether the file has the name in this form, such as a row of a table: where a name is a common word."""
    text = (ROOT / file).read_text()
    return lambda name: form.format(name) in text


def frozen(axis: str) -> Has:
    names = {text.partition(":")[0] for text in FROZEN[axis]}
    return names.__contains__


def a_model(name: str) -> bool:
    # `auto` is replaced by the plan, and never built.
    facts = {facts.name: facts for facts in STRATEGIES.all_facts}[name]
    return name == "auto" or issubclass(load(facts.model), ParallelModel)


def a_compressor(name: str) -> bool:
    facts = {facts.name: facts for facts in COMPRESSIONS.all_facts}[name]
    # `none` compresses nothing, and a hook of torch's stands in the place of a compressor.
    return name == "none" or bool(facts.ddp_hook) or issubclass(load(facts.compressor), Compressor)


def exchanging(has: Has) -> Has:
    """Requirements of strategies that exchange something: not of `single`, and not of `auto`."""
    return lambda name: name in ("single", "auto") or has(name)


DOCS = mentioned("README.md", "docs/*.md")
WANTED: dict[str, tuple[Iterable[str], dict[str, Has]]] = {
    "strategy": (
        [facts.name for facts in STRATEGIES.all_facts],
        {
            "a frozen id": frozen("strategy"),
            "a model": a_model,
            "a word in docs/strategies.md": mentioned("docs/strategies.md"),
            "a test of its rules": mentioned(
                "tests/strategies/test_refusal.py", "tests/plan/*.py", "tests/engines/*.py"
            ),
            "messages held to steps": exchanging(
                mentioned("tests/strategies/test_traffic.py", "tests/engines/*.py")
            ),
            "memory held to steps": exchanging(
                mentioned("tests/strategies/test_footprint.py", "tests/engines/*.py")
            ),
            "a proof": exchanging(mentioned("tests/worker/test_proof*.py", "tests/engines/*.py")),
        },
    ),
    "compression": (
        [facts.name for facts in COMPRESSIONS.all_facts],
        {
            "a frozen id": frozen("compression"),
            "a compressor": a_compressor,
            "a word in the docs": DOCS,
            "laws": mentioned(
                "tests/strategies/test_compression_laws.py", "tests/strategies/test_cast.py",
                "tests/strategies/test_powersgd.py",
            ),
            "a proof": lambda name: name == "none" or mentioned("tests/worker/test_proof*.py")(name),
        },
    ),
    "collective": (
        [facts.name for facts in COLLECTIVES.all_facts],
        {
            "a frozen id": frozen("collective"),
            "a word in the docs": DOCS,
            "a proof": lambda name: name == "default" or mentioned("tests/worker/test_proof*.py")(name),
        },
    ),
    "optimizer": (
        list(OPTIMIZERS.entries),
        {"a frozen id": frozen("optimizer"), "a word in the docs": DOCS},
    ),
    "workload": (
        list(WORKLOADS.entries),
        {
            "a frozen id": frozen("workload"),
            "closed forms checked with published figures": lambda name: (
                name == "py" or mentioned("tests/workloads/test_closed_forms.py")(name)
            ),
        },
    ),
    "dataset": (
        list(DATASETS.entries),
        {
            "a frozen id": frozen("dataset"),
            "a word in the docs": DOCS,
            "batches that follow from the seed": mentioned("tests/workloads/test_*data.py"),
        },
    ),
    "launcher": (
        list(OWN),
        {"a word in the docs": mentioned("docs/clusters.md", "docs/guide.md")},
    ),
    "section": (
        list(SECTIONS),
        {"a place in the golden structure of the page": mentioned("tests/reports/golden/structure.txt")},
    ),
}  # fmt: skip


# Of torch's own modules, when they are imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", WANTED)
def test_no_name_lacks_anything(kind) -> None:
    names, wanted = WANTED[kind]
    lacks = {name: [what for what, has in wanted.items() if not has(name)] for name in names}
    assert {name: what for name, what in lacks.items() if what} == {}
