"""The seam between the core and its features, and how many functions have many paths."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator

import pytest
from paths import paths_of_functions
from sources import ROOT, sources

from harness.features import FEATURES
from results import schemas
from results.schema import Schema

pytestmark = pytest.mark.xdist_group("sources")
HOME = "harness/features/"
TABLE = HOME + "__init__.py"
MOST_PATHS = 10
WITH_MORE = 117
"""Functions of more than MOST_PATHS paths: a change may lower this number, and never raise it."""


def imported(file: str) -> Iterator[str]:
    """Modules that a file imports anywhere, or names by a string."""
    for node in ast.walk(sources()[file]):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{one.name}" for one in names)
            case ast.Constant(value=str(text)) if text.startswith("harness.features."):
                yield text


def feature_of(file: str) -> str | None:
    return file.removeprefix(HOME).split("/")[0] if file.startswith(HOME) and file != TABLE else None


def test_every_folder_of_features_is_a_line_of_the_table() -> None:
    assert {feature_of(file) for file in sources()} - {None} == set(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_imported_by_none_but_itself(feature) -> None:
    found = [
        (file, module)
        for file in sources()
        if feature_of(file) != feature and file != TABLE
        for module in imported(file)
        if f"{module}.".startswith((f"harness.features.{feature}.", f"harness.features.{feature}:"))
    ]
    assert found == []


@pytest.mark.parametrize(("library", "place"), [("click", "command.py"), ("torch", "worker/")])
def test_of_a_feature_one_place_imports_a_library(library, place) -> None:
    found = {
        file
        for file in sources()
        if feature_of(file) is not None
        for module in imported(file)
        if module.split(".")[0] == library and f"/{place}" not in file
    }
    assert found == set()


@pytest.mark.parametrize("feature", FEATURES)
def test_every_schema_of_a_feature_has_golden_files(feature) -> None:
    names = {
        value.name
        for file in sources()
        if feature_of(file) == feature and "Schema(" in (ROOT / file).read_text()
        for value in vars(importlib.import_module(file.removesuffix(".py").replace("/", "."))).values()
        if isinstance(value, Schema) and value not in vars(schemas).values()
    }
    golden = {path.stem.rpartition("-")[0] for path in ROOT.glob(f"tests/features/{feature}/golden/*.json")}
    # A file that bench ships is read as it is.
    shipped = (json.loads(path.read_text())["schema"] for path in (ROOT / HOME / feature).glob("*.json"))
    assert names == golden | {name.removeprefix("bench/") for name in shipped}


def test_no_more_functions_have_many_paths() -> None:
    found = {
        f"{file}:{function.lineno} {function.name} has {paths}"
        for file, tree in sources().items()
        for function, paths in paths_of_functions(tree)
        if paths > MOST_PATHS
    }
    assert len(found) <= WITH_MORE, "\n".join(sorted(found))
