"""Text of others: nothing in it acts on a terminal, and what is kept of it has an end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from results.foreign_text import in_json, shortened, visible


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain, \u00e4\u4e2d\U0001f600 and a\ttab\nand a line", None),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("over\rwritten\x08", r"over\x0dwritten\x08".replace(r"\x0d", r"\r")),
        # The eight-bit forms of escape sequences.
        ("\x9b31m \x85", r"\x9b31m \x85"),
        ("abc\u202edcba\u2066 \u200f\u061c", r"abc\u202edcba\u2066 \u200f\u061c"),
        ("a\u2028b", r"a\u2028b"),
        ("half of a pair \ud83d", r"half of a pair \ud83d"),
        (r"already \x1b", None),
    ],
)
def test_control_characters_are_shown_and_do_not_act(said, shown) -> None:
    assert visible(said) == (said if shown is None else shown)
    assert visible(visible(said)) == visible(said)


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("x" * 400) == "x" * 400
    assert shortened("ab" + "x" * 1_000_000 + "yz", most=4) == "ab ... (1,000,000 characters left out) ... yz"


def test_json_has_the_same_value_without_acting_characters() -> None:
    value = {"a": "\x9b31m \x80\x7f\u202e plain \u00e4\u4e2d\U0001f600 \\\\", "b\x85": 1}
    raw = json.dumps(value, ensure_ascii=False, indent=2)
    assert json.loads(in_json(raw)) == value
    assert visible(in_json(raw)) == in_json(raw) != raw


def test_warnings_and_tracebacks_do_not_act_on_a_terminal() -> None:
    program = (
        "import warnings; from results.foreign_text import escape_unprintable; escape_unprintable(); "
        "warnings.warn('a\\x1b[2J'); raise ValueError('b\\x1b]0;c')"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "\x1b" not in said.stderr
    assert r"UserWarning: a\x1b[2J" in said.stderr
    assert r"ValueError: b\x1b]0;c" in said.stderr
