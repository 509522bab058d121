"""`bench schema`, and the examples of the files whose schemas it prints."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from harness.cli import run


def keep_the_schema(kind: str, examples: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fail unless the printed schema takes the examples in docs, and no unknown key."""
    assert run(["schema", kind]) == 0
    schema = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    schema.check_schema(schema.schema)
    found = list((Path(__file__).parents[2] / "docs").glob(f"{examples}.yaml"))
    assert found
    for path in found:
        schema.validate(yaml.safe_load(path.read_text()))
    assert not schema.is_valid({"no_such_key": 1})
