"""The hash of a user's own files: what it covers, and what it says when they are not there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from results.errors import SpecError, UsageError
from workloads.source import file_hash, module_file, source_hash


def write(folder: Path, **files: str) -> None:
    """Files by dotted module name."""
    for name, text in files.items():
        path = folder / (name.replace("__DOT__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_hash_is_that_of_the_modules_path_and_content(tmp_path) -> None:
    source = "def build(): ...\n"
    write(tmp_path, model=source)
    content = hashlib.sha256(source.encode()).digest()
    assert source_hash("model:build", tmp_path) == hashlib.sha256(b"model.py\0" + content).hexdigest()[:16]


def test_the_module_is_not_imported(tmp_path) -> None:
    write(tmp_path, model="raise SystemExit('imported')\ndef build(): ...\n")
    assert len(source_hash("model:build", tmp_path)) == 16


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ("model", True),
        ("helpers", True),  # imported by model
        ("deeper", True),  # imported by helpers, inside a function
        ("package__DOT__sub__DOT__part", True),  # in a package that helpers imports
        ("unused", False),
    ],
)
def test_the_hash_changes_with_every_file_that_the_model_reaches(tmp_path, changed, counts) -> None:
    files = {
        "model": "import torch, helpers\ndef build(): ...\n",
        "helpers": "from package.sub import part\ndef late():\n    import deeper\n",
        "deeper": "import model\n",
        "package__DOT____init__": "",
        "package__DOT__sub__DOT__part": "x = 1\n",
        "unused": "y = 1\n",
    }
    write(tmp_path, **files)
    before = source_hash("model:build", tmp_path)
    write(tmp_path, **{changed: files[changed] + "z = 2\n"})
    assert (source_hash("model:build", tmp_path) != before) is counts


def test_a_module_of_a_package_stands_for_the_whole_package(tmp_path) -> None:
    files = {"net__DOT__model": "def build(): ...\n", "net__DOT__layers": "", "net__DOT__broken": "def ("}
    write(tmp_path, **files)
    before = source_hash("net.model:build", tmp_path)
    write(tmp_path, net__DOT__layers="x = 1\n")
    assert source_hash("net.model:build", tmp_path) != before


def test_a_package_goes_before_a_module_of_its_name_as_in_an_import(tmp_path) -> None:
    write(tmp_path, model="", model__DOT____init__="")
    assert module_file("model", tmp_path) == tmp_path / "model" / "__init__.py"


@pytest.mark.parametrize(
    ("text", "source", "says"),
    [
        *(
            (text, "", r"is not py:MODULE:FUNCTION, such as py:mypackage\.mymodule:build")
            for text in ("model", "model:", ":build", "a:b:c", "model.py:build()", "../model:build")
        ),
        ("results:build", "def build(): ...\n", "the name 'results' is taken"),
        ("random:build", "def build(): ...\n", "the name 'random' is taken"),
        (
            "model:biuld",
            "import torch\nwidth = 3\ndef build():\n    inner = 1\n",
            r"model\.py has no 'biuld'; it has: build, torch, width",
        ),
        ("model:build", "x = 1\ndef build(:\n", r"model\.py is not Python: .*line 2"),
    ],
)
def test_a_name_that_is_not_a_function_of_a_module_is_refused(tmp_path, text, source, says) -> None:
    write(tmp_path, **{"model": source, "results": source, "random": source})
    with pytest.raises(SpecError, match=says):
        source_hash(text, tmp_path)


def test_a_missing_module_says_what_was_looked_for_and_where(tmp_path) -> None:
    with pytest.raises(SpecError) as caught:
        source_hash("net.model:build", tmp_path)
    assert str(tmp_path / "net" / "model.py") in str(caught.value)
    assert str(tmp_path / "net" / "model" / "__init__.py") in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import *\n",
        "from elsewhere import make as build\n",
        "if True:\n    def build(): ...\n",
        "build = lambda: None\n",
    ],
)
def test_a_function_may_be_bound_in_any_way(tmp_path, source) -> None:
    write(tmp_path, model=source)
    assert source_hash("model:build", tmp_path)


def test_a_data_file_is_hashed_by_its_bytes(tmp_path) -> None:
    (tmp_path / "book.txt").write_bytes(b"abc")
    # The well-known SHA-256 of "abc" begins so.
    assert file_hash(tmp_path / "book.txt") == "ba7816bf8f01cfea"


def test_a_missing_data_file_is_named(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the data file .*book\.txt: No such file"):
        file_hash(tmp_path / "book.txt")
