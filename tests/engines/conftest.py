"""The proof of a cell, as the tests of the worker have it, for engines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "worker_fixtures", Path(__file__).parents[1] / "worker" / "conftest.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_FIXTURES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FIXTURES)
one_thread, proofs, whole_runs = _FIXTURES.one_thread, _FIXTURES.proofs, _FIXTURES.whole_runs
