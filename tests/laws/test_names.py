"""Facts of a name are in its folder or file: no other code has the name of a strategy, a compressor, a
collective, a data set or a launcher as a text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from sources import sources

from harness.launchers.registry import launchers
from strategies.catalog import COLLECTIVES, COMPRESSIONS, STRATEGIES
from workloads.datasets.facts import DATASETS

pytestmark = pytest.mark.xdist_group("sources")


def home_of(kind: type) -> str:
    """The folder of a `facts.py` or a `launcher.py`, or the file that a name has to itself."""
    package, _, module = kind.__module__.rpartition(".")
    return package.replace(".", "/") + ("/" if module in ("facts", "launcher") else f"/{module}.py")


HOMES = {
    entry.name: home_of(facts)
    for catalog in (STRATEGIES, COMPRESSIONS, COLLECTIVES, DATASETS)
    for facts in catalog.all_facts
    for entry in facts.entries()
} | {one.name: home_of(type(one)) for one in launchers()}
"""The folder or the file that may contain each name."""
COMMON = {
    *("auto", "default", "local", "manual", "none", "pipeline", "ring", "single", "tree"),
    # What a text is, and what it says of data.
    *("digits", "own", "synthetic", "text"),
    # Also names of precisions, and of the tensor dimension.
    *("bf16", "fp16", "tp"),
}
"""Names that mean other things as well: they are looked for where a cell's field, or the name of facts, is
compared or given."""
AXES = ("strategy", "compression", "collective", "dataset", "launcher")
REGISTRIES = tuple(f"strategies/{room}catalog.py" for room in ("", "collectives/", "compression/"))
ALLOWED = {
    ("results/cell.py", "ddp"): "the one place that chooses defaults",
    ("strategies/advice.py", "ddp"): "the one place that chooses what errors name as the way out",
    ("strategies/advice.py", "scratch-ddp"): "as above",
    ("strategies/advice.py", "fsdp"): "as above",
    ("strategies/advice.py", "scratch-fsdp"): "as above",
    ("results/record.py", "local-sgd"): "runs from before they recorded how their strategy trains",
    ("results/record.py", "hierarchical"): "runs from before they recorded whether they go by nodes",
    ("strategies/zero1/facts.py", "ddp"): "its help says what it is like",
    ("strategies/compression/powersgd/facts.py", "ddp"): "its help says what it is a hook of",
    ("harness/plan/study_file.py", "ddp"): "an example in the meaning of an option",
    ("harness/plan/study_file.py", "topk"): "as above",
    ("harness/plan/study_file.py", "hierarchical"): "as above",
    ("harness/features/__init__.py", "slurm"): "the registry",
    ("harness/features/__init__.py", "kubernetes"): "the registry",
    ("harness/features/programs/file.py", "deepspeed"): "the launcher of that name",
    ("harness/features/programs/worker/shim.py", "deepspeed"): "the library of that name",
    ("harness/machine/code.py", "slurm"): "the package of that name",
    ("workloads/source.py", "slurm"): "as above",
    ("strategies/training/flops.py", "topk"): "an operator of torch",
    ("reports/redaction.py", "slurm"): "what Slurm prints",
}


def texts(tree: ast.Module) -> Iterator[str]:
    """The literals of a module, without its docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def given(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Texts that a field of a cell is compared with, or is by default or by keyword; each with the field."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=comparators):
                sides = [part for side in (left, *comparators) for part in parts(side)]
                fields = [
                    side.attr
                    for side in sides
                    if isinstance(side, ast.Attribute) and side.attr in (*AXES, "name")
                ]
                values: list[ast.expr] = sides if fields else []
            case ast.keyword(arg=str(field), value=value) if field in AXES:
                fields, values = [field], parts(value)
            case ast.AnnAssign(target=ast.Name(id=field), value=ast.expr() as value) if field in AXES:
                fields, values = [field], parts(value)
            case _:
                continue
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value, fields[0]


def parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]


def test_a_name_is_a_text_in_its_own_home_alone() -> None:
    names = HOMES.keys() - COMMON
    assert len(names) > 15
    word = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, names))})(?![\w-])")
    found = {
        (file, name)
        for file, tree in sources().items()
        for text in texts(tree)
        for name in word.findall(text)
        # A package of the name is the client of what a launcher starts jobs by.
        if not file.startswith((HOMES[name], f"{name}/", *REGISTRIES))
    }
    assert sorted(found - set(ALLOWED)) == []
    assert sorted({(file, name) for file, name in ALLOWED if name in HOMES} - found) == [], (
        "allowed, and no longer there"
    )


def test_no_field_of_a_cell_is_compared_with_a_name_or_given_one() -> None:
    found = [
        f"{file}: {field} {text!r}"
        for file, tree in sources().items()
        for text, field in given(tree)
        if (name := text.partition(":")[0]) in HOMES and not file.startswith(HOMES[name])
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("cell.compression != 'none'", [("none", "compression")]),
        (
            "(a.strategy, a.collective) == ('ddp:bucket_mb=1', 'ring')",
            [("ddp:bucket_mb=1", "strategy"), ("ring", "strategy")],
        ),
        ("replace(cell, collective='tree')", [("tree", "collective")]),
        ("class A:\n    launcher: str = 'local'", [("local", "launcher")]),
        ("f(name='none') if x == 'ring' else 'ddp'", []),
    ],
)
def test_what_the_law_sees(code, expected) -> None:
    assert list(given(ast.parse(code))) == expected
