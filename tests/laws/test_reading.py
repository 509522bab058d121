"""Files are read through one guarded opening: `results/files.py`. Code elsewhere that opens a file to read
may wait for ever at a FIFO, or fill the memory."""

from __future__ import annotations

import ast

import pytest
from sources import sources

pytestmark = pytest.mark.xdist_group("sources")
EXCEPTIONS = {
    "results/files.py: open": "the guarded opening itself",
    "results/extensions.py: read_text": "metadata of an installed package, by importlib.metadata",
    "harness/machine/code.py: read_text": "metadata of an installed package, by importlib.metadata",
    "harness/machine/kernel.py: open": "a network namespace of this process, which is not read",
    "harness/cli/__init__.py: open": "the null device, as standard output",
    "harness/launch/guardian.py: open": "files of the kernel; the guardian imports only Python's own modules",
    "harness/features/programs/worker/shim.py: read_text": "it runs without bench",
    "harness/worker/__main__.py: read_bytes": "a file of the kernel",
    "harness/worker/rank/log.py: open": "what is open in this process already",
}


def opens_to_read(call: ast.Call) -> str | None:
    """The name by which a call opens a file to read; None for any other call."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("read_text", "read_bytes"):
        return name
    if name not in ("open", "fdopen"):
        return None
    texts = [
        one.value for one in ast.walk(call) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    modes = [text for text in texts if text and set(text) <= set("rwxab+t")]
    return None if modes and "r" not in modes[0] and "+" not in modes[0] else name


def test_only_the_exceptions_open_a_file_to_read() -> None:
    found = {
        f"{file}: {name}"
        for file, tree in sources().items()
        if file.startswith(("results/", "reports/", "harness/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := opens_to_read(node)) is not None
    }
    assert found == set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("open(path)", "open"),
        ("path.open(encoding='utf-8')", "open"),
        ("path.open('r+b')", "open"),
        ("os.open(path, os.O_RDONLY)", "open"),
        ("path.read_bytes()", "read_bytes"),
        ("path.open('ab')", None),
        ("open(path, 'xb', opener=no_follow)", None),
    ],
)
def test_what_opens_to_read(text, name) -> None:
    [call] = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert opens_to_read(call) == name
