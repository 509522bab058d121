"""Formulas give what arithmetic gives, and all else is refused."""

from __future__ import annotations

import pytest

from harness.features.programs.formula import names, value
from results.errors import SpecError

AXES = {"gpus": 8, "batch_size": 6, "zero": 0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 7", 7),
        ("2 + 3 * 4 - (2 + 3) * 2", 4),
        ("20 - 3 - 4", 13),  # from the left
        ("7 // 2 * 2", 6),
        ("batch_size / 4\n* gpus", 12),  # 1.5 in between
        ("7/2//1", 3),
        ("9" * 200, 10**200 - 1),
    ],
)
def test_a_formula_gives_what_arithmetic_gives(text, expected) -> None:
    assert value(text, AXES) == expected


BAD = ["", "gpus *", "gpus 2", "-1", "1.5", "1e3", "True", "2 ** 3", "(1 + 2", "()", "__import__('os')"]
BAD += ["a.b", "x if y else z", "not x", "gpus % 2", "9" * 5000, "\u0662", "(" * 99 + "1"]


@pytest.mark.parametrize("text", BAD)
def test_all_else_is_refused(text) -> None:
    with pytest.raises(SpecError, match="a formula takes"):
        names(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus * batchsize", ["'batchsize'", "did you mean 'batch_size'?"]),
        ("gpus // zero", ["zero"]),
        ("gpus / (3 - 3)", ["zero"]),
        ("gpus / 3", ["8/3", "whole", "gpus 8"]),
        ("zero", ["at least 1"]),
        ("batch_size - gpus", ["-2", "at least 1", "batch_size 6, gpus 8"]),
    ],
)
def test_a_value_that_cannot_be_used_is_explained(text, words) -> None:
    with pytest.raises(SpecError) as caught:
        value(text, AXES)
    assert [word for word in words if word not in str(caught.value)] == []
