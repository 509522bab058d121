"""The proof of a cell, as the tests of the worker have it, for engines."""

from __future__ import annotations

from pathlib import Path

from packages import module_at

_FIXTURES = module_at(Path(__file__).parents[1] / "worker" / "conftest.py")
one_thread, proofs, whole_runs = _FIXTURES.one_thread, _FIXTURES.proofs, _FIXTURES.whole_runs
